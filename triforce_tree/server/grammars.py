"""Grammars of requests, compiled in the processes that read requests, where time and memory are limited."""

import json
import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from transformers import PreTrainedTokenizerBase

from triforce_tree.grammar import EBNF
from triforce_tree.server.refusals import RefusedError
from triforce_tree.server.tools.calls import Shape, constant, sequence

# xgrammar writes the time and a place in its source before each message.
_PLACE = re.compile(r"\[[\d:]+\] \S+:\d+: ")
_SHOWN_CHARACTERS = 300


class GrammarTexts:
    """Converts structures of texts to EBNF grammars for one tokenizer.

    Args:
        tokenizer: the target's tokenizer.
        vocabulary: size of the target's vocabulary.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._special = {
            str(token): id for id, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        self._grammars: Any = None
        # Whether a grammar can be compiled does not depend on the tokens that end a text.
        self._ends = [tokenizer.eos_token_id or 0]

    def prepare(self) -> None:
        """Imports xgrammar, if it is installed, and reads the vocabulary, which takes seconds."""
        if self._grammars is None and find_spec("xgrammar") is not None:
            from triforce_tree.grammar.matching import Grammars

            self._grammars = Grammars(self._tokenizer, self._vocabulary)
            self._grammars.compile(EBNF('root ::= "a"'), self._ends)

    def text(self, shape: Shape) -> str:
        """Returns the EBNF grammar of texts with a structure.

        Raises:
            RefusedError: xgrammar is not installed, or refuses the structure.
        """
        self.prepare()
        if self._grammars is None:
            raise RefusedError(
                "this server cannot constrain texts, as response_format, a forced tool_choice and strict "
                "tools need; install xgrammar there: pip install 'triforce-tree[grammar]'"
            )
        from xgrammar import Grammar

        tag = {"type": "structural_tag", "format": _with_tokens(shape, self._special)}
        try:
            text = str(Grammar.from_structural_tag(json.dumps(tag)))
            self._grammars.compile(EBNF(text), self._ends)
        except (RuntimeError, ValueError, TypeError) as problem:
            why = _PLACE.sub("", " ".join(str(problem).split()))[:_SHOWN_CHARACTERS]
            raise RefusedError(f"the constraint of the text is refused: {why}") from problem
        return text


def _with_tokens(shape: Shape, tokens: Mapping[str, int]) -> Shape:
    """Returns a structure in which the names of special tokens in constant texts are replaced by the tokens,
    because these names are no text.

    Args:
        shape: a structure of which no schema is changed.
        tokens: the ids of special tokens by name.
    """
    if not tokens:
        return shape
    names = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))

    def replaced(part: Any, as_tag: bool = False) -> Any:
        if part["type"] == "const_string":
            return split(part["value"])
        if part["type"] == "triggered_tags":
            return triggered(part)
        if part["type"] == "tag":
            content = replaced(part["content"])
            if not names.search(part["begin"] + part["end"]):
                return {**part, "content": content}
            inner = sequence(split(part["begin"]), content, split(part["end"]))
            return {"type": "tag", "begin": "", "content": inner, "end": ""} if as_tag else inner
        lists = {
            key: [replaced(each, key == "tags") for each in part[key]]
            for key in ("elements", "tags") if key in part
        }  # fmt: skip
        return {**part, **lists, **({"content": replaced(part["content"])} if "content" in part else {})}

    def triggered(part: Shape) -> Shape:
        [trigger], changed = part["triggers"], dict(part)
        begin: Any = trigger
        if trigger in tokens:
            begin = {"type": "token", "token": tokens[trigger]}
            changed |= {"type": "token_triggered_tags", "trigger_tokens": [tokens[trigger]]}
            del changed["triggers"]
        changed["tags"] = [after(begin, each["begin"].removeprefix(trigger), each) for each in part["tags"]]
        return changed

    def after(begin: Any, rest: str, part: Shape) -> Shape:
        """Returns a tag that begins with a trigger alone, and ends with the last part of its own end."""
        *ending, end = split(part["end"])["elements"]
        inner = sequence(split(rest), replaced(part["content"]), *ending)
        return {"type": "tag", "begin": begin, "content": inner, "end": end.get("value", end)}

    def split(text: str) -> Shape:
        elements, end = [], 0
        for found in names.finditer(text):
            elements += [constant(text[end : found.start()])] * (found.start() > end)
            elements.append({"type": "token", "token": tokens[found[0]]})
            end = found.end()
        elements += [constant(text[end:])] * (end < len(text) or not elements)
        return sequence(*elements)

    changed: Shape = replaced(shape)
    return changed

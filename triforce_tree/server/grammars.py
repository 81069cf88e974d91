"""Grammars of requests, compiled in the processes that read requests, where time and memory are limited."""

import json
import re
from importlib.util import find_spec
from typing import Any

from transformers import PreTrainedTokenizerBase

from triforce_tree.grammar import EBNF
from triforce_tree.server.refusals import RefusedError
from triforce_tree.server.tools.calls import Shape
from triforce_tree.server.tools.special_tokens import with_tokens

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

        tag = {"type": "structural_tag", "format": with_tokens(shape, self._special)}
        try:
            text = str(Grammar.from_structural_tag(json.dumps(tag)))
            self._grammars.compile(EBNF(text), self._ends)
        except (RuntimeError, ValueError, TypeError) as problem:
            why = _PLACE.sub("", " ".join(str(problem).split()))[:_SHOWN_CHARACTERS]
            raise RefusedError(f"the constraint of the text is refused: {why}") from problem
        return text

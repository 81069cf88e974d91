"""Follows grammars token by token, through xgrammar."""

import json
import re
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache, partial
from importlib import import_module
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from triforce_tree.grammar.values import EBNF, Choice, Grammar, JSONObject, JSONSchema, Regex
from triforce_tree.option_checks import shortened

# Bytes of compiled grammars that are kept for later requests with the same grammar.
_KEPT_BYTES = 256 * 2**20
# Forced texts whose tokens are kept.
_KEPT_TEXTS = 4096
# The byte 255, which UTF-8 never has, in the kinds of vocabularies.
_NO_TEXT: dict[str, str | bytes] = {"BYTE_LEVEL": "ÿ", "BYTE_FALLBACK": "<0xFF>", "RAW": b"\xff"}
_PLACE = re.compile(r"^\[[^]]*\] \S+:\d+: ")


def words_of(vocabulary: int) -> int:
    """Returns how many words of 32 bits hold one bit for each token."""
    return -(-vocabulary // 32)


class _Tools(NamedTuple):
    """What the matchers of a vocabulary share.

    Attributes:
        filler: an ``xgrammar.BatchGrammarMatcher``.
        tokens_of: returns the tokens of a text.
        tokens: the number of tokens that have a text.
    """

    filler: Any
    tokens_of: Callable[[str], Sequence[int]]
    tokens: int


class Matcher:
    """The state of a grammar after some new tokens of a text.

    Args:
        matcher: an ``xgrammar.GrammarMatcher``.
        tools: shared by the matchers of a vocabulary.

    Attributes:
        ended: whether the last token was one that ends the text.
    """

    __slots__ = ("_matcher", "_tools", "ended")

    def __init__(self, matcher: Any, tools: "_Tools") -> None:
        self._matcher, self._tools = matcher, tools
        self.ended: bool = matcher.is_terminated()

    def accept(self, tokens: Sequence[int]) -> None:
        """Advances by new tokens.

        Raises:
            ValueError: the grammar does not allow one of them, which happens only where no token is left that
                the grammar and the other options allow.
        """
        for token in tokens:
            if not self._matcher.accept_token(token):
                raise ValueError(
                    "no token of the vocabulary is left that the grammar and the other options allow after "
                    "the new text so far; give a grammar whose characters the tokenizer has, or leave out "
                    "options that forbid tokens"
                )
        self.ended = self._matcher.is_terminated()

    def take_back(self, tokens: int) -> None:
        """Returns to the state before the last ``tokens`` tokens."""
        if tokens:
            self._matcher.rollback(tokens)
            self.ended = False

    def after(self, token: int) -> "Matcher | None":
        """Returns the state after one more token, or None if the grammar does not allow it."""
        if self.ended:
            return None
        copied = self._matcher.fork()
        return Matcher(copied, self._tools) if copied.accept_token(token) else None

    def masks_of_newest(self, tokens: Sequence[int], vocabulary: int) -> Tensor:
        """Returns the masks under which the newest n tokens were chosen, int32 ``[n, ceil(V / 32)]``, see
        :meth:`fill`.
        """
        state = self.copy()
        state.take_back(len(tokens))
        words = torch.empty(len(tokens), words_of(vocabulary), dtype=torch.int32, device="cpu")
        for row, token in enumerate(tokens):
            Matcher.fill([state], words, [row])
            state.accept([token])
        return words

    def share(self, words: Tensor) -> float:
        """Returns the share of all tokens with a text that a mask of this grammar allows.

        Args:
            words: int32 ``[ceil(V / 32)]`` in host memory, see :meth:`fill`.
        """
        return int(np.bitwise_count(words.numpy().view(np.uint32)).sum()) / self._tools.tokens

    def copy(self) -> "Matcher":
        return Matcher(self._matcher.fork(), self._tools)

    def forced(self, most: int) -> list[int]:
        """Returns at most ``most`` tokens of the text that must follow, as the tokenizer splits it. The model
        may split it in another way.
        """
        try:
            text = "" if self.ended else str(self._matcher.find_jump_forward_string())
        except UnicodeDecodeError:  # the text ends within a character
            return []
        tokens: list[int] = []
        state: Matcher | None = self
        for token in self._tools.tokens_of(text)[:most] if text else ():
            state = None if state is None else state.after(token)
            if state is None:
                break
            tokens.append(token)
        return tokens

    @staticmethod
    def fill(matchers: Sequence["Matcher"], words: Tensor, rows: Sequence[int]) -> None:
        """Writes which tokens may follow each of these states, none of which has ended.

        Args:
            words: int32 ``[R, ceil(V / 32)]`` in host memory, an output: bit j of word l says that token
                32 l + j may follow. Bits of the last word that belong to no token are arbitrary.
            rows: the row of ``words`` for each state.
        """
        if matchers:
            filler = matchers[0]._tools.filler
            filler.batch_fill_next_token_bitmask([each._matcher for each in matchers], words, list(rows))


class Grammars:
    """Compiles grammars for the vocabulary of a tokenizer, and keeps them for later requests.

    Args:
        tokenizer: the target's tokenizer; None if there is none, and then no grammar can be compiled.
        vocabulary: V of the target's logits.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        # Maps the tokens that end a text to a compiler, which must not take them for text.
        self._compilers: dict[frozenset[int], Any] = {}
        self._tools: _Tools
        self._lock = Lock()

    def matcher(self, grammar: Grammar, end_tokens: Collection[int]) -> Matcher:
        """Returns the state of a grammar before the first new token.

        Args:
            end_tokens: the tokens that end a text. They are allowed only where the grammar may end.

        Raises:
            ImportError, ValueError: see :meth:`compile`.
        """
        compiled = self.compile(grammar, end_tokens)
        return Matcher(_xgrammar().GrammarMatcher(compiled), self._tools)

    def compile(self, grammar: Grammar, end_tokens: Collection[int] | None = None) -> Any:
        """Returns an ``xgrammar.CompiledGrammar``, which is kept for the next call. Several threads may call
        it.

        Args:
            end_tokens: see :meth:`matcher`; None for the tokenizer's.

        Raises:
            ImportError: xgrammar is not installed.
            ValueError: there is no tokenizer or no token that ends a text, or the grammar cannot be compiled.
        """
        if self._tokenizer is None:
            raise ValueError("grammar needs a tokenizer: load(..., tokenizer=...)")
        if end_tokens is None:
            end_tokens = [] if self._tokenizer.eos_token_id is None else [self._tokenizer.eos_token_id]
        if not end_tokens:
            raise ValueError(
                "grammar needs a token that ends the text, and the model names none; give eos_token_id in "
                "the call or in the model's generation_config.json"
            )
        xgrammar, ends = _xgrammar(), frozenset(end_tokens)
        with self._lock:
            if ends not in self._compilers:
                self._add_compiler(xgrammar, self._tokenizer, ends)
        try:
            return _compiled(self._compilers[ends], grammar)
        except RuntimeError as error:
            raise ValueError(
                f"grammar={shortened(grammar)} cannot be compiled: {_PLACE.sub('', str(error)).strip()}"
            ) from error

    def _add_compiler(
        self, xgrammar: Any, tokenizer: PreTrainedTokenizerBase, end_tokens: frozenset[int]
    ) -> None:
        ends = sorted(end_tokens)
        read = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=self._vocabulary, stop_token_ids=ends
        )
        # Special tokens add nothing to the text, so that no grammar may take their names for text. Each has a
        # byte that no text has. Without any byte it would never be allowed, not even by a grammar that names
        # it by its id, as in Token(5), and xgrammar would clear it by itself in every mask, which takes long
        # where many ids have no token.
        byte = _NO_TEXT[read.vocab_type.name]
        names: list[str | bytes] = [byte] * self._vocabulary
        special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        for name, id in tokenizer.get_vocab().items():
            if id < self._vocabulary:
                names[id] = byte if id in special else name
        info = xgrammar.TokenizerInfo(
            names, read.vocab_type, vocab_size=self._vocabulary, stop_token_ids=ends,
            add_prefix_space=read.add_prefix_space,
        )  # fmt: skip
        if not self._compilers:
            encode = lru_cache(_KEPT_TEXTS)(partial(_encoded, tokenizer))
            # A mask takes a few microseconds, and starting threads in each call about a millisecond.
            filler = xgrammar.BatchGrammarMatcher(max_threads=1)
            self._tools = _Tools(filler, encode, len(names) - names.count(byte))
        self._compilers[end_tokens] = xgrammar.GrammarCompiler(info, cache_limit_bytes=_KEPT_BYTES)


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def _compiled(compiler: Any, grammar: Grammar) -> Any:
    match grammar:
        case JSONSchema(schema):
            return compiler.compile_json_schema(schema)
        case JSONObject():
            return compiler.compile_json_schema('{"type": "object"}', strict_mode=False)
        case Regex(pattern):
            return compiler.compile_regex(pattern)
        case EBNF(text):
            return compiler.compile_grammar(text)
        case Choice(options):
            texts = (json.dumps(option, ensure_ascii=False) for option in options)
            return compiler.compile_grammar(f"root ::= {' | '.join(texts)}")


def _xgrammar() -> Any:
    try:
        return import_module("xgrammar")
    except ImportError as error:
        raise ImportError(
            "grammar needs the package xgrammar; install it by pip install 'triforce-tree[grammar]'"
        ) from error

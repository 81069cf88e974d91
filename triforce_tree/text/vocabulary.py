"""The text and bytes of a tokenizer's tokens."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

REPLACEMENT = "\ufffd"
"""The character that replaces bytes that are not valid UTF-8."""
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""The names of tokens that are single bytes in vocabularies of SentencePiece."""


@dataclass(frozen=True)
class Token:
    """A token of a vocabulary.

    Attributes:
        special: whether it has a name, but no text.
        raw: its bytes if they do not depend on its neighbours, else None. An id that the tokenizer does not
            know has the bytes ``b""``.
        replaces: whether it spells the character that replaces invalid bytes, and so no part of another one.
    """

    special: bool
    raw: bytes | None
    replaces: bool


class Vocabulary:
    """Converts tokens to text and bytes.

    Args:
        tokenizer: any tokenizer of transformers, including slow ones and user-defined classes.

    Attributes:
        of_bytes: whether every token represents fixed bytes that do not depend on its neighbours (byte-level
            BPE).
        clean_up: the function that ``clean_up_tokenization_spaces`` applies to decoded text; None if the
            tokenizer applies none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.of_bytes = _is_byte_level(tokenizer)
        self.clean_up: Callable[[str], str] | None = _clean_up(tokenizer)
        self._tokens: dict[int, Token] = {}

    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        """Returns the text of tokens before a clean-up of spaces.

        Args:
            special: whether the text includes the names of special tokens.
        """
        options = {"clean_up_tokenization_spaces": False} if self.clean_up is not None else {}
        text: Any = self._tokenizer.decode(list(tokens), skip_special_tokens=not special, **options)
        return str(text)

    def name(self, token: int) -> str:
        """Returns the text of a single token; for a special token its name."""
        return self.decode([token], special=True)

    def token(self, token: int) -> Token:
        """Returns what is known of a token."""
        if token not in self._tokens:
            piece: Any = self._tokenizer.convert_ids_to_tokens(token)
            known = isinstance(piece, str)
            special = known and not self.decode([token]) and bool(self.name(token))
            raw = self._bytes_of(token, piece) if known else b""
            self._tokens[token] = Token(special, raw, known and REPLACEMENT in piece)
        return self._tokens[token]

    def _bytes_of(self, token: int, piece: str) -> bytes | None:
        if self.of_bytes:
            return bytes_of_characters(piece)
        byte = BYTE.fullmatch(piece)
        # If the decoder does not support byte tokens, "<0x0A>" is ordinary text.
        return bytes.fromhex(byte[1]) if byte and self.name(token) != piece else None


def _is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    kind = type(tokenizer)
    if kind.decode is not PreTrainedTokenizerBase.decode or not isinstance(
        tokenizer, PreTrainedTokenizerFast
    ):
        return False
    # A subclass may override the decoding.
    return kind._decode is PreTrainedTokenizerFast._decode and isinstance(
        tokenizer.backend_tokenizer.decoder, decoders.ByteLevel
    )


def _clean_up(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], str] | None:
    """Returns the clean-up that transformers applies in ``decode``: none for BPE, unless it is forced."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    spares = isinstance(getattr(backend, "model", None), BPE) and not getattr(
        tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False
    )
    if spares or not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return None
    cleaned: Callable[[str], str] = tokenizer.clean_up_tokenization
    return cleaned


def bytes_of_characters(piece: str) -> bytes:
    """Returns the bytes of a token of a byte-level vocabulary, each character of which stands for a byte."""
    table = _byte_of()
    try:
        return bytes([table[character] for character in piece])
    except KeyError:
        # Special tokens may contain characters that represent no byte.
        return piece.encode()


@cache
def _byte_of() -> dict[str, int]:
    return {character: byte for byte, character in bytes_to_unicode().items()}

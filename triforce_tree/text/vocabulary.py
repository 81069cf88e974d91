"""What the tokens of a tokenizer stand for."""

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from tokenizers import decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """Tokens as bytes and text.

    Args:
        tokenizer: any of transformers' kinds, slow ones and those of users included.

    Attributes:
        of_bytes: whether every token stands for bytes of its own, whatever is beside it (byte-level BPE).
        clean_up: what the tokenizer makes of decoded text with ``clean_up_tokenization_spaces``; None where
            it leaves text as it is.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.of_bytes = _is_byte_level(tokenizer)
        self.clean_up: Callable[[str], str] | None = _clean_up(tokenizer)
        self._raw: dict[int, bytes | None] = {}
        self._special: dict[int, bool] = {}

    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        """The text of tokens as it is before a clean-up of spaces.

        Args:
            special: whether special tokens show their names.
        """
        options = {"clean_up_tokenization_spaces": False} if self.clean_up is not None else {}
        text: Any = self._tokenizer.decode(list(tokens), skip_special_tokens=not special, **options)
        return str(text)

    def special(self, token: int) -> bool:
        """Whether a token has a name, but no text."""
        found = self._special.get(token)
        if found is None:
            found = self._piece(token) is not None and not self.decode([token]) and bool(self.name(token))
            self._special[token] = found
        return found

    def name(self, token: int) -> str:
        """The text of a token by itself; of a special token, its name."""
        return self.decode([token], special=True)

    def raw(self, token: int) -> bytes | None:
        """The bytes that a token stands for, whatever is beside it; None where only its text is known.

        A number that the tokenizer does not know stands for none.
        """
        if token not in self._raw:
            self._raw[token] = self._found(token)
        return self._raw[token]

    def _found(self, token: int) -> bytes | None:
        piece = self._piece(token)
        if piece is None:
            return b""
        if self.of_bytes:
            own = _byte_of()
            known = [own.get(character) for character in piece]
            return piece.encode() if None in known else bytes(byte for byte in known if byte is not None)
        byte = _BYTE.fullmatch(piece)
        # Where the decoder knows no byte tokens, these are characters as any others.
        return bytes.fromhex(byte[1]) if byte and self.name(token) != piece else None

    def _piece(self, token: int) -> str | None:
        piece: Any = self._tokenizer.convert_ids_to_tokens(token)
        return piece if isinstance(piece, str) else None


def _is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    own = type(tokenizer)
    if own.decode is not PreTrainedTokenizerBase.decode or not isinstance(tokenizer, PreTrainedTokenizerFast):
        return False
    # Subclasses may decode otherwise.
    return own._decode is PreTrainedTokenizerFast._decode and isinstance(
        tokenizer.backend_tokenizer.decoder, decoders.ByteLevel
    )


def _clean_up(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], str] | None:
    """As transformers decides it in ``decode``, which leaves BPE alone unless it is forced."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    spares = isinstance(getattr(backend, "model", None), BPE) and not getattr(
        tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False
    )
    if spares or not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return None
    cleaned: Callable[[str], str] = tokenizer.clean_up_tokenization
    return cleaned


@cache
def _byte_of() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}

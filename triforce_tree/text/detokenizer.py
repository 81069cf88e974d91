"""Converts new tokens to text one by one."""

import codecs
from collections.abc import Sequence

from triforce_tree.text.clean_up import CleanUp
from triforce_tree.text.vocabulary import Vocabulary

# The character that replaces bytes that are not valid UTF-8.
_REPLACEMENT = "\ufffd"
# New tokens are decoded together with at least _LEAST and at most _MOST tokens before them, the window.
_LEAST, _MOST = 8, 16
# If the last tokens of a prompt have no text, at most this many are searched for tokens with text.
_FARTHEST = 1 << 16
# A character has at most four bytes, and so at most four tokens.
_OF_ONE = 4
# If a tokenizer's bytes are not known, a text that ends in a replacement is held back for this many tokens.
_PARTS = 8


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return _REPLACEMENT * (error.end - error.start), error.end


# Tokenizers with byte tokens replace each byte of a broken character by one replacement; byte-level
# tokenizers replace all its bytes by a single one.
codecs.register_error("triforce_tree.each_byte", _each_byte)


class Detokenizer:
    """Returns the text that new tokens add to a prompt, without special tokens, as soon as it is certain.

    A token is decoded together with a window of tokens before it, since many tokenizers decode the first
    token of a text differently. Bytes of a character that is split over tokens are joined here. The time per
    token does not depend on the number of earlier tokens.

    Args:
        vocabulary: the vocabulary of the tokenizer.
        prompt: token ids of the prompt.
    """

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        errors = "replace" if vocabulary.of_bytes else "triforce_tree.each_byte"
        self._bytes = codecs.getincrementaldecoder("utf-8")(errors)
        # The prompt may end within a character. The prompt's text then ends in this many replacements, which
        # the new text must not repeat.
        self._owed = 0
        if open_bytes := _incomplete(vocabulary, prompt):
            self._bytes.decode(open_bytes)
            self._owed = 1 if vocabulary.of_bytes else len(open_bytes)
        self._window = [] if vocabulary.of_bytes else _context(vocabulary, prompt)
        self._base: str | None = None
        # Tokens whose text may end within a character, and the number of its characters already returned.
        self._open: list[int] = []
        self._given = 0
        self._clean_up = CleanUp(vocabulary.clean_up) if vocabulary.clean_up is not None else None
        self._length = 0

    @property
    def length(self) -> int:
        """The number of characters of the text so far, without incomplete ones."""
        return self._length if self._clean_up is None else self._clean_up.length

    def put(self, token: int) -> str:
        """Adds a token that is not special, and returns the text that is certain now."""
        raw = self._vocabulary.raw(token)
        if raw is None:
            text = self._whole(self._bytes.decode(b"", final=True)) + self._decoded(token)
        else:
            text = self._decoded(None) + self._whole(self._bytes.decode(raw))
            if not self._vocabulary.of_bytes and raw:
                self._slide([token])
        return self._cleaned(text)

    def end(self) -> str:
        """Returns the rest of the text after the last token."""
        text = self._cleaned(self._whole(self._bytes.decode(b"", final=True)) + self._decoded(None))
        return text if self._clean_up is None else text + self._clean_up.end()

    def added(self, token: int) -> bytes | None:
        """Returns the bytes that a token would add to the text now; None if they are not known."""
        raw = self._vocabulary.raw(token)
        if raw is not None:
            return raw
        text, _ = self._added([*self._open, token])
        before = self._added(self._open)[0] if self._open else ""
        return None if _REPLACEMENT in text else text.removeprefix(before).encode()

    def named(self, token: int) -> str:
        """Returns the text of a special token as it would be shown after the tokens before it."""
        if self._vocabulary.of_bytes:
            return self._vocabulary.name(token)
        whole = self._vocabulary.decode([*self._window, token], special=True)
        return _after(self._before(), whole)

    def _decoded(self, token: int | None) -> str:
        """Returns the certain text of a token decoded after the window; for None the rest of open tokens."""
        if token is not None:
            self._open.append(token)
        elif not self._open:
            return ""
        (text, whole), given = self._added(self._open), self._given
        if token is not None and text.endswith(_REPLACEMENT) and len(self._open) < _PARTS:
            certain = text.rstrip(_REPLACEMENT)
            self._given = max(given, len(certain))
            return certain[given:]
        self._slide(self._open, whole)
        self._open, self._given = [], 0
        return text[given:]

    def _added(self, tokens: Sequence[int]) -> tuple[str, str]:
        """Returns the text of ``tokens`` after the window, and the text of window and tokens."""
        whole = self._vocabulary.decode([*self._window, *tokens])
        return _after(self._before(), whole), whole

    def _before(self) -> str:
        if self._base is None:
            self._base = self._vocabulary.decode(self._window)
        return self._base

    def _slide(self, tokens: Sequence[int], base: str | None = None) -> None:
        self._window, self._base = [*self._window, *tokens], base
        if len(self._window) > _MOST:
            self._window, self._base = _context(self._vocabulary, self._window), None

    def _whole(self, text: str) -> str:
        """Removes the replacements at the beginning that the prompt's text already ends in."""
        if not self._owed or not text:
            return text
        owed, self._owed = self._owed, 0
        broken = len(text) - len(text.lstrip(_REPLACEMENT))
        return text[min(owed, broken) :]

    def _cleaned(self, text: str) -> str:
        self._length += len(text)
        return text if self._clean_up is None else self._clean_up.put(text)


def _after(before: str, whole: str) -> str:
    """Returns the part of ``whole`` after ``before``."""
    if whole.startswith(before):
        return whole[len(before) :]
    # Some decoders change the end of a text when more tokens follow. Then the part after the common prefix is
    # returned.
    same = next((n for n, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(whole))
    return whole[same:]


def _context(vocabulary: Vocabulary, tokens: Sequence[int]) -> list[int]:
    """Returns the last tokens that are not special, so many that their text begins with a whole character."""
    count, whole = _LEAST, list(tokens[-_LEAST:])
    while count < min(len(tokens), _FARTHEST):
        text = vocabulary.decode(whole)
        if text and not (text.startswith(_REPLACEMENT) and count < _MOST):
            break
        count += _OF_ONE if text else count
        whole = list(tokens[-count:])
    return [token for token in whole if not vocabulary.special(token)]


def _incomplete(vocabulary: Vocabulary, tokens: Sequence[int]) -> bytes:
    """Returns the bytes of an incomplete character at the end of tokens."""
    last = b""
    for token in reversed(tokens[-4 * _OF_ONE :]):
        if vocabulary.special(token):
            continue
        raw = vocabulary.raw(token)
        if raw is None or len(last) >= _OF_ONE:
            break
        last = raw + last
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    decoder.decode(last)
    return decoder.getstate()[0]

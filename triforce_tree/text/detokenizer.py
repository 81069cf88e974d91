"""New tokens as text, one by one: the text that they add to that of the tokens before them."""

import codecs
from collections.abc import Sequence

from triforce_tree.text.clean_up import CleanUp
from triforce_tree.text.vocabulary import Vocabulary

# What stands for bytes that are no character.
_REPLACEMENT = "\ufffd"
# Tokens that new ones are decoded behind: at least, and at most.
_LEAST, _MOST = 8, 16
# Tokens at the end of a prompt that are looked at where the last ones have no text.
_FARTHEST = 1 << 16
# A character has at most four bytes, and so many tokens.
_OF_ONE = 4
# Tokens whose text ends in a part of a character, to tokenizers whose bytes are not known.
_PARTS = 8


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return _REPLACEMENT * (error.end - error.start), error.end


# As tokenizers with byte tokens show broken characters; byte-level ones show one for all bytes of each.
codecs.register_error("triforce_tree.each_byte", _each_byte)


class Detokenizer:
    """The text that new tokens add to a prompt's, without special tokens, as soon as it is certain.

    A token is decoded behind those before it, as many tokenizers treat the first token of a text otherwise;
    bytes of characters are put together here. The work for a token does not depend on how many came before,
    and the text does not depend on the passes that brought them.

    Args:
        vocabulary: of the tokenizer.
        prompt: token ids that the text goes on from.
    """

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        errors = "replace" if vocabulary.of_bytes else "triforce_tree.each_byte"
        self._bytes = codecs.getincrementaldecoder("utf-8")(errors)
        # The prompt may end within a character; its text shows replacements for it, which new text omits.
        self._owed = 0
        if open_bytes := _incomplete(vocabulary, prompt):
            self._bytes.decode(open_bytes)
            self._owed = 1 if vocabulary.of_bytes else len(open_bytes)
        self._window = [] if vocabulary.of_bytes else _context(vocabulary, prompt)
        self._base: str | None = None
        # Tokens whose text may end within a character, and how much of it was given.
        self._open: list[int] = []
        self._given = 0
        self._clean_up = CleanUp(vocabulary.clean_up) if vocabulary.clean_up is not None else None
        self._length = 0

    @property
    def length(self) -> int:
        """Characters of the text so far, without parts of characters."""
        return self._length if self._clean_up is None else self._clean_up.length

    def put(self, token: int) -> str:
        """The characters that are certain after another token, which is no special one."""
        raw = self._vocabulary.raw(token)
        if raw is None:
            text = self._whole(self._bytes.decode(b"", final=True)) + self._behind(token)
        else:
            text = self._behind(None) + self._whole(self._bytes.decode(raw))
            if not self._vocabulary.of_bytes and raw:
                self._slide([token])
        return self._cleaned(text)

    def end(self) -> str:
        """What is left when no more tokens come."""
        text = self._cleaned(self._whole(self._bytes.decode(b"", final=True)) + self._behind(None))
        return text if self._clean_up is None else text + self._clean_up.end()

    def added(self, token: int) -> bytes | None:
        """The bytes that a token would add to the text now; None where they are not known."""
        raw = self._vocabulary.raw(token)
        if raw is not None:
            return raw
        text, _ = self._added([*self._open, token])
        before = self._added(self._open)[0] if self._open else ""
        return None if _REPLACEMENT in text else text.removeprefix(before).encode()

    def named(self, token: int) -> str:
        """The text of a special token as it would be shown behind those before it."""
        if self._vocabulary.of_bytes:
            return self._vocabulary.name(token)
        whole = self._vocabulary.decode([*self._window, token], special=True)
        return _after(self._before(), whole)

    def _behind(self, token: int | None) -> str:
        """The certain characters of a token that is decoded behind others; None: what is left of them."""
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
        """The text of tokens behind the window, and that of both."""
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
        """Text of bytes, without the replacements that the prompt's text shows already."""
        if not self._owed or not text:
            return text
        owed, self._owed = self._owed, 0
        broken = len(text) - len(text.lstrip(_REPLACEMENT))
        return text[min(owed, broken) :]

    def _cleaned(self, text: str) -> str:
        self._length += len(text)
        return text if self._clean_up is None else self._clean_up.put(text)


def _after(before: str, whole: str) -> str:
    """What a whole text has beyond an earlier one."""
    if whole.startswith(before):
        return whole[len(before) :]
    # A decoder that changes the end of a text when it goes on.
    same = next((n for n, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(whole))
    return whole[same:]


def _context(vocabulary: Vocabulary, tokens: Sequence[int]) -> list[int]:
    """The last tokens, as many as have a text that begins with a whole character."""
    count, whole = _LEAST, list(tokens[-_LEAST:])
    while count < min(len(tokens), _FARTHEST):
        # Without the names of special tokens, behind which the text goes on.
        text = vocabulary.decode(whole)
        if text and not (text.startswith(_REPLACEMENT) and count < _MOST):
            break
        count += _OF_ONE if text else count
        whole = list(tokens[-count:])
    return [token for token in whole if not vocabulary.special(token)]


def _incomplete(vocabulary: Vocabulary, tokens: Sequence[int]) -> bytes:
    """The bytes of an incomplete character at the end of tokens."""
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

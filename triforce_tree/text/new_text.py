"""The text that new tokens add to a prompt, as it becomes certain, up to a stop string or an end token."""

import codecs
from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerBase

from triforce_tree.text.clean_up import CleanUp
from triforce_tree.text.stop_strings import StopMatcher
from triforce_tree.text.vocabulary import REPLACEMENT, Vocabulary

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
    return REPLACEMENT * (error.end - error.start), error.end


# Tokenizers with byte tokens replace each byte of a broken character by one replacement; byte-level
# tokenizers replace all its bytes by a single one.
codecs.register_error("triforce_tree.each_byte", _each_byte)


class NewText:
    """Takes new tokens one by one, and returns their text as soon as it is certain.

    Special tokens and end tokens have no text, but a stop string may contain their names. Special tokens in
    ``shown`` have their names as text.

    A token is decoded together with a window of tokens before it, since many tokenizers decode the first
    token of a text differently. Bytes of a character that is split over tokens are joined. The time per token
    does not depend on the number of earlier tokens.

    Args:
        vocabulary: the vocabulary of the tokenizer.
        prompt: token ids of the prompt.
        end_tokens: token ids that end the sequence.
        stop: strings before which the text ends. Only new text is searched.
        shown: ids of special tokens whose names are text.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt: Sequence[int],
        end_tokens: Collection[int] = (),
        stop: Sequence[str] = (),
        shown: Collection[int] = (),
    ) -> None:
        self._vocabulary, self._ends, self._shown = vocabulary, end_tokens, shown
        self._matcher = StopMatcher(stop) if stop else None
        errors = "replace" if vocabulary.of_bytes else "triforce_tree.each_byte"
        self._bytes = codecs.getincrementaldecoder("utf-8")(errors)
        # The prompt may end within a character. The prompt's text then ends in this many replacements, which
        # the new text must not repeat.
        self._owed = 0
        if open_bytes := _incomplete(vocabulary, prompt):
            self._bytes.decode(open_bytes)
            self._owed = len(open_bytes.decode("utf-8", errors))
        self._window = [] if vocabulary.of_bytes else _context(vocabulary, prompt)
        self._base: str | None = None
        # Tokens whose text may end within a character, and the number of its characters already returned.
        self._open: list[int] = []
        self._given = 0
        self._clean_up = CleanUp(vocabulary.clean_up) if vocabulary.clean_up is not None else None
        self._length = 0

    @property
    def stopped(self) -> bool:
        """Returns whether a stop string was found."""
        return self._matcher is not None and self._matcher.found

    @property
    def length(self) -> int:
        """The number of characters so far, including those not returned yet, without incomplete ones."""
        return self._length if self._clean_up is None else self._clean_up.length

    def search(self, stop: Sequence[str]) -> None:
        """Searches the text of later tokens for stop strings."""
        self._matcher = StopMatcher(stop) if stop else None

    def hidden(self, token: int) -> bool:
        """Returns whether a token has no text."""
        return token in self._ends or (self._vocabulary.token(token).special and token not in self._shown)

    def put(self, token: int) -> str:
        """Adds a token, and returns the text that is certain now."""
        hidden = self.hidden(token)
        if self._matcher is None:
            return "" if hidden else self._added(token)
        if hidden:
            return self._matcher.put(self._name(token), visible=False)
        return self._matcher.put(self._added(token))

    def end(self) -> str:
        """Returns the rest of the text after the last token."""
        text = self._rest()
        if self._clean_up is not None:
            text = self._clean_up.put(text) + self._clean_up.end()
        self._length += len(text)
        return text if self._matcher is None else self._matcher.put(text) + self._matcher.end()

    def spelled(self, token: int) -> tuple[str, bytes | None]:
        """Returns the text and the bytes that a token would add now.

        For part of a character the text is like ``bytes:\\xe4\\xbd``. For a token without text, or whose
        bytes are not known, the result is the token's name and None.
        """
        raw = self._vocabulary.token(token).raw
        if raw is None:
            text, _ = self._after_window([*self._open, token])
            before = self._after_window(self._open)[0] if self._open else ""
            broken = REPLACEMENT in text and not self._vocabulary.token(token).replaces
            raw = None if broken else text.removeprefix(before).encode()
        if raw is None or self.hidden(token):
            return self._vocabulary.name(token), None
        try:
            return raw.decode(), raw
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw

    def _added(self, token: int) -> str:
        """Returns the text that is certain after a token that has text."""
        known = self._vocabulary.token(token)
        raw = known.raw
        if known.special:
            text = self._rest() + self._name(token)
        elif raw is None:
            text = self._of_bytes(b"", final=True) + self._decoded(token)
        else:
            text = (self._decoded(None) if self._open else "") + self._of_bytes(raw)
            if not self._vocabulary.of_bytes and raw:
                self._slide([token])
        self._length += len(text)
        return text if self._clean_up is None else self._clean_up.put(text)

    def _rest(self) -> str:
        """Returns the text of bytes and tokens that were held back."""
        return self._of_bytes(b"", final=True) + (self._decoded(None) if self._open else "")

    def _of_bytes(self, raw: bytes, final: bool = False) -> str:
        """Returns the characters that bytes complete, without the replacements that the prompt's text already
        ends in.
        """
        text = self._bytes.decode(raw, final)
        if self._owed and text:
            owed, self._owed = self._owed, 0
            broken = len(text) - len(text.lstrip(REPLACEMENT))
            return text[min(owed, broken) :]
        return text

    def _name(self, token: int) -> str:
        """Returns the text of a special token as it would be shown after the tokens before it."""
        if self._vocabulary.of_bytes:
            return self._vocabulary.name(token)
        return _after(self._before(), self._vocabulary.decode([*self._window, token], special=True))

    def _decoded(self, token: int | None) -> str:
        """Returns the certain text of a token decoded after the window; for None the rest of open tokens."""
        if token is not None:
            self._open.append(token)
        (text, whole), given = self._after_window(self._open), self._given
        open_end = text.endswith(REPLACEMENT) and len(self._open) < _PARTS
        if token is not None and open_end and not self._vocabulary.token(token).replaces:
            certain = text.rstrip(REPLACEMENT)
            self._given = max(given, len(certain))
            return certain[given:]
        self._slide(self._open, whole)
        self._open, self._given = [], 0
        return text[given:]

    def _after_window(self, tokens: Sequence[int]) -> tuple[str, str]:
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


def new_text(
    tokenizer: PreTrainedTokenizerBase | Vocabulary,
    prompt: Sequence[int],
    new: Sequence[int],
    end_tokens: Collection[int] = (),
) -> str:
    """Returns the text that the tokens ``new`` add to the prompt."""
    vocabulary = tokenizer if isinstance(tokenizer, Vocabulary) else Vocabulary(tokenizer)
    text = NewText(vocabulary, prompt, end_tokens)
    return "".join([*map(text.put, new), text.end()])


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
        if text and not (text.startswith(REPLACEMENT) and count < _MOST):
            break
        count += _OF_ONE if text else count
        whole = list(tokens[-count:])
    return [token for token in whole if not vocabulary.token(token).special]


def _incomplete(vocabulary: Vocabulary, tokens: Sequence[int]) -> bytes:
    """Returns the bytes of an incomplete character at the end of tokens."""
    last = b""
    for token in reversed(tokens[-4 * _OF_ONE :]):
        known = vocabulary.token(token)
        if known.special:
            continue
        if known.raw is None or len(last) >= _OF_ONE:
            break
        last = known.raw + last
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    decoder.decode(last)
    return decoder.getstate()[0]

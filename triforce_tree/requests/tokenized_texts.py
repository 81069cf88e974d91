"""Token ids of a text that extends an earlier one. Only the part after the earlier text is tokenized.

BPE ids depend on the whole text, because merges may cross the place where the earlier text ended. But merges
are local: a sequence of ids is the tokenization of a text if each two neighbours are the tokenization of
their own two texts. So some characters before the first change are tokenized twice, once with the end of the
earlier text and once with the end of the new one. From the first token at which the former agrees with the
ids of the earlier text, both tokenizations split the text alike, and the tail of the latter equals the tail
of the whole text's ids. If no such token is found, the whole text is tokenized.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase

Ids = np.ndarray[Any, np.dtype[np.int64]]

# Characters before the first changed one that are tokenized again: in runs of one character, or of digits,
# tokens may agree late.
_WINDOWS = 2048, 32_768
# The old and the new tokenization must agree in at least this many tokens before the first one that differs.
_SURE = 16
# Share of a text's characters that its tokenization by parts may take.
_MOST = 0.5


class PromptError(ValueError):
    """A prompt cannot be continued. The reason may be shown to the person who sent the prompt.

    Args:
        sentence: the reason, written by this package or by a chat template.
        detail: the text of another library's error. Python users see it; a server writes it only to its log.
    """

    def __init__(self, sentence: str, detail: str = "") -> None:
        self.sentence = sentence
        super().__init__(f"{sentence}: {detail}" if detail else sentence)


# Exceptions that are not reported as failures of a tokenizer or a template.
PASSED_ON = (PromptError, ImportError, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit)


@dataclass(frozen=True)
class _Known:
    """A text whose ids are known, and whether special tokens were added to them."""

    text: str
    ids: Ids
    special: bool


class TokenizedTexts:
    """A tokenizer that remembers its newest texts, and tokenizes only the new part of a text that extends
    one.

    It replaces the tokenizer where prompts are read, and returns the same ids as the tokenizer.

    Args:
        tokenizer: every text is tokenized whole unless it is a BPE tokenizer of the ``tokenizers`` library.
        texts: the most texts that are remembered. A text takes about 5 bytes per character.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: int = 4) -> None:
        self.tokenizer, self._texts, self._lock = tokenizer, texts, Lock()
        self._known: list[_Known] = []
        backend = getattr(tokenizer, "backend_tokenizer", None)
        model = getattr(backend, "model", None)
        self._by_parts = isinstance(model, BPE) and not model.dropout
        own = getattr(type(tokenizer), "apply_chat_template", None)
        # Another one may render messages to ids without a text.
        self._renders = own is PreTrainedTokenizerBase.apply_chat_template

    @property
    def chat_template(self) -> Any:
        return getattr(self.tokenizer, "chat_template", None)

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        """Returns the tokenizer's ``input_ids`` of a text."""
        return {"input_ids": self._ids(text, add_special_tokens)}

    def apply_chat_template(self, chat: Sequence[dict[str, Any]], **options: Any) -> dict[str, list[int]]:
        """Returns the tokenizer's ``input_ids`` of messages."""
        if not self._renders:
            encoded: Any = self.tokenizer.apply_chat_template(list(chat), **options)
            return {"input_ids": list(encoded["input_ids"])}
        text: Any = self.tokenizer.apply_chat_template(
            list(chat), **{**options, "tokenize": False, "return_dict": False}
        )
        return {"input_ids": self._ids(text, False)}

    def _ids(self, text: str, special: bool) -> list[int]:
        if not self._by_parts:
            return _listed(self._encoded(text, special))
        with self._lock:
            known = [each for each in self._known if each.special == special]
        shared, number = max(((_common(each.text, text), n) for n, each in enumerate(known)), default=(0, 0))
        ids: Ids | None = None
        for window in _WINDOWS:
            if ids is None and shared:
                ids = self._continued(known[number], text, shared, window)
        if ids is None:
            ids = self._encoded(text, special)
        with self._lock:
            # A text that goes on is remembered in the place of its beginning.
            kept = [each for each in self._known if each.special != special or not text.startswith(each.text)]
            self._known = [*kept, _Known(text, ids, special)][-self._texts :]
        return _listed(ids)

    def _continued(self, known: _Known, text: str, shared: int, window: int) -> Ids | None:
        """Returns the ids of a text whose first ``shared`` characters equal those of a known text, or None if
        the ids are not certain.
        """
        start = max(0, shared - window)
        if len(known.text) + len(text) - 2 * start > _MOST * len(text):
            return None
        old, new = self._encoded(known.text[start:], False), self._encoded(text[start:], False)
        count = min(len(old), len(known.ids))
        differing = np.flatnonzero(old[len(old) - count :] != known.ids[len(known.ids) - count :])
        agreeing = count - (int(differing[-1]) + 1 if len(differing) else 0)
        first = len(old) - agreeing
        count = min(len(old), len(new))
        differing = np.flatnonzero(old[:count] != new[:count])
        same = int(differing[0]) if len(differing) else count
        if same - first < _SURE:
            return None
        return np.concatenate([known.ids[: len(known.ids) - agreeing], new[first:]])

    def _encoded(self, text: str, special: bool) -> Ids:
        return np.asarray(text_ids(self.tokenizer, text, add_special_tokens=special), np.int64)


Tokenizer = PreTrainedTokenizerBase | TokenizedTexts


def text_ids(tokenizer: Tokenizer, text: str, **options: Any) -> list[int]:
    """Returns the token ids of a text, without the tokenizer's warning that the text exceeds the model.

    Raises:
        PromptError: the text is not valid UTF-8, or the tokenizer fails on it. This includes panics of the
            ``tokenizers`` library (e.g. a regular expression that gives up), which do not derive from
            Exception.
    """
    check_text(text)
    try:
        encoded: Any = tokenizer(text, verbose=False, **options)
        return list(encoded["input_ids"])
    except PASSED_ON:
        raise
    except BaseException as error:
        why = " ".join(str(error).split()) or "no reason given"
        raise PromptError(
            "the tokenizer cannot tokenize this text; give another text, or mend its tokenizer.json",
            f"{type(error).__name__} ({why[:200]})",
        ) from error


def check_text(text: str) -> None:
    """Checks that a text is valid Unicode, which tokenizers need.

    Raises:
        PromptError: the text has a surrogate, which Python makes of bytes that are not UTF-8 (arguments,
            stdin).
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the text holds {text[error.start]!r} at character {error.start:,}, which stands for a byte "
            "that is no UTF-8; convert it first"
        ) from error


def _listed(ids: Ids) -> list[int]:
    listed: list[int] = ids.tolist()
    return listed


def _common(a: str, b: str) -> int:
    """Returns how many leading characters two texts share, found by bisection."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

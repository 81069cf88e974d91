"""Tokens of a running generation as pieces of text, cut at stop strings."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TextStreamer

# As many alternatives as the API reports.
_MOST_ALTERNATIVES = 20


class TokenLogprobs(NamedTuple):
    """A token and its log-probability, and the most probable tokens with theirs where they are wanted."""

    token: int
    logprob: float
    best: list[tuple[int, float]]


class TextStream(TextStreamer):
    """A streamer of one sequence. Text that may be the beginning of a stop string is held back.

    Args:
        tokenizer: of the target.
        stop: strings before which the text ends.
        emit: called with each piece of text, in the thread of the generation.
        cancelled: whether nobody waits for the text any more.

    Attributes:
        text: all that was emitted.
        stopped: whether a stop string was found.
        first: when the first new token came, by ``time.monotonic``; None before.
        count: new tokens, those of a stop string included, those after it not.
        logprobs: of so many new tokens, by the target's own distribution; empty where they are not wanted.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str],
        emit: Callable[[str], None],
        cancelled: Callable[[], bool],
    ) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._stop, self._emit, self._cancelled = tuple(stop), emit, cancelled
        self._held, self._prompt, self._done = "", True, False
        self.text, self.stopped, self.count = "", False, 0
        self.first: float | None = None
        self.logprobs: list[TokenLogprobs] = []
        self._coming: list[tuple[float, list[tuple[int, float]]]] = []
        self._taken = 0

    def put(self, value: Tensor) -> bool:
        """Whether the sequence is to end."""
        if self._prompt:
            self._prompt = False
            super().put(value)  # type: ignore[no-untyped-call]
            return self._cancelled()
        self.first = self.first or time.monotonic()
        # One by one: tokens of this pass after a stop string are not part of the reply.
        parts = value.split(1) if self._stop else [value]
        for part in parts:
            if self.stopped:
                break
            coming, self._coming = self._coming[: len(part)], self._coming[len(part) :]
            self.count += len(part)
            for token, scores in zip(part.tolist(), coming, strict=False):
                self.logprobs.append(TokenLogprobs(token, *scores))
            super().put(part)  # type: ignore[no-untyped-call]
            # The streamer holds the last word back; a stop string may be in it.
            if self._stop and not self.stopped:
                self.stopped = self._first(self._held + self._pending())[1] is not None
        return self.stopped or self._cancelled()

    def put_scores(self, scores: Mapping[str, Sequence[Tensor]]) -> None:
        """Take what the call asks for of the next tokens: ``logprobs``, and ``logits`` for alternatives."""
        values = [value.item() for value in scores.get("logprobs", ())]
        best: list[list[tuple[int, float]]] = [[] for _ in values]
        if logits := scores.get("logits"):
            rows = torch.stack(list(logits)).float().log_softmax(-1)
            top = rows.topk(min(_MOST_ALTERNATIVES, rows.shape[1]))
            pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
            best = [list(zip(*pair, strict=True)) for pair in pairs]
        self._coming = list(zip(values, best, strict=True))

    def take_logprobs(self) -> list[TokenLogprobs]:
        """Those of the tokens since the last call."""
        found = self.logprobs[self._taken :]
        self._taken += len(found)
        return found

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._held += text
        at, found = self._first(self._held)
        if found is not None:
            self.stopped = True
            self._send(self._held[:at])
            self._held, self._done = "", True
            return
        keep = 0 if stream_end else self._possible_beginning()
        cut = len(self._held) - keep
        self._send(self._held[:cut])
        self._held = self._held[cut:]

    def _send(self, text: str) -> None:
        if text and not self._done:
            self.text += text
            self._emit(text)

    def _pending(self) -> str:
        """Text of the tokens that were not finalised yet."""
        if not self.token_cache:
            return ""
        return str(self.tokenizer.decode(self.token_cache, **self.decode_kwargs))[self.print_len :]

    def _first(self, text: str) -> tuple[int, str | None]:
        """Where the first stop string begins, and which it is."""
        found = [(text.find(string), string) for string in self._stop if string in text]
        return min(found) if found else (-1, None)

    def _possible_beginning(self) -> int:
        """Characters at the end of the held text with which a stop string may begin."""
        sizes = (
            size
            for string in self._stop
            for size in range(min(len(string) - 1, len(self._held)), 0, -1)
            if self._held.endswith(string[:size])
        )
        return max(sizes, default=0)

"""Decoding that outlives a shortage of device memory: give some back, read the text anew, go on."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from triforce_tree.decoding.draft_length import DraftLengthController
from triforce_tree.decoding.loop import Decoder
from triforce_tree.decoding.stop_criteria import Ending
from triforce_tree.runtime.executor import free_memory
from triforce_tree.runtime.stats import LevelStats, Progress, added


class OomRetryDecoder:
    """A :class:`Decoder`, made anew with less memory as often as there is not enough.

    Args:
        make: a decoder over the cycle that fits what is allowed now, of the number of earlier ones: draws
            must be new ones each time.
        shrink: gives memory up; False where nothing is left to give.
    """

    def __init__(self, make: Callable[[int], Decoder], shrink: Callable[[], bool]) -> None:
        self._make, self._shrink = make, shrink
        self._made = 0
        self._levels: list[LevelStats] = []
        self._seconds = [0.0, 0.0]
        self.finish_reasons: list[str | None] = []
        self._decoder: Decoder | None = None
        self._progress: Progress | None = None
        self._with_memory(lambda: None)

    @property
    def controller(self) -> DraftLengthController:
        assert self._decoder is not None
        return self._decoder.controller

    @property
    def levels(self) -> list[LevelStats]:
        """Statistics, level 0 first."""
        assert self._decoder is not None
        return added(self._levels, self._decoder.levels)

    @property
    def capture_seconds(self) -> float:
        assert self._decoder is not None
        return self._decoder.program.capture_seconds

    @property
    def prefill_seconds(self) -> float:
        return self._seconds[0] + (self._decoder.prefill_seconds if self._decoder else 0.0)

    @property
    def decode_seconds(self) -> float:
        return self._seconds[1] + (self._decoder.decode_seconds if self._decoder else 0.0)

    def prefill(self, prompts: Sequence[Sequence[int]], progress: Progress | None = None) -> None:
        """Feed the prompts to every level."""
        self._progress = progress
        self._with_memory(lambda: self._feed(prompts))

    def decode(
        self, prompts: Sequence[Sequence[int]], endings: Sequence[Ending]
    ) -> Iterator[list[list[int]]]:
        """Yield each text's new tokens, as ``Decoder.decode`` does."""
        texts, new = [list(p) for p in prompts], [0] * len(prompts)
        reasons: list[str | None] = [None] * len(texts)
        self.finish_reasons = reasons
        while None in reasons:
            # A text that has ended stays in the batch; what is written behind it counts no more.
            rest = [
                replace(ending, max_new_tokens=max(1, ending.max_new_tokens - count))
                for ending, count in zip(endings, new, strict=True)
            ]
            shortage: torch.OutOfMemoryError | None = None
            try:
                assert self._decoder is not None
                for fresh in self._decoder.decode(texts, rest):
                    for b, tokens in enumerate(fresh):
                        if reasons[b] is not None:
                            fresh[b] = []
                            continue
                        new[b] += len(tokens)
                        texts[b] += tokens
                        reasons[b] = self._decoder.finish_reasons[b]
                    yield fresh
                    if None not in reasons:
                        return
            except torch.OutOfMemoryError as error:
                shortage = error
            if shortage is not None:
                self._give_up(shortage)
                self._with_memory(lambda: self._feed(texts))

    def _feed(self, texts: Sequence[Sequence[int]]) -> None:
        assert self._decoder is not None
        self._decoder.prefill(texts, self._progress)

    def _with_memory(self, work: Callable[[], None]) -> None:
        """A decoder, made where there is none, and ``work`` with it."""
        while True:
            try:
                if self._decoder is None:
                    self._made += 1
                    self._decoder = self._make(self._made - 1)
                work()
                return
            except torch.OutOfMemoryError as error:
                shortage = error
            self._give_up(shortage)

    def _give_up(self, shortage: torch.OutOfMemoryError) -> None:
        """Let go of the decoder and of some memory; raise where there is none to let go of."""
        if self._decoder is not None:
            self._levels = self.levels
            self._seconds = [self.prefill_seconds, self.decode_seconds]
        self._decoder = None
        # Its frames hold tensors, and graphs refer to their buffers in circles.
        shortage.__traceback__ = None
        if not self._shrink():
            raise shortage
        free_memory()

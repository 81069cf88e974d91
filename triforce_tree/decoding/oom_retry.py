"""Retries after the device ran out of memory: shrink the plan, prefill again, continue decoding."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from triforce_tree.decoding.choice.controller import PassController
from triforce_tree.decoding.loop import Decoder, Observer
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.stop_criteria import Ending
from triforce_tree.kv.cached_tokens import Reuse
from triforce_tree.runtime.executor import free_memory
from triforce_tree.runtime.stats import LevelStats, Progress, added

Made = TypeVar("Made")
Kept = TypeVar("Kept")


def with_or_without(kept: list[Kept], make: Callable[[Kept | None], Made]) -> Made:
    """What ``make`` makes of the object in ``kept``, or of None if there is none.

    Where the device cannot hold it beside what is made, it is dropped: no other reference to it may be left.
    """
    if kept:
        try:
            return make(kept[0])
        except torch.OutOfMemoryError as error:
            # The traceback's frames hold tensors.
            error.__traceback__ = None
    kept.clear()
    free_memory()
    return make(None)


class OomRetryDecoder:
    """A :class:`Decoder` that is replaced by one with less memory whenever there is not enough.

    It is also replaced where more sequences are to be decoded together than it has rows.

    Args:
        make: makes a decoder within the current memory plan, from the number of earlier ones (each must draw
            new random numbers) and from the sequences in its rows.
        first: the sequences that the first decoder is made for.
        shrink: reduces the memory plan; False where it cannot be reduced further.

    Attributes:
        reused: tokens of the prompt in each row that were in the cache.

    Raises:
        torch.OutOfMemoryError: there is not enough memory, and the plan cannot be reduced further.
    """

    def __init__(
        self,
        make: Callable[[int, Sequence[Sequence[int]]], Decoder],
        first: Sequence[Sequence[int]],
        shrink: Callable[[], bool],
    ) -> None:
        self._make, self._shrink = make, shrink
        self._made = 0
        self._levels: list[LevelStats] = []
        self._seconds = [0.0, 0.0]
        self.finish_reasons: list[str | None] = []
        self._decoder: Decoder | None = None
        self._progress: Progress | None = None
        self._reuse: Reuse = "none"
        # By row; the numbers of sequences decide about their draws.
        self._sequences = [list(sequence) for sequence in first]
        self._endings: list[Ending | None] = []
        self._emitted: list[int] = []
        self._numbers: list[int] = []
        self._joining: list[int] = []
        self._growing = False
        self.reused = [0] * len(first)
        self._retried(lambda: None)

    @property
    def controller(self) -> PassController:
        assert self._decoder is not None
        return self._decoder.controller

    @property
    def program(self) -> DecodingProgram:
        assert self._decoder is not None
        return self._decoder.program

    @property
    def levels(self) -> list[LevelStats]:
        """Statistics, level 0 first."""
        assert self._decoder is not None
        return added(self._levels, self._decoder.levels)

    @property
    def capture_seconds(self) -> float:
        return self.program.capture_seconds

    @property
    def prefill_seconds(self) -> float:
        return self._seconds[0] + (self._decoder.prefill_seconds if self._decoder else 0.0)

    @property
    def decode_seconds(self) -> float:
        return self._seconds[1] + (self._decoder.decode_seconds if self._decoder else 0.0)

    @property
    def _found(self) -> list[int]:
        """Tokens of each row that the last prefills found in the cache."""
        assert self._decoder is not None
        return self._decoder.reused

    @property
    def report(self) -> list[tuple[int, int]]:
        """See :class:`Decoder`."""
        assert self._decoder is not None
        return self._decoder.report

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        progress: Progress | None = None,
        reuse: Reuse = "none",
        numbers: Sequence[int] | None = None,
        endings: Sequence[Ending | None] = (),
    ) -> None:
        """Feed the prompts to every level, as ``Decoder.prefill`` does.

        Args:
            numbers: of the sequences, for their draws; by default those of the rows.
            endings: those that :meth:`decode` will be called with, where others may join.
        """
        self._progress, self._reuse = progress, reuse
        self._endings, self._emitted = list(endings), [0] * len(endings)
        self._numbers = list(range(len(prompts)) if numbers is None else numbers)
        self._retried(lambda: self._feed(prompts))
        self.reused = list(self._found)

    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        endings: Sequence[Ending | None],
        observe: Observer | None = None,
    ) -> Iterator[list[list[int]]]:
        """Yield each sequence's new tokens, as ``Decoder.decode`` does.

        Where memory runs out in ``observe``, the pass is repeated.
        """
        self._sequences, self._emitted = [list(p) for p in prompts], [0] * len(prompts)
        self._endings, sequences, emitted = list(endings), self._sequences, self._emitted
        reasons: list[str | None] = [None if ending is not None else "empty" for ending in endings]
        self.finish_reasons = reasons

        def running(new: list[list[int]]) -> list[list[int]]:
            return [tokens if reason is None else [] for tokens, reason in zip(new, reasons, strict=True)]

        def observed(new: list[list[int]], logits_of: Callable[[int], Tensor]) -> None:
            if observe is not None:
                observe(running(new), logits_of)

        while None in reasons:
            # A sequence that has ended stays in the batch; its later tokens are dropped below.
            rest = [
                ending and replace(ending, max_new_tokens=max(1, ending.max_new_tokens - count))
                for ending, count in zip(self._endings, emitted, strict=True)
            ]
            out_of_memory: torch.OutOfMemoryError | None = None
            try:
                assert self._decoder is not None
                for new in self._decoder.decode(sequences, rest, observe and observed):
                    new = running(new)
                    for b, tokens in enumerate(new):
                        if reasons[b] is not None:
                            continue
                        emitted[b] += len(tokens)
                        sequences[b] += tokens
                        reasons[b] = self._decoder.finish_reasons[b]
                    yield new
                    if self._growing:
                        break
                    self._join()
                    if None not in reasons:
                        return
            except torch.OutOfMemoryError as error:
                out_of_memory = error
            if out_of_memory is not None:
                self._shrink_plan(out_of_memory)
                self._retried(lambda: self._feed(sequences))
            elif self._growing:
                self._grow()

    def end(self, row: int) -> None:
        """End a sequence after the tokens that were yielded last."""
        assert self._decoder is not None
        self._decoder.end(row)
        self.finish_reasons[row] = self._decoder.finish_reasons[row]

    def replace(self, row: int, prompt: Sequence[int], ending: Ending, number: int) -> None:
        """Put another sequence into the place of one that has ended, before the next pass."""
        self._sequences[row], self._emitted[row], self._endings[row] = list(prompt), 0, ending
        self._numbers[row], self.finish_reasons[row] = number, None
        self._joining.append(row)

    def grow(self, rows: int) -> None:
        """Have so many rows from the next pass on, the new ones without sequences: see :meth:`replace`."""
        more = rows - len(self._sequences)
        # In place: :meth:`decode` goes on with these lists.
        self._sequences += [[0] for _ in range(more)]
        self._emitted += [0] * more
        self._endings += [None] * more
        self._numbers += [0] * more
        self.finish_reasons += ["empty"] * more
        self.reused += [0] * more
        self._growing = True

    def _grow(self) -> None:
        """Go on with a decoder of more rows, which keeps all that is cached of the running sequences."""
        self._growing, joining, self._joining = False, self._joining, []
        if self.program.cache.pooled is not None:
            self._clear_ended()
        self._drop()
        self._reuse, reuse = "all", self._reuse
        try:
            self._retried(lambda: self._feed(self._sequences))
        finally:
            self._reuse = reuse
        for row in joining:
            self.reused[row] = self._found[row]

    def _join(self) -> None:
        """Prefill what :meth:`replace` was called with; memory that runs out is noticed in ``decode``."""
        assert self._decoder is not None
        joining, self._joining = self._joining, []
        if (pooled := self.program.cache.pooled) is not None and None in self.finish_reasons:
            ended = self._clear_ended()
            pooled.release([*joining, *ended], self.program.cache.cached)
            self._expect()
            for row in ended:
                self._decoder.replace(row, [0], None)
        for row in joining:
            # As it stays where memory runs out now: all that is cached is given back.
            self.reused[row] = 0
        for row in joining:
            self._decoder.replace(
                row, self._sequences[row], self._endings[row], self._numbers[row], self._progress,
                self._reuse,
            )  # fmt: skip
            self.reused[row] = self._found[row]

    def _clear_ended(self) -> list[int]:
        """Leave rows whose sequence has ended without one; which they are."""
        reasons = enumerate(zip(self.finish_reasons, self._endings, strict=True))
        ended = [row for row, (reason, ending) in reasons if reason is not None and ending is not None]
        for row in ended:
            self._sequences[row], self._endings[row] = [0], None
        return ended

    def _expect(self) -> None:
        """Tell the cache how many tokens may follow the sequences that are prefilled next."""
        if (pooled := self.program.cache.pooled) is not None:
            left = zip(self._endings, self._emitted, strict=True)
            pooled.new_tokens = [max(1, e.max_new_tokens - n) if e is not None else 0 for e, n in left]

    def _feed(self, sequences: Sequence[Sequence[int]]) -> None:
        assert self._decoder is not None
        self._expect()
        self._decoder.prefill(sequences, self._progress, self._reuse)
        for row, number in enumerate(self._numbers):
            self._decoder.draws.begin(row, number)

    def _retried(self, work: Callable[[], None]) -> None:
        """Make a decoder if there is none, and do ``work`` with it; retry both with less memory."""
        while True:
            try:
                if self._decoder is None:
                    self._made += 1
                    self._decoder = self._make(self._made - 1, self._sequences)
                work()
                return
            except torch.OutOfMemoryError as error:
                out_of_memory = error
            self._shrink_plan(out_of_memory)

    def _shrink_plan(self, error: torch.OutOfMemoryError) -> None:
        """Drop the decoder and reduce the memory plan; raise ``error`` where it cannot be reduced."""
        self._drop()
        # The traceback's frames hold tensors; graphs and their buffers are freed by the collector alone.
        error.__traceback__ = None
        if not self._shrink():
            raise error
        free_memory()

    def _drop(self) -> None:
        """Keep the decoder's statistics alone."""
        if self._decoder is not None:
            self._levels = self.levels
            self._seconds = [self.prefill_seconds, self.decode_seconds]
        self._decoder = None

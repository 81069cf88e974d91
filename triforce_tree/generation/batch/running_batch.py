"""A batch whose sequences come and go: one that has ended makes room for the next."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from triforce_tree.decoding.oom_retry import OomRetryDecoder
from triforce_tree.decoding.stop_criteria import Ending
from triforce_tree.kv.cached_tokens import Reuse, common_prefix
from triforce_tree.runtime.stats import LevelStats, Progress

Fresh = list[tuple["BatchSequence", list[int]]]
"""Sequences, and the new tokens of each."""

Observer = Callable[[Sequence["BatchSequence | None"], list[list[int]], Callable[[int], Tensor]], None]
"""Gets the sequence in each row and its new tokens, then a function such as ``Decoder.emitted_logits``."""


@dataclass(eq=False)
class BatchSequence:
    """A sequence of a running batch.

    Attributes:
        number: counted from the first one of the batch; its draws depend on it.
        prompt: token ids.
        ending: when it ends.
        new: its new tokens.
        finish_reason: why it has ended; None before.
        reused: tokens of the prompt whose keys and values the cache held.
        target: statistics of the target's passes over it.
        prefill_seconds: of all prompts that began with it.
        decode_seconds: of the passes from its first to its last one.
    """

    number: int
    prompt: list[int] = field(repr=False)
    ending: Ending
    new: list[int] = field(default_factory=list, repr=False)
    finish_reason: str | None = None
    reused: int = 0
    target: LevelStats = field(default_factory=lambda: LevelStats("target"))
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def count(self, new: int, committed: int, proposed: int) -> None:
        """Count a pass of the target, which committed tokens; ``new`` of them are not after its end."""
        self.target.forwards += 1
        self.target.proposed += proposed
        self.target.accepted += committed - 1
        self.target.emitted += new


class RunningBatch:
    """Decodes sequences in the rows of one decoder.

    Prompts may differ in length. The next sequence is prefilled into the row of one that has ended, between
    two passes; the others keep their state, and all buffers and CUDA graphs stay as they are.

    Args:
        decoder: of ``rows`` sequences.
        rows: that are decoded together.
        following: the next sequence, or None if there is none now. Asked for every free row between passes.
        ended: called with each sequence when it has ended.

    Attributes:
        begun: sequences that have begun since the last pass, in the order in which they did.
    """

    def __init__(
        self,
        decoder: OomRetryDecoder,
        rows: int,
        following: Callable[[], BatchSequence | None],
        ended: Callable[[BatchSequence], None],
    ) -> None:
        self._decoder, self._following, self._ended = decoder, following, ended
        self.begun: list[BatchSequence] = []
        self._rows = [following() for _ in range(rows)]
        # A row without a sequence holds a single token.
        self._prompts = [row.prompt if row is not None else [0] for row in self._rows]

    def prefill(self, progress: Progress | None, reuse: Reuse) -> None:
        """Feed the first sequences; see ``Decoder.prefill``."""
        numbers = [b if row is None else row.number for b, row in enumerate(self._rows)]
        endings = [row.ending if row is not None else None for row in self._rows]
        self._decoder.prefill(self._prompts, progress, reuse, numbers, endings)

    def decode(self, observe: Observer | None = None) -> Iterator[Fresh]:
        """Yield what each pass has added, until all sequences have ended and none follows.

        Args:
            observe: called after each pass, before its tokens are yielded.
        """
        decoder, rows = self._decoder, self._rows

        def observed(new: list[list[int]], logits_of: Callable[[int], Tensor]) -> None:
            if observe is not None:
                observe(rows, new, logits_of)

        endings = [row.ending if row is not None else None for row in rows]
        for new in decoder.decode(self._prompts, endings, observe and observed):
            self.begun = []
            fresh = [
                (row, tokens) for row, tokens in zip(rows, new, strict=True) if row is not None and tokens
            ]
            for row, tokens, (committed, proposed) in zip(rows, new, decoder.report, strict=True):
                if row is not None and committed:
                    row.count(len(tokens), committed, proposed)
            for sequence, tokens in fresh:
                sequence.new += tokens
                if sequence.target.forwards == 1:
                    sequence.prefill_seconds = decoder.prefill_seconds - sequence.prefill_seconds
            yield fresh
            for number, reason in enumerate(decoder.finish_reasons):
                if reason is not None and rows[number] is not None:
                    self._end(number, reason)
            if decoder.program.replaces:
                self._fill()

    @property
    def rows(self) -> int:
        """How many sequences can be decoded together."""
        return len(self._rows)

    @property
    def running(self) -> dict[int, BatchSequence]:
        """Sequences that are decoded and go on, by row."""
        reasons = self._decoder.finish_reasons
        rows = {n: row for n, row in enumerate(self._rows) if row is not None and row not in self.begun}
        return {n: row for n, row in rows.items() if reasons[n] is None}

    def grow(self, rows: int) -> None:
        """Have so many rows from the next pass on; after a pass, before the next one is asked for."""
        self._rows += [None] * (rows - len(self._rows))
        self._decoder.grow(rows)

    def end(self, sequence: BatchSequence) -> None:
        """End a sequence after the tokens that were yielded last."""
        self._decoder.end(self._rows.index(sequence))

    def _end(self, number: int, reason: str) -> None:
        """The sequence in this row has ended."""
        sequence = self._rows[number]
        assert sequence is not None
        sequence.finish_reason, sequence.reused = reason, self._decoder.reused[number]
        sequence.decode_seconds = self._decoder.decode_seconds - sequence.decode_seconds
        self._rows[number] = None
        self._ended(sequence)

    def _fill(self) -> None:
        """Let the next sequences begin in the rows without one."""
        while None in self._rows and (following := self._following()) is not None:
            number = self._row_for(following.prompt)
            self._rows[number] = following
            self.begun.append(following)
            following.prefill_seconds = self._decoder.prefill_seconds
            following.decode_seconds = self._decoder.decode_seconds
            self._decoder.replace(number, following.prompt, following.ending, following.number)

    def _row_for(self, prompt: Sequence[int]) -> int:
        """The row without a sequence whose neighbours begin most like a prompt.

        What rows that follow each other share is read once. Where no neighbour begins like it, it is a row
        with few neighbours that have little in common, as a later prompt may begin like them.
        """
        free = [number for number, row in enumerate(self._rows) if row is None]
        if len(free) == 1:
            return free[0]
        prompts = [[], *(row.prompt if row is not None else [] for row in self._rows), []]

        def gain(number: int) -> tuple[int, int, int]:
            before, after = prompts[number], prompts[number + 2]
            alike = common_prefix(before, prompt) + common_prefix(prompt, after)
            return alike, -common_prefix(before, after), -bool(before) - bool(after)

        return max(free, key=gain)

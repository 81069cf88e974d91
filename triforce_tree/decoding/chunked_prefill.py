"""Prefills prompts in chunks between the passes of other sequences."""

import math
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.sequence import Sequence
from triforce_tree.kv.cached_tokens import Reuse
from triforce_tree.kv.prefill import forward_end
from triforce_tree.runtime import distributed
from triforce_tree.runtime.stage_clock import Mark
from triforce_tree.runtime.stats import Progress

# Device seconds of prefill between two passes, unless a single chunk takes longer. Sequences wait for them;
# but passes for few sequences, while prompts of others wait, cost as much as passes for many later.
_PAUSE = 0.2
# When the chunks after the running one take fewer device seconds, the host prepares what follows them.
_NEXT = 0.06
# The prompt with the fewest tokens left is prefilled first, among those with about as many the oldest, and
# every so many chunks the oldest of all.
_TURN = 4
# Chunks that begin at positions with the same multiple of this take about as long for each token.
_ALIKE = 4096


@dataclass
class _Prompt:
    """A prompt whose prefill is not complete.

    Attributes:
        held: tokens that the cache holds.
        seen: of these, the tokens of the sequence for the passes of the others, in which it counts as one
            that has ended.
        complete: whether all chunks have begun.
    """

    sequence: Sequence
    held: int
    seen: int = 0
    complete: bool = False

    @property
    def left(self) -> int:
        return len(self.sequence.tokens) - self.held


class _Chunk(NamedTuple):
    """A chunk that the device computes, between two marks.

    Attributes:
        position: where in the text it begins.
    """

    sequence: Sequence
    position: int
    tokens: int
    start: Mark
    stop: Mark


class ChunkedPrefill:
    """Prefills the prompts of sequences that have joined a batch.

    The host does not wait for a chunk: it prepares the next pass, which the device computes afterwards.

    Args:
        reuse: which tokens that the cache holds from earlier generations are kept.
        progress: called with numbers of prompt tokens as they are prefilled.
    """

    def __init__(self, reuse: Reuse, progress: Progress | None) -> None:
        self._reuse, self._progress, self._chunks = reuse, progress, 0
        # Maps a batch index to its prompt, the oldest first. Some of these sequences may have ended.
        self._prompts: dict[int, _Prompt] = {}
        # Batch indices whose state on the device is not that of their text.
        self._stale: set[int] = set()
        # Chunks that are not known to be complete; and of those that are, the seconds per token of the last
        # one at each position // _ALIKE, since a token attends to all before it.
        self._begun: deque[_Chunk] = deque()
        self._seconds_per_token: dict[int, float] = {}
        # Whether chunks have begun while the last pass was computed, and why they could not.
        self._ahead = False
        self._problem: Exception | None = None

    def __contains__(self, index: int) -> bool:
        """Returns whether the prompt at a batch index is not complete."""
        return index in self._prompts

    @property
    def waits(self) -> bool:
        """Returns whether there is anything to do before the next pass."""
        return bool(self._prompts or self._stale)

    @property
    def running(self) -> dict[int, Sequence]:
        """Returns the sequences that have not ended, by batch index, the oldest first."""
        found = {index: prompt.sequence for index, prompt in self._prompts.items()}
        return {index: sequence for index, sequence in found.items() if sequence.finish_reason is None}

    def seen(self) -> dict[int, int]:
        """Returns the tokens of each prompt that passes see, by batch index."""
        return {index: prompt.seen for index, prompt in self._prompts.items()}

    def place(self, program: DecodingProgram, sequence: Sequence) -> None:
        """Gives KV slots to the prompt of a sequence."""
        index = sequence.index
        assert index is not None
        held = program.place(index, sequence.tokens, self._progress, self._reuse)
        self.remove(index)
        self._prompts[index] = _Prompt(sequence, held)
        self._stale.add(index)

    def clear(self, program: DecodingProgram, index: int) -> None:
        """Puts a single token in the place of a sequence that was removed."""
        program.place(index, [0], None, self._reuse)
        program.prefill_chunk(index, [0], 0, None, self._reuse)
        self._stale.add(index)

    def remove(self, index: int) -> None:
        self._prompts.pop(index, None)

    def remove_all(self) -> None:
        self._prompts.clear()
        self._stale.clear()
        # Chunks that have begun ahead are still computed, and passes come before others.
        self._problem = None

    def run(self, program: DecodingProgram) -> list[int]:
        """Begins chunks that take a while, unless :meth:`run_ahead` has; returns the batch indices of prompts
        that are complete then.

        Raises:
            Exception: what :meth:`run_ahead` has met.
        """
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
        if not self._ahead:
            self._begin_chunks(program)
        self._ahead = False
        complete = [index for index in self.running if self._prompts[index].complete]
        for index in complete:
            del self._prompts[index]
            self._stale.discard(index)
        return complete

    def run_ahead(self, program: DecodingProgram) -> float:
        """Begins the chunks of the next :meth:`run` while the device computes a pass, whose results the host
        reads only afterwards: the device then never waits for the host.

        It does nothing on a CPU, which would compute the chunks at once, and nothing with recurrent states or
        with a cache in host memory: what a pass has changed of them is recorded after it.

        Returns:
            the seconds that it took.
        """
        cache = program.cache
        apart = program.device.type != "cpu" and cache.states is None and not cache.backend.transfers
        if not (apart and self.running):
            return 0.0
        start = time.perf_counter()
        self._ahead = True
        try:
            self._begin_chunks(program)
        except Exception as problem:
            # The pass is complete, and its tokens are not lost.
            self._problem = problem
        return time.perf_counter() - start

    def _begin_chunks(self, program: DecodingProgram) -> None:
        seconds = 0.0
        while indices := [index for index in self.running if not self._prompts[index].complete]:
            turn = (self._chunks + 1) % _TURN
            index = min(indices, key=lambda b: self._prompts[b].left.bit_length()) if turn else indices[0]
            prompt = self._prompts[index]
            sequence, position = prompt.sequence, prompt.held
            stop = forward_end(position, len(sequence.tokens) - 1, program.cache.backend.chunk)
            longer = seconds + self._expected(position, stop - position) > _PAUSE
            # All ranks stop before the same chunk.
            if seconds and distributed.broadcast_object(longer):
                break
            self.wait()
            self._chunks += 1
            start, before = Mark(program.device), sequence.computed
            self._prefill_chunk(program, index)
            tokens = sequence.computed - before
            self._begun.append(_Chunk(sequence, position, tokens, start, Mark(program.device)))
            self.note()
            seconds += self._expected(position, tokens)

    def wait(self) -> None:
        """Waits until the device computes one of the last chunks that have begun."""
        while len(self._begun) > 1:
            later = islice(self._begun, 1, None)
            if sum(self._expected(each.position, each.tokens) for each in later) < _NEXT:
                break
            self._begun[0].stop.wait()
            self.note()

    def note(self) -> None:
        """Notes how long the chunks took that are complete."""
        while self._begun and self._begun[0].stop.reached:
            sequence, position, tokens, start, stop = self._begun.popleft()
            seconds = stop.since(start)
            sequence.prefill_seconds += seconds
            if tokens:
                self._seconds_per_token[position // _ALIKE] = seconds / tokens

    def _expected(self, position: int, tokens: int) -> float:
        """Returns the seconds of a chunk by the last one near its position. The first chunks of all are
        measured before others follow them. It is 0 on all ranks or on none.
        """
        if not tokens:
            return 0.0
        if not (known := self._seconds_per_token):
            return math.inf
        return tokens * known[min(known, key=lambda each: abs(each - position // _ALIKE))]

    def rest(self, program: DecodingProgram, texts: Callable[[], Sequences[list[int]]]) -> None:
        """Lets passes of the others run: each stale sequence gets a state that they leave as it is.

        Args:
            texts: returns the tokens of each sequence that passes see.
        """
        for index in self._stale:
            if (prompt := self._prompts.get(index)) is not None:
                prompt.seen = program.cache.backend.rest(index, prompt.held)
            program.begin(index, texts())
        self._stale.clear()

    def _prefill_chunk(self, program: DecodingProgram, index: int) -> None:
        """Begins a chunk of a prompt."""
        prompt = self._prompts[index]
        sequence, last = prompt.sequence, len(prompt.sequence.tokens) - 1
        if not 0 < prompt.held == last:
            held, found = program.prefill_chunk(
                index, sequence.tokens, prompt.held, self._progress, self._reuse
            )
            sequence.computed += held - prompt.held - found
            prompt.held = held
        prompt.complete = prompt.held >= last
        self._stale.add(index)
        if prompt.complete:
            sequence.reused = max(0, last - sequence.computed)

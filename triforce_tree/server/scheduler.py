"""Requests in a bounded queue, decoded by one thread: those of like settings that wait together, as a batch.

An engine decodes one batch at a time, as all levels share its buffers. While a batch runs, requests wait; the
next batch takes the oldest one and all others with its settings, as far as ``Limits`` allows.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from triforce_tree.engine import Engine
from triforce_tree.generation.output import GenerateOutput
from triforce_tree.server.text_stream import TextStream


class QueueFullError(Exception):
    """As many requests wait as the server allows."""


@dataclass(frozen=True)
class Limits:
    """What a server takes on.

    Attributes:
        waiting: most requests in the queue.
        batch: most sequences that are decoded together.
        batch_tokens: most tokens of all prompts of a batch of several sequences.
        new_tokens: most new tokens of a sequence, and as many as a chat gets that names no limit.
    """

    waiting: int = 64
    batch: int = 4
    batch_tokens: int = 65_536
    new_tokens: int = 4096


@dataclass
class Sequence:
    """One sequence of a request: its prompt, the settings that it shares with others of a batch, its results.

    Attributes:
        prompt: token ids.
        settings: options of ``generate``, of which equal ones can be decoded together; a seed is one of them.
        stop: strings before which its text ends.
        emit: called with pieces of text while it is decoded, then once with None; in the scheduler's thread.
        cancelled: set by anyone, when nobody waits for it any more.
        stream: its text so far; set when decoding begins.
        output, row: of the batch that it was decoded in, once it has ended.
        error: why it could not be decoded.
    """

    prompt: list[int]
    settings: dict[str, Any]
    stop: tuple[str, ...]
    emit: Callable[[str | None], None]
    cancelled: bool = False
    stream: TextStream | None = None
    output: GenerateOutput | None = None
    row: int = 0
    error: Exception | None = None
    began: float = field(default_factory=time.monotonic)
    waited: float = 0.0

    def left(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.cancelled

    def result(self, name: str) -> Any:
        """``finish_reason``, ``new_tokens`` or another value that the output has for each sequence."""
        value = getattr(self.output, name)
        return value[self.row] if isinstance(value, list) else value


class _AllCancelled(StoppingCriteria):
    """Ends a batch that nobody waits for."""

    def __init__(self, batch: list[Sequence]) -> None:
        self._batch = batch

    @property
    def true(self) -> bool:
        return all(sequence.cancelled for sequence in self._batch)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return input_ids.new_full((input_ids.shape[0],), self.true, dtype=torch.bool)


class _NobodyWaitsError(Exception):
    """Raised in prefill."""


class Scheduler:
    """Decodes submitted sequences in a thread of its own, which :meth:`close` ends.

    Args:
        engine: with a tokenizer.
        limits: of the queue and the batches.
        done: called with each sequence when it has ended; for metrics.
    """

    def __init__(self, engine: Engine, limits: Limits, done: Callable[[Sequence], None]) -> None:
        self.engine, self.limits, self._done = engine, limits, done
        self._queue: deque[Sequence] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.running = 0
        self._thread = threading.Thread(target=self._run, name="triforce-tree scheduler", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, sequences: list[Sequence]) -> None:
        """Queue the sequences of one request.

        Raises:
            QueueFullError: the queue has no room for all of them.
        """
        with self._changed:
            if len(self._queue) + len(sequences) > self.limits.waiting:
                raise QueueFullError(
                    f"{len(self._queue)} of at most {self.limits.waiting} requests wait; try again later"
                )
            self._queue.extend(sequences)
            self._changed.notify()

    def close(self) -> None:
        """Cancel all sequences, and end the thread after the pass that runs."""
        with self._changed:
            self._closed = True
            for sequence in self._queue:
                sequence.cancelled = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._queue)
                batch = self._next_batch()
            if batch:
                self.running = len(batch)
                self._decode(batch)
                self.running = 0
            elif self._closed:
                return

    def _next_batch(self) -> list[Sequence]:
        """Take the oldest sequence from the queue, and others that can be decoded with it."""
        batch: list[Sequence] = []
        left: deque[Sequence] = deque()
        tokens = 0
        for sequence in self._queue:
            fits = len(batch) < self.limits.batch and (
                not batch or tokens + len(sequence.prompt) <= self.limits.batch_tokens
            )
            alike = not batch or sequence.settings == batch[0].settings
            if sequence.cancelled:
                sequence.emit(None)
            elif fits and alike and (not batch or sequence.settings["seed"] is None):
                # A seed is of a whole batch: a text that must repeat is decoded alone.
                batch.append(sequence)
                tokens += len(sequence.prompt)
            else:
                left.append(sequence)
        self._queue = left
        return batch

    def _decode(self, batch: list[Sequence]) -> None:
        tokenizer, over = self.engine.tokenizer, _AllCancelled(batch)
        assert tokenizer is not None
        for row, sequence in enumerate(batch):
            sequence.waited = time.monotonic() - sequence.began
            sequence.row = row
            sequence.stream = TextStream(tokenizer, sequence.stop, sequence.emit, sequence.left)

        def check(tokens: int) -> None:
            if over.true or self._closed:
                raise _NobodyWaitsError

        try:
            output = self.engine.generate(
                [sequence.prompt for sequence in batch],
                streamer=[sequence.stream for sequence in batch if sequence.stream is not None],
                stopping_criteria=StoppingCriteriaList([over]),
                progress=check,
                **batch[0].settings,
            )
            for sequence in batch:
                sequence.output = output
        except _NobodyWaitsError:
            pass
        except Exception as error:  # whatever it is, the server goes on
            for sequence in batch:
                sequence.error = error
        for sequence in batch:
            self._done(sequence)
            sequence.emit(None)

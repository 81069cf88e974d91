"""A bounded queue of sequences, and the thread that decodes them in batches.

An engine decodes one batch at a time, because all batches use its buffers. A batch begins with the sequence
that comes first in the queue's order, which is fair to clients (``FairQueue``), and with others that allow
the same drafts, as far as ``Limits`` allows. Later ones join it between two passes. At most
``Scheduler.batch`` of them may begin before a sequence that comes first and cannot join. If a batch fails,
each of its sequences whose text nobody has seen yet is decoded again, alone.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from typing import Any

from triforce_tree.check.own_forward import alternatives
from triforce_tree.engine import Engine
from triforce_tree.requests.joining import Fits, Joined
from triforce_tree.requests.output import GenerateOutput
from triforce_tree.requests.streamers import TokenStreamer
from triforce_tree.server.errors import LateError
from triforce_tree.server.fair_queue import FairQueue
from triforce_tree.server.text_stream import ServedText, TextStream
from triforce_tree.text.vocabulary import Vocabulary

_LOG = logging.getLogger(__name__)
# Sequences that are decoded together by default.
_BATCH = {"cpu": 16, "cuda": 32}
_TOKENS = {"cpu": 65_536, "cuda": None}
# Seconds between two searches of the queue for texts that nobody waits for, or that have waited too long.
_SEARCH = 1.0


class QueueFullError(Exception):
    """The server's queue has its most requests."""


class ClosedError(Exception):
    """The scheduler accepts no more requests."""


@dataclass(frozen=True)
class Limits:
    """The limits of a server.

    Attributes:
        waiting: the most requests in the queue.
        batch: the most sequences that are decoded together, fewer if memory is short. None for a number by
            the device.
        batch_tokens: the most tokens of all prompts of a batch of several sequences. None for as many as the
            memory of a GPU holds, and 65,536 on a CPU.
        new_tokens: the most new tokens of a sequence; a chat that names no limit gets this many.
        seconds: the most seconds from the arrival of a request to its end; None for no limit.
    """

    waiting: int = 64
    batch: int | None = None
    batch_tokens: int | None = None
    new_tokens: int = 4096
    seconds: float | None = None


def _by_name(sequences: Sequences[ServedText]) -> dict[str, Any]:
    """Returns the settings of sequences, without their grammars: by name, a list of the values or None."""
    names = dict.fromkeys(name for sequence in sequences for name in sequence.settings if name != "grammar")
    return {name: [sequence.settings.get(name) for sequence in sequences] for name in names}


def _repeatable(sequence: ServedText) -> bool:
    """Returns whether a sequence of a failed batch can be decoded again alone, because nobody has seen any of
    its text.
    """
    seen = sequence.stream is not None and sequence.stream.text
    return not (seen or sequence.alone or sequence.cancelled or sequence.error)


class _NobodyWaitsError(Exception):
    """Raised during prefill if all sequences of the batch are cancelled."""


class _OwnStream(TokenStreamer):
    """The stream of a sequence. Its errors end this sequence and no other of its batch."""

    def __init__(self, sequence: ServedText) -> None:
        assert sequence.stream is not None
        self._sequence, self._stream = sequence, sequence.stream
        self.wants_origins = sequence.stream.wants_origins

    def put_prompt(self, tokens: Sequences[int], end_tokens: Collection[int]) -> None:
        self._tried(self._stream.put_prompt, tokens, end_tokens)

    def wants_end(self) -> bool:
        return self._stream.wants_end()

    def put_tokens(self, tokens: Sequences[int]) -> bool:
        return self._tried(self._stream.put_tokens, tokens) is not False

    def put_origins(self, names: Sequences[str]) -> None:
        self._tried(self._stream.put_origins, names)

    def put_scores(self, scores: Mapping[str, Any]) -> None:
        self._tried(self._stream.put_scores, scores)

    def end(self) -> None:
        self._tried(self._stream.end)

    def _tried(self, method: Callable[..., Any], *values: Any) -> Any:
        """Returns the result of a method of the stream, or None if the stream fails now or has failed
        before.
        """
        if self._sequence.error is None:
            try:
                return method(*values)
            except Exception as problem:
                self._sequence.error = problem
        return None


class _Batch:
    """A batch of sequences, as the source of those that join it (a ``Joining``).

    Attributes:
        running: its sequences that have not ended, by number, in the order in which they began.
        overtaken: number of sequences that began before a sequence that came earlier.
        tokens: see ``Joining``.
    """

    def __init__(self, scheduler: "Scheduler", sequences: list[ServedText]) -> None:
        self._scheduler, self._numbers = scheduler, itertools.count()
        self.tokens: int | None = scheduler.batch_tokens
        self.running: dict[int, ServedText] = {}
        self.overtaken = 0
        for sequence in sequences:
            self.add(sequence)

    def add(self, sequence: ServedText) -> None:
        """Adds a sequence that begins."""
        self.running[next(self._numbers)] = sequence

    def wanted(self, fits: Fits) -> int:
        return self._scheduler.wanted(self, fits)

    def next(self, fits: Fits) -> Joined | None:
        sequence = self._scheduler.joining(self, fits)
        if sequence is None:
            return None
        return Joined(
            sequence.prompt, sequence.settings["max_new_tokens"], _OwnStream(sequence), sequence.seed,
            sequence.settings.get("grammar"), sequence.options,
        )  # fmt: skip

    def ended(self, number: int, output: GenerateOutput) -> None:
        sequence = self.running.pop(number)
        sequence.output = output
        self._scheduler.ended(sequence)


class Scheduler:
    """Decodes submitted sequences in a thread of its own, which :meth:`close` ends.

    Args:
        engine: decodes the sequences; it must have a tokenizer.
        limits: the limits of the queue and of the batches.
        done: called with each sequence when it has ended, for metrics.
        passed: called with a sequence after each of its passes, see :class:`TextStream`.

    Attributes:
        batch, batch_tokens: as in ``limits``, or their defaults for the engine's device.
    """

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        done: Callable[[ServedText], None],
        passed: Callable[[ServedText, int, float | None], None] = lambda *_: None,
    ) -> None:
        self.engine, self._done, self._passed = engine, done, passed
        self.limits, kind = limits, engine.target.device.type
        self.batch = limits.batch or _BATCH[kind]
        self.batch_tokens = limits.batch_tokens or _TOKENS[kind]
        assert engine.tokenizer is not None
        self._vocabulary = Vocabulary(engine.tokenizer)
        self._searched = time.monotonic()
        self._queue = FairQueue()
        self._changed = threading.Condition()
        self._closed = False
        self._batch: _Batch | None = None
        self.running = 0
        self._thread = threading.Thread(target=self._run, name="triforce-tree scheduler", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def kv_tokens(self) -> tuple[int, int]:
        """Returns ``KVBackend.tokens`` of the sequences that are decoded now; 0 if their KV slots are in host
        memory.
        """
        program = self.engine.last_program
        if not self.running or program is None:
            return 0, 0
        return program.cache.backend.tokens()

    def submit(self, sequences: list[ServedText]) -> None:
        """Queue the sequences of one request.

        Raises:
            ClosedError: :meth:`stop` was called.
            QueueFullError: the queue cannot take all of them.
        """
        with self._changed:
            if self._closed:
                raise ClosedError
            self._drop_cancelled()
            if len(self._queue) + len(sequences) > self.limits.waiting:
                raise QueueFullError(
                    f"{len(self._queue)} of at most {self.limits.waiting} requests wait; try again later"
                )
            self._queue.extend(sequences)
            self._changed.notify()

    def stop(self) -> None:
        """Cancels all sequences. Those that are being decoded end after the current pass."""
        with self._changed:
            self._closed = True
            running = list(self._batch.running.values()) if self._batch is not None else []
            for sequence in [*self._queue, *running]:
                sequence.cancelled = True
            self._changed.notify()

    def close(self) -> None:
        """Cancels all sequences, and waits for the end of the thread."""
        self.stop()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._queue)
                self._drop_cancelled()
                # Set before the lock is released, so that ``stop`` finds each sequence here or in the queue.
                batch = self._batch = self._next_batch()
                if not batch.running and self._closed:
                    return
            if batch.running:
                self._decode(batch)

    def _drop_cancelled(self) -> None:
        """Removes sequences from the queue that are cancelled or late."""
        self._searched = time.monotonic()
        for sequence in [each for each in self._queue if self._over(each)]:
            self._queue.remove(sequence)
            sequence.end_waiting()
            self._done(sequence)
            sequence.emit(None)

    def _over(self, sequence: ServedText) -> bool:
        """Returns whether a sequence is to end now, because it was cancelled or is late."""
        limit, seconds = self.limits.seconds, time.monotonic() - sequence.began
        if limit is not None and seconds > limit and not sequence.cancelled:
            sequence.error = LateError(f"the text has not ended within the {limit:g} seconds of this server")
            sequence.cancelled = True
        return sequence.cancelled

    def _next_batch(self) -> _Batch:
        """Takes the next sequence from the queue, and others that can be decoded with it."""
        batch: list[ServedText] = []
        for sequence in self._queue:
            if self._begins(sequence, batch):
                batch.append(sequence)
        for sequence in batch:
            self._begin(sequence)
        return _Batch(self, batch)

    def _begins(self, sequence: ServedText, batch: list[ServedText]) -> bool:
        """Returns whether a sequence can begin together with others."""
        tokens = sum(len(each.prompt) for each in batch) + len(sequence.prompt)
        return not batch or (
            (self.batch_tokens is None or tokens <= self.batch_tokens)
            and len(batch) < self.batch
            and sequence.speculation == batch[0].speculation
            and not (sequence.alone or batch[0].alone)
        )

    def _joins(self, sequence: ServedText, running: list[ServedText], fits: Fits) -> bool:
        """Returns whether a sequence can be decoded together with the running ones."""
        return (
            0 < len(running) < self.batch
            and not (sequence.alone or running[0].alone)
            and sequence.speculation == running[0].speculation
            and not sequence.echo
            and fits(sequence.prompt, sequence.settings["max_new_tokens"], sequence.options)
        )

    def _begin(self, sequence: ServedText) -> None:
        self._queue.begin(sequence)
        sequence.end_waiting()
        sequence.stream = TextStream(sequence, self._vocabulary, self._over, self._decoded)
        self.running += 1

    def _decoded(self, sequence: ServedText, tokens: int, seconds: float | None) -> None:
        with self._changed:
            self._queue.decoded(sequence, tokens)
            if time.monotonic() - self._searched > _SEARCH:
                self._drop_cancelled()
        self._passed(sequence, tokens, seconds)

    def wanted(self, batch: _Batch, fits: Fits) -> int:
        """Returns how many sequences could be decoded together now, those of the batch included."""
        with self._changed:
            running = list(batch.running.values())
            for sequence in self._queue:
                if not sequence.cancelled and self._joins(sequence, running, fits):
                    running.append(sequence)
            return len(running)

    def joining(self, batch: _Batch, fits: Fits) -> ServedText | None:
        """Removes the next sequence that joins a batch from the queue, and returns it, or None if there is
        none.
        """
        with self._changed:
            if self._closed:
                return None
            running, waits = list(batch.running.values()), False
            for sequence in self._queue:
                if sequence.cancelled:
                    continue
                if self._joins(sequence, running, fits):
                    batch.overtaken += waits
                    batch.add(sequence)
                    self._begin(sequence)
                    return sequence
                waits = True
                if batch.overtaken >= self.batch:
                    return None
            return None

    def _echo(self, sequence: ServedText) -> None:
        """Begins the text of a sequence with its prompt, with log-probabilities if they are wanted."""
        scores = None
        if sequence.settings.get("logprobs"):
            with self.engine.generation():
                scores = alternatives(self.engine, sequence.prompt, sequence.alternatives)
        assert sequence.stream is not None
        sequence.stream.echo(sequence.prompt, scores)

    def _decode(self, batch: _Batch) -> None:
        given = list(batch.running.values())

        def check(tokens: int) -> None:
            if self._closed or all(self._over(sequence) for sequence in batch.running.values()):
                raise _NobodyWaitsError

        error: BaseException | None = None
        try:
            for sequence in given:
                if sequence.echo:
                    self._echo(sequence)
            self.engine.generate(
                [sequence.prompt for sequence in given],
                streamer=[_OwnStream(sequence) for sequence in given],
                progress=check,
                seed=[sequence.seed for sequence in given],
                max_batch=self.batch,
                joining=batch,
                speculation=given[0].speculation,
                **_by_name(given),
                grammar=[sequence.settings.get("grammar") for sequence in given],
            )
        except _NobodyWaitsError:
            pass
        except Exception as problem:
            error = problem
        except BaseException as problem:
            # Native code may panic with such an error. The server continues in any case.
            error = RuntimeError(f"{type(problem).__name__}: {problem}")
            error.__cause__ = problem
        left = list(batch.running.values())
        again = [
            sequence for sequence in left if error is not None and len(left) > 1 and _repeatable(sequence)
        ]
        if again:
            _LOG.warning("a batch failed; %d of its texts begin anew, one by one: %s", len(again), error)
        for sequence in left:
            if sequence not in again:
                sequence.error = sequence.error or error
                if sequence.error is None and not sequence.cancelled:
                    sequence.error = RuntimeError("the batch ended before this text, a fault of the server")
                self.ended(sequence)
        with self._changed:
            self.running -= len(again)
            for sequence in reversed(again):
                sequence.alone, sequence.stream = True, None
                # If the scheduler was closed meanwhile, these sequences are cancelled too.
                sequence.cancelled |= self._closed
                self._queue.put_back(sequence)

    def ended(self, sequence: ServedText) -> None:
        """Records that a sequence has ended, was cancelled or has failed."""
        with self._changed:
            self.running -= 1
            self._queue.ended(sequence)
        sequence.cut = sequence.cancelled
        self._done(sequence)
        sequence.emit(None)

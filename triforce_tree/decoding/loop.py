"""The decoding loop: sequences join a batch, are prefilled, decoded in passes, and make place for others."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Sequences
from typing import Protocol

import torch
from torch import Tensor

from triforce_tree.decoding.choice.chooser import PassChooser
from triforce_tree.decoding.choice.stage_costs import UNLIMITED, Allowance
from triforce_tree.decoding.memory.retries import retried
from triforce_tree.decoding.prepared_stages import seeded
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.sequence import Sequence
from triforce_tree.decoding.stage_set import drafted, stage_name
from triforce_tree.kv.cached_tokens import Reuse, common_prefix
from triforce_tree.policy.pass_policy import PassPolicy
from triforce_tree.policy.passes import PLAIN, PassKind
from triforce_tree.runtime import distributed
from triforce_tree.runtime.executor import free_memory
from triforce_tree.runtime.stage_clock import StageClock
from triforce_tree.runtime.stats import LevelStats, Progress, added
from triforce_tree.verify.draws import Draws
from triforce_tree.verify.sampling import ProbsFromLogits

_LOG = logging.getLogger(__name__)

Texts = Sequences[list[int]]
Rows = list[Sequence | None]
Fresh = list[tuple[Sequence, list[int]]]
"""Sequences, and the new tokens of each."""

Observer = Callable[[Fresh, Callable[[int], Tensor]], None]
"""Gets what a pass has added, and a function such as :meth:`DecodingLoop.emitted_logits`."""


class Programs(Protocol):
    """Makes the programs of a loop within the memory plan."""

    def make(self, texts: Texts) -> DecodingProgram:
        """Returns a program with a batch index for each of these texts."""

    def shrink(self) -> bool:
        """Reduces the memory plan; returns False if it cannot be reduced further."""


class OneProgram:
    """Provides a single program, for loops that neither grow nor reduce their memory."""

    def __init__(self, program: DecodingProgram) -> None:
        self._program = program

    def make(self, texts: Texts) -> DecodingProgram:
        return self._program

    def shrink(self) -> bool:
        return False


def best_row(rows: Sequences[Sequence | None], free: Sequences[int], prompt: Sequences[int]) -> int:
    """Returns the free index of the batch whose neighbours share the longest prefix with a prompt.

    A prefix that neighbouring sequences share is read once. If no neighbour shares a prefix, the index is one
    with few neighbours that have little in common, because a later prompt may share a prefix with them.

    Args:
        rows: the running sequence at each index of the batch.
        free: the indices without a running sequence.
    """
    if len(free) == 1:
        return free[0]
    prompts = [[], *(row.prompt if row is not None else [] for row in rows), []]

    def gain(b: int) -> tuple[int, int, int]:
        before, after = prompts[b], prompts[b + 2]
        alike = common_prefix(before, prompt) + common_prefix(prompt, after)
        return alike, -common_prefix(before, after), -bool(before) - bool(after)

    return max(free, key=gain)


class DecodingLoop:
    """Decodes the sequences of a batch, each :meth:`step` by one pass of the target.

    Prompts may differ in length. A sequence that has ended stays in its row of the batch until another one is
    prefilled there, between two passes; the others keep their state, and all buffers and CUDA graphs stay as
    they are. Where device memory runs out, the memory plan is reduced, a smaller program is fed with all
    tokens so far, and the step is repeated with new random numbers.

    Args:
        programs: makes the program, and another one where memory runs out or more rows are wanted.
        rows: the sequences to begin with, None for a row without one.
        to_probs: logits to probabilities.
        seed: of all draws, 0 to 2**63 - 1.
        repeatable: same seed, same tokens: see :class:`PassChooser`. Each sequence then has draws of its own,
            those that it has alone with the seed ``draws.sequence_seed``.
        by_position: whether sequences may have seeds of their own.
        allowance: what measuring the stages' costs may take, where they are not known.
        progress: called with numbers of prompt tokens as they are prefilled.
        reuse: which tokens that the cache holds from earlier generations are kept.

    Attributes:
        rows: the sequence in each row of the batch; one that has ended stays until another one replaces it.
        joining: sequences that are not prefilled yet, in the order in which they joined.
        program: decodes them.
        chooser: chooses the passes.
        passes: number of passes by kind.
        prefill_seconds, decode_seconds: host time.
        after_stage: called with the name of each stage after it was started, for measurements.
    """

    def __init__(
        self,
        programs: Programs,
        rows: Sequences[Sequence | None],
        to_probs: ProbsFromLogits,
        seed: int,
        repeatable: bool = False,
        by_position: bool = False,
        allowance: Allowance = UNLIMITED,
        progress: Progress | None = None,
        reuse: Reuse = "none",
    ) -> None:
        self._programs, self._to_probs, self._seed, self._repeatable = programs, to_probs, seed, repeatable
        self._by_position, self._allowance = by_position, allowance
        self._progress, self._reuse = progress, reuse
        self.rows: Rows = []
        self.joining: list[Sequence] = []
        self.passes: Counter[PassKind] = Counter()
        self.prefill_seconds = self.decode_seconds = 0.0
        self.after_stage: Callable[[str], None] | None = None
        self._attempts, self._is_fed, self._growing, self._after_plain = 0, False, False, False
        self._before: list[LevelStats] = []
        self._levels: list[LevelStats] = []
        self._program: DecodingProgram | None = None
        self._clock: StageClock
        self._verified_by: str
        self.chooser: PassChooser
        self.draws: Draws
        self._place(rows)

    @classmethod
    def over(
        cls,
        program: DecodingProgram,
        to_probs: ProbsFromLogits,
        seed: int,
        repeatable: bool = False,
        progress: Progress | None = None,
    ) -> "DecodingLoop":
        """Returns a loop over a given program; :meth:`begin` then gives it sequences."""
        rows: Rows = [None] * program.batch
        loop = cls(OneProgram(program), rows, to_probs, seed, repeatable, progress=progress)
        loop._prepare()
        return loop

    @property
    def program(self) -> DecodingProgram:
        assert self._program is not None, "memory ran out"
        return self._program

    @property
    def policy(self) -> PassPolicy:
        return self.chooser.policy

    @property
    def levels(self) -> list[LevelStats]:
        """Statistics, level 0 first."""
        return added(self._before, self._levels)

    @property
    def running(self) -> list[Sequence]:
        """Returns the sequences that have not ended."""
        return [row for row in self.rows if row is not None and row.finish_reason is None]

    @property
    def free(self) -> list[int]:
        """Returns the batch indices that a new sequence may take between two passes."""
        if not self.program.replaces:
            return []
        return [b for b, row in enumerate(self.rows) if row is None or row.finish_reason is not None]

    def prefill(self) -> None:
        """Feed the prompts to every level; all but their last tokens, which are the first roots.

        Raises:
            ValueError: a prompt is too short for the levels, or too long for the buffers.
            torch.OutOfMemoryError: memory is short, and the plan cannot be reduced.
        """
        retried(self._feed, self._shrink)

    def begin(self, rows: Sequences[Sequence | None], cached: bool = False) -> None:
        """Begins with other sequences at these batch indices, and prefills their prompts.

        Args:
            cached: whether the cache holds their keys and values, as for ``DecodingProgram.rewind``.
        """
        self._place(rows)
        if cached:
            self.program.rewind(self._texts())
            self._begin_rows()
        else:
            self.prefill()

    def add(self, sequence: Sequence) -> None:
        """Lets a sequence join at one of the :attr:`free` indices; it is prefilled before the next pass."""
        sequence.row = best_row(self._running_rows(), self.free, sequence.prompt)
        self.rows[sequence.row] = sequence
        self.joining.append(sequence)

    def end(self, sequence: Sequence) -> None:
        """End a sequence after its tokens so far, if it has not ended."""
        if sequence.finish_reason is None:
            sequence.finish_reason = "stop"
            self._update_active()

    def grow(self, rows: int) -> None:
        """Enlarges the batch to ``rows`` sequences from the next pass on, if ``program.replaces``."""
        self.rows += [None] * (rows - len(self.rows))
        self._growing = True

    def step(self, observe: Observer | None = None) -> Fresh:
        """Prefill the sequences that have joined, make a pass, and append its tokens.

        Args:
            observe: called after the pass. Where memory runs out in it, the pass is repeated.

        Returns:
            the sequences that got new tokens, and these.

        Raises:
            ValueError: the model returned NaN.
            torch.OutOfMemoryError: memory is short, and the plan cannot be reduced.
        """
        return retried(lambda: self._advance(observe), self._shrink)

    def decode(self) -> Iterator[Fresh]:
        """Yield what each :meth:`step` returns until no sequence runs."""
        with self:
            while self.running:
                yield self.step()

    def close(self) -> None:
        """Keep what was learnt from the passes for later requests."""
        if self._program is not None:
            self.chooser.close()

    def __enter__(self) -> "DecodingLoop":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def emitted_logits(self, count: int) -> Tensor:
        """Returns the logits by which the last pass chose the first ``count`` new tokens of each sequence.

        Returns:
            fp32 ``[B, count, V]``; arbitrary for tokens that a sequence did not emit.
        """
        return self.program.verifier(self._verified_by).emitted_logits(count)

    # Programs: the first one, and those after it

    def _shrink(self) -> bool:
        """Drops the program; returns whether the memory plan could be reduced."""
        self._drop()
        return self._programs.shrink()

    def _prepare(self) -> None:
        """Makes a program for the batch if there is none, with its pass chooser and random draws."""
        if self._program is not None:
            return
        program = self._programs.make(self._texts())
        noise = seeded(program) if self._by_position else program.seeded
        program.prepare(self._to_probs)
        lowest = [program.drafter.name] if program.drafter is not None else []
        retrieval = ["retrieval"] if program.levels == 3 else []
        self._levels = [LevelStats(name) for name in (*lowest, *retrieval, "target")]
        self.chooser = PassChooser(program, self._to_probs, self._repeatable, self._allowance)
        count = program.batch if self._repeatable else 1
        self.draws = Draws(self._seed, self._attempts, count, program.device, noise)
        self._clock, self._after_plain = StageClock(program.device), False
        self._program, self._attempts = program, self._attempts + 1

    def _feed(self) -> None:
        """Feed all tokens so far to every level, of a new program if there is none."""
        self._prepare()
        self._expect()
        start = time.perf_counter()
        reused = self.program.prefill(self._texts(), self._progress, self._reuse)
        self._prefilled(start)
        for sequence in self.joining:
            assert sequence.row is not None
            sequence.reused = reused[sequence.row]
        self._begin_rows()

    def _begin_rows(self) -> None:
        """Begins the random draws of the sequences after their texts were prefilled."""
        for b in range(len(self.rows)):
            self._begin_draws(b)
        if len(self.running) < len(self.rows):
            self._update_active()
        self._is_fed, self.joining = True, []

    def _begin_draws(self, b: int) -> None:
        row = self.rows[b]
        seed = row.seed if row is not None and self._by_position else None
        self.draws.begin(b, b if row is None else row.number, seed)

    def _prefilled(self, start: float) -> None:
        """Adds up the seconds of a prefill."""
        self._clock.synchronize()
        seconds = time.perf_counter() - start
        self.prefill_seconds += seconds
        for sequence in self.joining:
            sequence.prefill_seconds += seconds

    def _drop(self) -> None:
        """Drops the program and keeps its statistics."""
        if self._program is not None:
            self.chooser.close()
            self._before, self._levels = self.levels, []
            # They hold the program's buffers, whose memory the next one needs.
            del self.chooser, self.draws
        self._program, self._is_fed = None, False

    def _grow(self) -> None:
        """Continues with a program for a larger batch, which keeps the cache of the running sequences."""
        self._growing = False
        if self.program.cache.backend.reclaims:
            self._clear_ended()
        self._drop()
        self._reuse, reuse = "all", self._reuse
        try:
            self._feed()
        finally:
            self._reuse = reuse

    # Rows

    def _place(self, rows: Sequences[Sequence | None]) -> None:
        """Puts sequences into the batch before the first prefill."""
        self.rows, self._is_fed = list(rows), False
        self.joining = [sequence for sequence in rows if sequence is not None]
        for b, sequence in enumerate(rows):
            if sequence is not None:
                sequence.row = b

    def _texts(self) -> list[list[int]]:
        """Returns all tokens at each batch index; an index without a sequence holds a single token."""
        return [row.tokens if row is not None else [0] for row in self.rows]

    def _running_rows(self) -> Rows:
        return [row if row is not None and row.finish_reason is None else None for row in self.rows]

    @property
    def running_texts(self) -> list[list[int] | None]:
        """Returns all tokens of the running sequence at each batch index, or None where none is running."""
        return [None if row is None else row.tokens for row in self._running_rows()]

    def _join(self) -> None:
        """Prefill the sequences that have joined, each in place of one that has ended."""
        program, start = self.program, time.perf_counter()
        backend = program.cache.backend
        if backend.reclaims:
            ended = self._clear_ended()
            rows = [sequence.row for sequence in self.joining if sequence.row is not None]
            backend.release([*rows, *ended])
            self._expect()
            for b in ended:
                program.replace(b, self._texts(), self._progress, self._reuse)
        for sequence in self.joining:
            assert sequence.row is not None
            sequence.reused = program.replace(sequence.row, self._texts(), self._progress, self._reuse)
            self._begin_draws(sequence.row)
        if self.joining or backend.reclaims:
            self._prefilled(start)
            self._update_active()
            self.chooser.joined()
        self.joining = []

    def _any_ended(self) -> bool:
        """Returns whether sequences that have ended hold slots that others could use."""
        ended = (row is not None and row.finish_reason is not None for row in self.rows)
        return self.program.cache.backend.reclaims and any(ended)

    def _clear_ended(self) -> list[int]:
        """Removes sequences that have ended from the batch; returns their indices."""
        ended = [b for b, row in enumerate(self.rows) if row is not None and row.finish_reason is not None]
        for b in ended:
            self.rows[b] = None
        return ended

    def _expect(self) -> None:
        """Set how many tokens may follow the sequences that are prefilled next."""
        new_tokens = [max(1, row.left) if row is not None else 0 for row in self.rows]
        self.program.cache.backend.expect(new_tokens)

    def _update_active(self) -> None:
        running = [row is not None for row in self._running_rows()]
        self.program.state.active.copy_(torch.tensor(running))

    # A pass

    def _advance(self, observe: Observer | None) -> Fresh:
        """Feed what was not fed, and make one pass."""
        if self._growing:
            self._grow()
        elif not self._is_fed:
            self._feed()
        elif self.joining or self._any_ended():
            self._join()
        program, clock = self.program, self._clock
        try:
            start = time.perf_counter() - program.capture_seconds  # no decoding
            rows = self._running_rows()
            texts = self.running_texts
            longest, left = max(map(len, self._texts())), max(row.left for row in rows if row is not None)
            kind = self.chooser.choose(texts, longest, left)
            clock.start()
            if kind != PLAIN:
                kind = self._prepare_levels(kind, texts, self._after_plain)
            self.draws.before_pass([None if text is None else len(text) for text in texts])
            report = self._pass(kind)
            fresh = self._append(rows, report, observe)
            seconds = clock.seconds()
            # The drafter catches up with the tokens of passes without its trees.
            without = kind == PLAIN or self.chooser.matched(kind)
            resumed, self._after_plain = self._after_plain and not without, without
            self._count(kind, report, fresh, seconds)
            self.chooser.observe(kind, report, seconds, resumed)
            taken = time.perf_counter() - program.capture_seconds - start
            self.chooser.took(kind, taken - sum(seconds.values()) + seconds.get("capture", 0.0))
        except BaseException:
            # What an interrupted or failed pass left is not to be continued.
            program.cache.forget()
            raise
        self.decode_seconds += taken
        for row in rows:
            if row is not None:
                row.decode_seconds += taken
        if not self.running:
            self.chooser.finish()
        return fresh

    def _prepare_levels(self, kind: PassKind, texts: Sequences[list[int] | None], resumed: bool) -> PassKind:
        """Let the drafter catch up with what was committed, and the retrieval level after other passes.

        Returns:
            the pass to make: with trees of the first shape, where memory is short for another one's stages.
        """
        program, matched = self.program, self.chooser.matched(kind)
        if program.drafter is not None and not matched:
            program.drafter.prepare(texts, resumed)
        if kind.levels == 3:
            program.resume_retrieval()
        self._clock.mark("prepare")
        if kind.shape:
            try:
                program.prepare_shape(kind.shape)
            except torch.OutOfMemoryError:
                if distributed.current() is not None:
                    raise
                _LOG.warning("device memory is short for the stages of other_trees; passes do without them")
                free_memory()
                self.chooser.do_without_other_trees()
                kind = self._prepare_levels(kind._replace(shape=0), texts, resumed or matched)
            self._clock.mark("capture")
        return kind

    def _pass(self, kind: PassKind) -> list[list[int]]:
        """Runs the stages of a pass; returns ``SequenceState.pass_results``."""
        program, clock, draws = self.program, self._clock, self.draws.generators
        stage = program.last_stage(kind.levels, kind.shape)
        for name, timed in self._stages(kind, stage):
            program.run(name, *draws)
            if self.after_stage is not None:
                self.after_stage(name)
            clock.mark(timed)
        self._verified_by = stage
        report: list[list[int]] = program.state.pass_results().tolist()
        if program.state.rank_counts is not None:
            program.state.rank_counts.zero_()
        tokens = [emitted[:count] for count, _, _, _, *emitted in report]
        program.committed([count for count, *_ in report], tokens, stage)
        if kind.levels == 3:
            program.state.retrieval_emitted.zero_()
        self.passes[kind] += 1
        return report

    def _stages(self, kind: PassKind, last: str) -> Iterator[tuple[str, str]]:
        """The stages of a pass in their order, and under which name the seconds of each are counted."""
        for done in range(kind.rounds):
            yield stage_name("draft", kind.shape), "draft"
            if kind.levels == 3:
                name = "retrieval_refresh" if self.program.config.retrieval.chooses(done) else "retrieval"
                yield stage_name(name, kind.shape), "retrieval"
        yield last, "target"

    def _append(self, rows: Rows, report: list[list[int]], observe: Observer | None) -> Fresh:
        """Appends the tokens of a pass to the running sequences, each up to its end."""
        fresh: Fresh = []
        for row, (count, _, _, broken, *tokens) in zip(rows, report, strict=True):
            if broken:
                raise ValueError(self._to_probs.nan_error)
            if row is not None and count:
                fresh.append((row, row.append(tokens[:count])))
        if observe is not None:
            try:
                observe(fresh, self.emitted_logits)
            except torch.OutOfMemoryError:
                for row, new in fresh:
                    row.take_back(len(new))
                raise
        if any(row.finish_reason is not None for row, _ in fresh):
            self._update_active()
        return fresh

    def _count(
        self, kind: PassKind, report: list[list[int]], fresh: Fresh, seconds: Mapping[str, float]
    ) -> None:
        """Add up the statistics of the sequences that were running.

        Args:
            seconds: of the stages.
        """
        for row, new in fresh:
            assert row.row is not None
            committed, proposed, *_ = report[row.row]
            row.count(len(new), committed, proposed)
        running = [row for row in report if row[0] > 0]
        count, proposed, gathered = (sum(row[i] for row in running) for i in range(3))
        emitted = sum(len(new) for _, new in fresh)
        self._levels[-1].add(len(running), proposed, count - len(running), emitted, seconds["target"])
        if trees := kind.rounds * len(running):
            forwards, tokens = (len(running) * number for number in drafted(self.program, *kind))
            self._levels[0].add(forwards, 0, 0, tokens, seconds["prepare"] + seconds["draft"])
            if kind.levels == 3:
                verified = trees * self.program.shapes[kind.shape].depth
                self._levels[1].add(trees, verified, gathered - trees, gathered, seconds["retrieval"])

"""The decoding loop: the stages of a pass, one wait for the device, endings, statistics, choice of passes."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from triforce_tree.decoding.choice.controller import PassController
from triforce_tree.decoding.choice.cost_table import other_costs, stage_costs
from triforce_tree.decoding.choice.costs_by_length import CostsByLength
from triforce_tree.decoding.choice.estimates import judged
from triforce_tree.decoding.choice.learnt_table import LearntChoices
from triforce_tree.decoding.choice.lookup_choice import LookupChoice
from triforce_tree.decoding.choice.passes import PLAIN, PassKind
from triforce_tree.decoding.choice.stage_costs import UNLIMITED, Allowance
from triforce_tree.decoding.choice.times.shared_times import PassTimes, SharedTimes
from triforce_tree.decoding.prepared_stages import held_back, seeded
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.stage_set import drafted, stage_name
from triforce_tree.decoding.stop_criteria import Ending, append, tokens_left
from triforce_tree.kv.cached_tokens import Reuse
from triforce_tree.runtime import distributed
from triforce_tree.runtime.executor import free_memory
from triforce_tree.runtime.stage_clock import StageClock
from triforce_tree.runtime.stats import LevelStats, Progress
from triforce_tree.verify.draws import Draws
from triforce_tree.verify.sampling import ProbsFromLogits

Value = TypeVar("Value")
_LOG = logging.getLogger(__name__)

Observer = Callable[[list[list[int]], Callable[[int], Tensor]], None]
"""Gets each sequence's new tokens of a pass, and a function such as :meth:`Decoder.emitted_logits`."""


class Decoder:
    """Decodes a batch of sequences with one :class:`DecodingProgram`.

    Args:
        program: made for this batch size; one decoder uses it at a time.
        to_probs: logits to probabilities.
        seed: of all draws, 0 to 2**63 - 1.
        repeatable: same seed, same tokens: the choice of passes follows from the table of stage costs, the
            tokens and how many may follow alone, and each sequence of a batch has draws of its own: those it
            has alone with the seed ``draws.sequence_seed``. Else it also follows from times measured while
            decoding, and from what earlier decoders that were not repeatable left (``learnt_table.py``).
        attempt: number of earlier decoders of the same generation; each draws new random numbers.
        seeds: of single sequences, see :class:`Draws`; None where no sequence has one or will have.
        allowance: what measuring the stages' costs may take, where they are not known.

    Attributes:
        finish_reasons: why the sequence in each row has ended; None while it runs.
        reused: tokens of each prompt that its prefill found in the cache.
        levels: statistics, level 0 first.
        passes: number of passes by kind.
        report: of the last pass by row: tokens that it committed, and draft tokens that it verified.
        lookup: chooses passes that verify matched tokens; None where there are none.
        after_stage: called with the name of each stage after it was started, for measurements.
    """

    def __init__(
        self,
        program: DecodingProgram,
        to_probs: ProbsFromLogits,
        seed: int,
        repeatable: bool = False,
        attempt: int = 0,
        seeds: Sequence[int | None] | None = None,
        allowance: Allowance = UNLIMITED,
    ) -> None:
        self.program, self._to_probs = program, to_probs
        by_position = seeded(program) if seeds is not None else program.seeded
        program.prepare(to_probs)
        program.selected.timings.begin()
        lowest = [program.drafter.name] if program.drafter is not None else []
        retrieval = ["retrieval"] if program.levels == 3 else []
        self.levels = [LevelStats(name) for name in (*lowest, *retrieval, "target")]
        self.passes: Counter[PassKind] = Counter()
        self.after_stage: Callable[[str], None] | None = None
        self.controller = PassController(
            program.levels, program.shapes[0].depth, program.max_draft_tokens, program.config.rounds,
            program.two_levels, program.shapes, program.tail_tree,
        )  # fmt: skip
        self._costs: CostsByLength | None = None
        if self.controller.fixed is None:
            first = stage_costs(program, to_probs, None, allowance)
            self._costs = CostsByLength(self.controller, first, other_costs(program, to_probs, first))
        self.lookup = LookupChoice.of(self.controller, program.drafter)
        self._learns = self._costs is not None and not repeatable
        self._learnt = LearntChoices(program, to_probs) if self._learns else None
        self._times = SharedTimes()
        if self._costs and self._learnt:
            if (learnt := self._learnt.last()) is not None:
                self.controller.resume(learnt)
                self._costs.factors = learnt.cost_factors
            # With a seed the choice must not depend on which stages are there already.
            self.controller.preparation.begin(held_back(program))
        count = program.batch if repeatable else 1
        self.draws = Draws(seed, attempt, count, program.device, seeds or (), by_position)
        self.prefill_seconds = self.decode_seconds = 0.0
        self.reused = [0] * program.batch
        self.finish_reasons: list[str | None] = []
        self.report: list[tuple[int, int]] = []
        self._clock = StageClock(program.device)
        self._last: tuple[PassKind, float] | None = None  # with its seconds beyond those of its stages

    def prefill(
        self, prompts: Sequence[Sequence[int]], progress: Progress | None = None, reuse: Reuse = "none"
    ) -> None:
        """Feed the prompts to every level; all but their last tokens, which are the first roots.

        Args:
            reuse: which tokens that the cache holds from earlier generations are kept.
        """
        with self._prefilling():
            self.reused = self.program.prefill(prompts, progress, reuse)

    @contextmanager
    def _prefilling(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._clock.synchronize()
        self.prefill_seconds += time.perf_counter() - start

    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        endings: Sequence[Ending | None],
        observe: Observer | None = None,
    ) -> Iterator[list[list[int]]]:
        """Yield each sequence's new tokens as passes of level 2 commit them; none for one that has ended.

        Before it asks for the next pass the caller may put other sequences into the place of those that have
        ended, see :meth:`replace`.

        Args:
            endings: of each sequence; None for a row without one, whose prompt is a placeholder.
            observe: called after each pass, before its tokens are counted and yielded.

        Raises:
            ValueError: the model returned NaN.
        """
        # The caller may append to the prompts meanwhile.
        self._sequences, self._lengths = [list(prompt) for prompt in prompts], list(map(len, prompts))
        self._endings = list(endings)
        self.finish_reasons = [None if ending is not None else "empty" for ending in endings]
        if None in self._endings:
            self._update_active()
        after_plain = False
        try:
            while None in self.finish_reasons:
                start = time.perf_counter() - self.program.capture_seconds  # no decoding
                if self._costs is not None:
                    self._costs.at(max(map(len, self._sequences)), measured=self._learns)
                new_tokens = [len(s) - n for s, n in zip(self._sequences, self._lengths, strict=True)]
                self.controller.remaining = tokens_left(new_tokens, self._endings, self.finish_reasons)
                matched = self.lookup and self.lookup.choose(self._running(lambda sequence: sequence))
                kind = matched or self.controller.choose()
                self._clock.start()
                if kind != PLAIN:
                    kind = self._prepare(kind, resumed=after_plain)
                self.draws.before_pass(self._running(len))
                report = self._pass(kind)
                # The drafter catches up with the tokens of passes without its trees.
                without = kind == PLAIN or self.controller.matched(kind)
                resumed, after_plain = after_plain and not without, without
                new = self._append(report)
                self.report = [(count, proposed) for count, proposed, *_ in report]
                if observe is not None:
                    observe(new, self.emitted_logits)
                seconds = self._clock.seconds()
                self._count(kind, report, sum(map(len, new)), seconds, resumed)
                taken = time.perf_counter() - self.program.capture_seconds - start
                self.decode_seconds += taken
                self._last = kind, taken - sum(seconds.values()) + seconds.get("capture", 0.0)
                yield new
            if self._costs is not None and (rest := self._times.rest()) is not None:
                self._costs.learn(self.program, rest, self._learns)
        except GeneratorExit:
            raise
        except BaseException:
            # What an interrupted or failed pass left is not to be continued.
            self.program.cache.forget()
            raise
        finally:
            if self._costs is not None:
                factors = self._costs.end(self.program, self._to_probs)
                if self._learnt is not None:
                    self._learnt.keep(self.controller.learnt(factors))

    def emitted_logits(self, count: int) -> Tensor:
        """The target's logits by which the last pass chose the first ``count`` new tokens of each sequence.

        Returns:
            fp32 ``[B, count, V]``; arbitrary for tokens that a sequence did not emit.
        """
        return self.program.verifier(self._verified_by).emitted_logits(count)

    def _append(self, report: list[list[int]]) -> list[list[int]]:
        """Append the tokens of a pass to the running sequences, each up to its end; return the new tokens."""
        new: list[list[int]] = []
        ended = False
        for b, (count, _, _, broken, *tokens) in enumerate(report):
            if broken:
                raise ValueError(self._to_probs.nan_error)
            sequence, ending, before = self._sequences[b], self._endings[b], len(self._sequences[b])
            if self.finish_reasons[b] is None:
                assert ending is not None
                self.finish_reasons[b] = append(sequence, tokens[:count], self._lengths[b], ending)
                ended |= self.finish_reasons[b] is not None
            new.append(sequence[before:])
        if ended:
            self._update_active()
        return new

    def replace(
        self,
        row: int,
        prompt: Sequence[int],
        ending: Ending | None,
        number: int = 0,
        progress: Progress | None = None,
        reuse: Reuse = "none",
    ) -> None:
        """Between two passes, where ``program.replaces``, prefill another sequence in place of an ended one.

        Args:
            ending: None to leave the row without a sequence, with a placeholder for a prompt.
            number: of the sequence, for its draws: see ``sequence_seed``.

        Raises:
            ValueError: the prompt is too long for the buffers.
        """
        self._sequences[row], self._lengths[row], self._endings[row] = list(prompt), len(prompt), ending
        with self._prefilling():
            self.reused[row] = self.program.replace(row, self._sequences, progress, reuse)
        self.draws.begin(row, number)
        self.finish_reasons[row] = "empty" if ending is None else None
        self._update_active()
        if self._costs is not None:
            # Those of another length may hold again.
            self._costs.anew()

    def end(self, row: int) -> None:
        """End a sequence after the tokens that were yielded last."""
        if self.finish_reasons[row] is None:
            self.finish_reasons[row] = "stop"
            self._update_active()

    def _update_active(self) -> None:
        self.program.state.active.copy_(torch.tensor([reason is None for reason in self.finish_reasons]))

    def _running(self, of: Callable[[list[int]], Value]) -> list[Value | None]:
        """A value of each sequence; None for those that have ended."""
        reasons = zip(self._sequences, self.finish_reasons, strict=True)
        return [of(sequence) if reason is None else None for sequence, reason in reasons]

    def _prepare(self, kind: PassKind, resumed: bool) -> PassKind:
        """Let the drafter catch up with what was committed, and the retrieval level after other passes.

        Returns:
            the pass to make: with trees of the first shape, where memory is short for another one's stages.
        """
        program, matched = self.program, self.controller.matched(kind)
        if program.drafter is not None and not matched:
            program.drafter.prepare(self._running(lambda sequence: sequence), resumed)
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
                self.controller.other_costs = [None] * len(self.controller.other_costs)
                kind = self._prepare(kind._replace(shape=0), resumed=resumed or matched)
            self._clock.mark("capture")
        return kind

    def _pass(self, kind: PassKind) -> list[list[int]]:
        program, clock = self.program, self._clock
        for done in range(kind.rounds):
            self._run(stage_name("draft", kind.shape))
            clock.mark("draft")
            if kind.levels == 3:
                name = "retrieval_refresh" if program.config.retrieval.chooses(done) else "retrieval"
                self._run(stage_name(name, kind.shape))
                clock.mark("retrieval")
        stage = program.last_stage(kind.levels, kind.shape)
        self._run(stage)
        clock.mark("target")
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

    def _run(self, stage: str) -> None:
        self.program.run(stage, *self.draws.generators)
        if self.after_stage is not None:
            self.after_stage(stage)

    def _count(
        self, kind: PassKind, report: list[list[int]], emitted: int, seconds: dict[str, float], resumed: bool
    ) -> None:
        """Add up the statistics of the sequences that were still running, and let the controller learn.

        Args:
            emitted: new tokens up to the end of each sequence; the report also counts later ones.
            seconds: of the stages.
            resumed: whether the pass before it was plain.
        """
        rounds, running = kind.rounds, [row for row in report if row[0] > 0]
        count, proposed, gathered = (sum(row[i] for row in running) for i in range(3))
        trees, target = rounds * len(running), self.levels[-1]
        target.add(len(running), proposed, count - len(running), emitted, seconds["target"])
        if trees:
            forwards, tokens = (len(running) * number for number in drafted(self.program, *kind))
            self.levels[0].add(forwards, 0, 0, tokens, seconds["prepare"] + seconds["draft"])
            if kind.levels == 3:
                verified = trees * self.program.shapes[kind.shape].depth
                self.levels[1].add(trees, verified, gathered - trees, gathered, seconds["retrieval"])
        each = gathered / len(running) if running else None
        own = PassTimes(kind, each, seconds, resumed, self._last)
        times = self._times.share(own) if self._learns else own
        if self._learns and times is not None and times.before is not None:
            self.controller.host.add(*times.before)
        if running:
            ranks, chain = None, self.program.max_draft_tokens if kind.levels == 3 else None
            tail = self.program.shapes[0].depth if self.program.tail_tree else None
            rejected, tails = judged(running, chain, tail)
            if self.lookup and self.controller.matched(kind):
                self.lookup.observe([row[0] - 1 for row in report])
            elif rounds and self.program.state.rank_counts is not None:
                ranks = (*self.program.state.ranks_of(running), rounds * len(running))
            self.controller.observe(
                kind, len(running), gathered, count - len(running), rejected, ranks, tails
            )
        if self._costs is not None and times is not None:
            self._costs.learn(self.program, times, self._learns)

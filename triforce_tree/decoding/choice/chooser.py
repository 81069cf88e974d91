"""The choice of each pass of a decoding loop, and what it learns from the passes."""

from collections.abc import Mapping, Sequence

from triforce_tree.decoding.choice.controller import PassController
from triforce_tree.decoding.choice.cost_table import other_costs, stage_costs
from triforce_tree.decoding.choice.costs_by_length import CostsByLength
from triforce_tree.decoding.choice.estimates import judged
from triforce_tree.decoding.choice.learnt_table import LearntChoices
from triforce_tree.decoding.choice.lookup_choice import LookupChoice
from triforce_tree.decoding.choice.passes import PassKind
from triforce_tree.decoding.choice.stage_costs import Allowance
from triforce_tree.decoding.choice.times.shared_times import PassTimes, SharedTimes
from triforce_tree.decoding.prepared_stages import held_back
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.verify.sampling import ProbsFromLogits


class PassChooser:
    """Chooses the passes of a loop over one program.

    Args:
        program: its stages are prepared for ``to_probs``.
        to_probs: logits to probabilities.
        repeatable: whether the choice follows from the table of stage costs, the tokens and how many may
            follow alone. Otherwise it also follows from times measured while decoding, and from what earlier
            requests that were not repeatable left (``learnt_table.py``).
        allowance: what measuring the stages' costs may take, where they are not known.

    Attributes:
        controller: chooses passes without matched tokens.
        lookup: chooses passes that verify matched tokens; None where there are none.
    """

    def __init__(
        self, program: DecodingProgram, to_probs: ProbsFromLogits, repeatable: bool, allowance: Allowance
    ) -> None:
        self._program, self._to_probs = program, to_probs
        program.selected.timings.begin()
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
        # The last pass, with its seconds beyond those of its stages.
        self._last: tuple[PassKind, float] | None = None
        if self._costs and self._learnt:
            if (learnt := self._learnt.last()) is not None:
                self.controller.resume(learnt)
                self._costs.factors = learnt.cost_factors
            # With a seed the choice must not depend on which stages are there already.
            self.controller.preparation.begin(held_back(program))

    def choose(self, texts: Sequence[list[int] | None], longest: int, remaining: int) -> PassKind:
        """Choose the next pass.

        Args:
            texts: all committed tokens of each sequence; None for one that does not run.
            longest: tokens of the longest text in the batch.
            remaining: the most tokens that may follow in a running sequence.
        """
        if self._costs is not None:
            self._costs.at(longest, measured=self._learns)
        self.controller.remaining = remaining
        matched = self.lookup and self.lookup.choose(texts)
        return matched or self.controller.choose()

    def matched(self, kind: PassKind) -> bool:
        """Whether a pass verifies matched tokens."""
        return self.controller.matched(kind)

    def do_without_other_trees(self) -> None:
        """Choose passes with trees of the first shape alone from now on."""
        self.controller.other_costs = [None] * len(self.controller.other_costs)

    def joined(self) -> None:
        """Another sequence has joined the batch: costs of another length may hold again."""
        if self._costs is not None:
            self._costs.anew()

    def observe(
        self, kind: PassKind, report: Sequence[list[int]], seconds: Mapping[str, float], resumed: bool
    ) -> None:
        """Learn from a pass.

        Args:
            report: see ``SequenceState.pass_results``.
            seconds: of its stages, by name.
            resumed: whether the pass before it had no trees of the drafter.
        """
        program, controller = self._program, self.controller
        running = [row for row in report if row[0] > 0]
        gathered = sum(row[2] for row in running)
        own = PassTimes(kind, gathered / len(running) if running else None, seconds, resumed, self._last)
        times = self._times.share(own) if self._learns else own
        if self._learns and times is not None and times.before is not None:
            controller.host.add(*times.before)
        if running:
            ranks, chain = None, program.max_draft_tokens if kind.levels == 3 else None
            rejected, tails = judged(running, chain, program.shapes[0].depth if program.tail_tree else None)
            if self.lookup and controller.matched(kind):
                self.lookup.observe([row[0] - 1 for row in report])
            elif kind.rounds and program.state.rank_counts is not None:
                ranks = (*program.state.ranks_of(running), kind.rounds * len(running))
            accepted = sum(row[0] for row in running) - len(running)
            controller.observe(kind, len(running), gathered, accepted, rejected, ranks, tails)
        if self._costs is not None and times is not None:
            self._costs.learn(program, times, self._learns)

    def took(self, kind: PassKind, seconds: float) -> None:
        """Note the seconds of the last pass beyond those of its stages."""
        self._last = kind, seconds

    def finish(self) -> None:
        """Learn from the last pass of a batch, whose times other ranks had not sent."""
        if self._costs is not None and (rest := self._times.rest()) is not None:
            self._costs.learn(self._program, rest, self._learns)

    def close(self) -> None:
        """Keep what was learnt for later requests."""
        if self._costs is not None:
            factors = self._costs.end(self._program, self._to_probs)
            if self._learnt is not None:
                self._learnt.keep(self.controller.learnt(factors))

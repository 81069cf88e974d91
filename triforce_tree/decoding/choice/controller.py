"""The choice of each pass: one, two or three levels, and how many rounds of drafting come first.

With acceptance a per token, a chain of n tokens yields (1 - a^(n+1)) / (1 - a) tokens of a verification
(Leviathan et al., arXiv 2211.17192, equation 1). With three levels n is what r rounds of m tokens gathered,
with two the depth of the drafter's tree. The kind of pass with the most tokens per second is chosen from
running estimates of the acceptances and of m (``estimates.py``).

Three rules bound what a choice may cost where it does not pay:

* Loss budget (``budgets/loss_budget.py``). It is charged with the time by which a drafting pass exceeded
  plain decoding of the tokens it yielded, credited with what a pass gained, and grows with the time of plain
  decoding. A pass is made only if the budget covers its worst case, one token. So decoding takes at most
  ``START_SHARE`` of a request's tokens, and no more than ``START_BUDGET`` plain passes, and ``REFILL`` of its
  time more than plain decoding would, whatever is accepted: 2 %. Where that is less than the cheapest pass,
  one trial may use what earlier requests have not; where the estimates say that it will not pay, only once
  the whole budget is there again. No trial is begun that the remaining tokens could not repay.
* Pauses. Where no kind of pass is likely to beat plain decoding, drafting pauses, longer after each trial
  that did not pay, and is then tried again with new estimates: the text may have changed, or the trial may
  have been unlucky.
* Trials of other numbers of levels and shapes of trees are made only where they would be better at the upper
  end of the confidence interval, and cost at most ``budgets.trials.TRIALS`` of the tokens together.

A later request may resume from what an earlier one learnt: its estimates, its costs, and its loss budget,
so that all of them together lose ``START_BUDGET`` and ``REFILL`` at most. Pauses end with the request.
"""

import math
from collections.abc import Mapping, Sequence

from triforce_tree.decoding.choice.budgets.loss_budget import REFILL, START_BUDGET, LossBudget
from triforce_tree.decoding.choice.budgets.preparation import Preparation
from triforce_tree.decoding.choice.budgets.trials import Trials
from triforce_tree.decoding.choice.estimates import Estimates, Learnt, LearntChoice, Ranks, Tails, tokens_of
from triforce_tree.decoding.choice.passes import PLAIN, CostFactors, Option, PassKind, StageSeconds, refined
from triforce_tree.decoding.choice.times.host_seconds import HostSeconds
from triforce_tree.trees.device_shapes import DeviceTreeShape

# Share of the budget that the first pass of a trial may lose: what one pass shows may be chance.
_FIRST_PASS = 0.75
# Tokens decoded without drafts after a trial that did not pay: after the first one, and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 64, 4096
_REPAID_LATER = 8  # The same where a trial could not be repaid: sequences that join bring more tokens.
# Of the plain passes of a pause so many change the costs only once: no choice is made by them meanwhile, the
# device would wait for it each time, and eight of the shortest pause show whether the machine is busy.
_REFINED_EVERY = 8
# Share of the prior's weight in later trials of a request.
_LATER = 0.5
# Drafting pauses where it is not this much faster than plain decoding at the confidence intervals' upper end.
_MARGIN = 1.02


class PassController:
    """Chooses the kind of each pass, without clock or random numbers: equal observations give equal choices.

    Args:
        levels: most levels of a pass. 3: a round adds what the retrieval level accepted to a chain of draft
            tokens. 2: the target verifies the draft's tree itself. 1: there is no draft.
        depth: of the draft's trees; 0 for one level.
        max_draft_tokens: most tokens of the chain; with two levels ``depth``.
        fixed: always this many rounds (one at most with two levels), whatever they cost.
        two_levels: with three levels: whether passes of two levels may be chosen as well.
        shapes: of the draft's trees, where passes may have trees of several: that of ``depth`` first, chains
            of matched tokens last.
        tail: whether the target also verifies a tree of the first shape at the end of each chain.

    Attributes:
        lookup: number of the first shape of matched tokens, 0 for none: ``lookup_choice.py`` chooses these.
        costs: with trees of the first shape. Set before ``choose`` is called, unless rounds are fixed; may be
            changed at any time.
        other_costs: with trees of each other shape; None for one that passes must not take.
        host: seconds of passes beyond those of their stages; 0 unless they are measured while decoding.
        estimates: of acceptance, and of what a round brings.
        preparation: shapes whose stages are not made.
        budget: what drafting may lose.
        remaining: tokens that a sequence may still get at most; set before ``choose`` is called.
    """

    def __init__(
        self,
        levels: int,
        depth: int,
        max_draft_tokens: int,
        fixed: int | None = None,
        two_levels: bool = False,
        shapes: Sequence[DeviceTreeShape] = (),
        tail: bool = False,
    ) -> None:
        self.levels, self.max_draft_tokens = levels, max_draft_tokens
        self._depths = [depth, *(shape.depth for shape in shapes[1:])]
        self.lookup = next((number for number, shape in enumerate(shapes) if shape.matched), 0)
        self.fixed = 0 if levels == 1 else fixed if fixed is None or levels > 2 else min(fixed, 1)
        self.costs: StageSeconds | None = None
        self.other_costs: Sequence[StageSeconds | None] = [None] * len(shapes[1:])
        self.host = HostSeconds()
        self.estimates = Estimates(levels, self._depths, two_levels, shapes[: self.lookup or None], tail)
        self._kinds = {1: (), 2: (2,), 3: (2, 3) if two_levels else (3,)}[levels]
        self.preparation = Preparation()
        self.budget, self.remaining, self._made = LossBudget(), math.inf, 0.0
        self._trials = Trials()
        self._paused = self._pause = self._passes = 0
        self._options: list[Option] = []  # for ``choose`` in the same pass
        self._gained, self._last_plain, self._measured = 0.0, False, set[tuple[str, int]]()

    def expect(self, acceptance: float, tokens_per_round: float) -> None:
        """Begin trials from estimates that were measured earlier; the first one only if none were resumed.

        Args:
            acceptance: of a chain's tokens, with two levels of a tree's.
            tokens_per_round: that the retrieval level adds.

        Raises:
            ValueError: the acceptance is not within 0 and 1, or a round brings less than a token.
        """
        self.estimates.expect(Learnt(acceptance, tokens_per_round, acceptance if self.levels == 2 else None))

    def resume(self, learnt: LearntChoice) -> None:
        """Begin the first trial from an earlier request's estimates, with its loss budget."""
        self.budget.resume(learnt.budget)
        self.estimates.resume(learnt.estimates)
        self.preparation.missed = dict(learnt.missed)
        self.host = learnt.host

    def learnt(self, cost_factors: CostFactors) -> LearntChoice:
        """What a later request may :meth:`resume` from, with the caller's cost factors."""
        estimates, missed = self.estimates.learnt(bool(self._passes)), dict(self.preparation.missed)
        return LearntChoice(estimates, self.budget.kept, cost_factors, missed, self.host)

    @property
    def acceptance(self) -> float:
        """Estimated probability that the target accepts a draft token whose predecessors it accepted."""
        return self.estimates.tree if self.levels == 2 else self.estimates.chain

    @property
    def tokens_per_round(self) -> float:
        """Estimated draft tokens that a round adds."""
        return self.estimates.per_round

    def choose(self) -> PassKind:
        """The next pass."""
        if self.fixed is not None:
            return PassKind(self.levels, self.fixed) if self.fixed else PLAIN
        self.budget.bound(self._made + self.remaining)
        if self._paused:
            return PLAIN
        plain = _MARGIN / self._plain
        options = self._options or self.options()
        if self._passes and all(option.highest_rate <= plain for option in options[1:]):
            self.preparation.count(options)
            self._pause_drafting()
            return PLAIN
        # Near its end a request gets no more than it asked for, however many tokens are accepted.
        options = [option.within(self.remaining) for option in options]
        self.preparation.count(options)
        ready = [option for option in options[1:] if self.preparation.ready(option.kind.shape)]
        useful = [option for option in ready if option.highest_rate > plain]
        affordable = [option for option in useful if self._needed(option.kind) <= self.budget.left]
        if affordable and self._repays(affordable):
            best = max(affordable, key=lambda option: option.rate)
            return (self._trials.worth(affordable, best) or best).kind
        if self._passes == 0:
            needed, kind = self._cheapest()  # It shows whether a longer one would pay.
            if not self._repays(useful):
                self._paused = _REPAID_LATER
                return PLAIN
            least = needed if useful else max(needed, START_BUDGET)
            if needed <= self.budget.left or self.budget.lend(self._worst_loss(kind), least):
                return kind
        elif useful:
            needed = least = min(self._needed(option.kind) for option in useful)
        else:
            return PLAIN
        # The budget grows up to START_BUDGET, or further if the cheapest useful pass needs more.
        self.budget.ceiling = max(START_BUDGET, needed)
        self._paused = max(1, math.ceil(self.budget.lacks(needed, least) / REFILL))
        return PLAIN

    def _cheapest(self) -> tuple[float, PassKind]:
        """The drafting pass that needs the least budget."""
        shapes = [shape for shape in self._shapes if self.preparation.ready(shape)]
        cheapest = [PassKind(levels, 1, shape) for levels in self._kinds for shape in shapes]
        return min((self._needed(kind), kind) for kind in cheapest)

    def matched_pass(self, tokens: Sequence[float]) -> PassKind | None:
        """A pass with matched tokens, if it is expected to yield more tokens a second than any other.

        For controllers with :attr:`lookup` that are not fixed.

        Args:
            tokens: that a pass with each shape of them is expected to yield for a sequence.
        """
        kinds = [PassKind(2, 1, shape) for shape in range(self.lookup, len(self._depths))]
        known = [(k, t) for k, t in zip(kinds, tokens, strict=True) if self.other_costs[k.shape - 1]]
        options = [Option(k, t, t, self._seconds(k, 1.0)).within(self.remaining) for k, t in known]
        self._options = [] if self._paused or not options else self.options()
        others = self._options or [Option(PLAIN, _MARGIN, 1.0, self._plain)]
        best = max((o.within(self.remaining) for o in others), key=lambda o: o.rate)
        self.preparation.count([best, *options])
        better = [o for o in options if o.rate > best.rate and self.preparation.ready(o.kind.shape)]
        ordered = [option.kind for option in sorted(better, key=lambda o: -o.rate)]
        return next((kind for kind in ordered if self.budget.cover(self._worst_loss(kind))), None)

    def options(self) -> list[Option]:
        """What is expected of each kind of pass up to the best number of rounds, plain decoding first."""
        found = [Option(PLAIN, 1.0, 1.0, self._plain)]
        for shape in self._shapes:
            if 2 in self._kinds:
                a, error = self.estimates.of(2, shape)
                kind, depth = PassKind(2, 1, shape), self._depths[shape]
                seconds = self._costs_of(shape).of(kind) + self.host.of(kind)
                tokens, most = tokens_of(a, depth), tokens_of(a + error, depth)
                found.append(Option(kind, tokens, most, seconds, self.estimates.doubt(2, shape)))
            if 3 in self._kinds:
                found += self._options_of_rounds(shape)
        return found

    def _options_of_rounds(self, shape: int) -> list[Option]:
        """Passes of three levels up to the best number of rounds."""
        a, error = self.estimates.of(3)
        gathered, doubt = self.estimates.per_round_of(shape), self.estimates.doubt(3, shape)
        most, costs, found = float(self.max_draft_tokens), self._costs_of(shape), list[Option]()
        host = self.host.of(PassKind(3, 1))
        for rounds in range(1, math.ceil(most / gathered) + 1):
            kind, chain = PassKind(3, rounds, shape), min(most, rounds * gathered)
            seconds = costs.of(kind, chain / most) + host
            tokens, most_tokens = (self.estimates.chain_tokens(each, chain) for each in (a, a + error))
            found.append(Option(kind, tokens, most_tokens, seconds, doubt))
            if rounds > 1 and found[-1].highest_rate < found[-2].highest_rate:
                break  # Further rounds bring less and less in the same time.
        return found

    def observe(
        self,
        kind: PassKind,
        sequences: int = 1,
        gathered: int = 0,
        accepted: int = 0,
        rejected: int = 0,
        ranks: Ranks | None = None,
        tails: Tails | None = None,
    ) -> None:
        """Update the estimates after a pass. Counts are sums over the sequences that were still running.

        Args:
            kind: of the pass; for a plain one the other counts are ignored.
            sequences: at least 1.
            gathered: draft tokens that its rounds added (3 levels).
            accepted: draft tokens that the target accepted.
            rejected: sequences in which it rejected one of the chain, which ends it: accepted / (accepted +
                rejected) estimates the acceptance.
            ranks: acceptance of the draft's trees by depth and rank, where there are several shapes.
            tails: trees behind chains; their accepted tokens are in ``accepted`` too.
        """
        self._options = []
        if self.fixed is None:
            self._charge(kind, 1 + accepted / sequences, gathered / sequences)
        if kind.levels == 1 or self.matched(kind):
            return
        self._passes += 1
        self.estimates.observe(kind, gathered / sequences, accepted, rejected, ranks, tails)

    def refine(
        self, kind: PassKind, gathered: float, seconds: Mapping[str, float], resumed: bool = False
    ) -> None:
        """Move the costs towards the measured seconds of one pass, see :func:`refined`.

        Args:
            gathered: draft tokens of a sequence that its rounds added.
            seconds: ``draft`` and ``retrieval`` of all its rounds, ``target`` of the target's stage,
                ``prepare`` before the first one.
            resumed: whether the pass before it was plain.
        """
        if self.costs is None or (kind.levels == 1 and self._paused % _REFINED_EVERY):
            return
        filled = self._filled(kind, gathered)
        new = self._costs_of(kind.shape).towards(kind, filled, seconds, resumed)
        self.costs, *self.other_costs = refined([self.costs, *self.other_costs], kind, new, self._measured)

    def matched(self, kind: PassKind) -> bool:
        """Whether a pass verifies matched tokens."""
        return 0 < self.lookup <= kind.shape

    @property
    def _shapes(self) -> list[int]:
        """The shapes of trees that passes may take."""
        known = (n for n, costs in enumerate(self.other_costs, 1) if costs is not None)
        return [0, *(n for n in known if n < (self.lookup or math.inf))]

    def _costs_of(self, shape: int) -> StageSeconds:
        costs = self.other_costs[shape - 1] if shape else self._costs
        assert costs is not None, "passes take only trees whose costs are known"
        return costs

    @property
    def _costs(self) -> StageSeconds:
        if self.costs is None:
            raise ValueError("costs=None, but the choice of rounds needs them: set costs, or fix the rounds")
        return self.costs

    @property
    def _plain(self) -> float:
        """Seconds of a plain pass."""
        return self._costs.plain + self.host.of(PLAIN)

    def _filled(self, kind: PassKind, gathered: float) -> float:
        return gathered / self.max_draft_tokens if kind.levels == 3 else 1.0

    def _repays(self, useful: Sequence[Option]) -> bool:
        """Whether the remaining tokens can repay the first pass of a trial: at the upper end of the intervals
        of those that may be useful, or, where none is, if the cheapest pass doubles the speed."""
        if self._passes or self.remaining == math.inf:
            return True
        saved = [(option.kind, 1 - 1 / (option.highest_rate * self._plain)) for option in useful]
        saved = saved or [(self._cheapest()[1], 0.5)]
        return any(self.remaining * share >= self._worst_loss(kind) for kind, share in saved)

    def _worst_loss(self, kind: PassKind) -> float:
        """Plain passes that a pass loses if it yields a single token."""
        most = kind.rounds * (self._depths[kind.shape] + 1)
        return self._seconds(kind, self._filled(kind, most)) / self._plain - 1

    def _seconds(self, kind: PassKind, filled: float) -> float:
        prepare = self._costs.prepare if self._last_plain and not self.matched(kind) else 0.0
        return self._costs_of(kind.shape).of(kind, filled) + self.host.of(kind) + prepare

    def _needed(self, kind: PassKind) -> float:
        """The least budget with which a pass is made."""
        return self._worst_loss(kind) / (1.0 if self._passes else _FIRST_PASS)

    def _charge(self, kind: PassKind, tokens: float, gathered: float) -> None:
        """Charge or credit the budgets with a pass that yielded so many tokens per sequence."""
        tokens = min(tokens, self.remaining)
        self._made += tokens
        self._trials.charge(kind, tokens)
        if kind.levels > 1:
            gain = tokens - self._seconds(kind, self._filled(kind, gathered)) / self._plain
            self.budget.charge(gain)
            self._gained += gain
            self._last_plain = self.matched(kind)
            return
        self._paused = max(0, self._paused - 1)
        self._last_plain = True
        self.budget.plain()

    def _pause_drafting(self) -> None:
        paid = self._gained > 0 or not self._pause
        self._pause = _FIRST_PAUSE if paid else min(2 * self._pause, _LONGEST_PAUSE)
        self._paused = self._pause
        self._passes, self._gained = 0, 0.0
        self.estimates.begin_again(_LATER)

"""The choice of each pass: one, two or three levels, and how many rounds of drafting come first.

With acceptance a per token, a chain of n tokens yields (1 - a^(n+1)) / (1 - a) tokens of a verification
(Leviathan et al., arXiv 2211.17192, equation 1). With three levels n is what r rounds of m tokens gathered,
with two the depth of the drafter's tree. The kind of pass with the most tokens per second is chosen from
running estimates of the acceptances and of m (``estimates.py``).

Three rules bound what a choice may cost where it does not pay:

* Loss budget. It is charged with the time by which a drafting pass exceeded plain decoding of the tokens it
  yielded, credited with what a pass gained, and grows with the time of plain decoding. A pass is made only
  if the budget covers its worst case, one token. So decoding takes at most ``START_BUDGET`` plain passes and
  ``REFILL`` of its time more than plain decoding would, whatever is accepted: 1.7 % of 256 tokens.
* Pauses. Where no kind of pass is likely to beat plain decoding, drafting pauses, longer after each trial
  that did not pay, and is then tried again with new estimates: the text may have changed, or the trial may
  have been unlucky.
* Trials of the other number of levels are made only where they would be better at the upper end of the
  confidence interval, and cost at most ``TRIALS`` of the tokens.

A later request may resume from what an earlier one learnt: its estimates, its costs, and its loss budget,
never more than ``START_BUDGET``, so that the bound holds for each request and for all of them together.
Pauses end with the request.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from triforce_tree.decoding.choice.estimates import Estimates, Learnt, tokens_of
from triforce_tree.decoding.choice.passes import PLAIN, CostFactors, PassKind, StageSeconds

START_BUDGET = 3.0
"""Plain passes that drafting may lose before it has gained anything."""
REFILL = 0.005
"""Share of the time of plain decoding by which the loss budget grows."""
TRIALS = 0.02
"""Share of the tokens that trials of the other number of levels may cost."""
# Gains are credited up to this many plain passes: where acceptance falls, the loss is bounded by them.
_MOST_BUDGET = 64.0
# Share of the budget that the first pass of a trial may lose: what one pass shows may be chance.
_FIRST_PASS = 0.75
# Tokens decoded without drafts after a trial that did not pay: after the first one, and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 64, 4096
# Share of the prior's weight in later trials of a request.
_LATER = 0.5
# Drafting pauses where it would not be this much faster than plain decoding at the upper end of the
# confidence intervals: costs are known to a few per cent.
_MARGIN = 1.02
# Tokens that trials of the other number of levels may cost at first, and at most.
_FIRST_TRIALS, _MOST_TRIALS = 1.0, 4.0
# Weight of a newly measured time, which is clamped to this many times the mean, and to its inverse.
_NEW, _OUTLIER = 0.15, 2.0


@dataclass(frozen=True)
class LearntChoice:
    """What a request leaves to the next one.

    Attributes:
        estimates: as last made.
        budget: the loss budget, in plain passes.
        cost_factors: of its measured costs to those of the table of stage costs.
    """

    estimates: Learnt
    budget: float
    cost_factors: CostFactors


class Option(NamedTuple):
    """What is expected of a kind of pass: tokens of a sequence, and seconds.

    Attributes:
        most_tokens: at the upper end of the acceptance's confidence interval.
    """

    kind: PassKind
    tokens: float
    most_tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second and sequence."""
        return self.tokens / self.seconds

    @property
    def highest_rate(self) -> float:
        return self.most_tokens / self.seconds


class PassController:
    """Chooses the kind of each pass, without a clock or random numbers.

    The same costs and observations give the same choices.

    Args:
        levels: most levels of a pass. 3: a round adds what the retrieval level accepted to a chain of draft
            tokens. 2: the target verifies the draft's tree itself. 1: there is no draft.
        depth: of the draft's trees; 0 for one level.
        max_draft_tokens: most tokens of the chain; with two levels ``depth``.
        fixed: always this many rounds (one at most with two levels), whatever they cost.
        two_levels: with three levels: whether passes of two levels may be chosen as well.

    Attributes:
        costs: set before ``choose`` is called, unless rounds are fixed; may be changed at any time.
        estimates: of acceptance, and of what a round brings.
    """

    def __init__(
        self,
        levels: int,
        depth: int,
        max_draft_tokens: int,
        fixed: int | None = None,
        two_levels: bool = False,
    ) -> None:
        self.levels, self.depth, self.max_draft_tokens = levels, depth, max_draft_tokens
        self.fixed = fixed if fixed is None or levels > 2 else min(fixed, 1)
        if levels == 1:
            self.fixed = 0
        self.costs: StageSeconds | None = None
        self.estimates = Estimates(levels, depth, two_levels)
        self._kinds = {1: (), 2: (2,), 3: (2, 3) if two_levels else (3,)}[levels]
        self._budget = START_BUDGET
        self._trials = _FIRST_TRIALS
        self._trial: tuple[PassKind, float] | None = None
        self._paused = self._pause = self._passes = 0
        self._gained = 0.0
        self._last_plain = False
        self._most_refilled = START_BUDGET

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
        self._budget = min(learnt.budget, START_BUDGET)
        self.estimates.resume(learnt.estimates)

    def learnt(self, cost_factors: CostFactors) -> LearntChoice:
        """What a later request may :meth:`resume` from, with the caller's cost factors."""
        return LearntChoice(self.estimates.learnt(bool(self._passes)), self._budget, cost_factors)

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
        if self._paused:
            return PLAIN
        plain = _MARGIN / self._costs.plain
        useful = [option for option in self.options()[1:] if option.highest_rate > plain]
        if self._passes and not useful:
            self._pause_drafting()
            return PLAIN
        affordable = [option for option in useful if self._needed(option.kind) <= self._budget]
        if affordable:
            best = max(affordable, key=lambda option: option.rate)
            return (self._worth_a_trial(affordable, best) or best).kind
        # The cheapest pass shows whether a longer one would pay.
        cheapest = [PassKind(levels, 1) for levels in self._kinds]
        needed, kind = min((self._needed(kind), kind) for kind in cheapest)
        if self._passes == 0 and needed <= self._budget:
            return kind
        if self._passes:
            needed = min(self._needed(option.kind) for option in useful)
        # The budget grows up to START_BUDGET, or further if the cheapest useful pass needs more.
        self._most_refilled = max(START_BUDGET, needed)
        self._paused = max(1, math.ceil((needed - self._budget) / REFILL))
        return PLAIN

    def options(self) -> list[Option]:
        """What is expected of each kind of pass up to the best number of rounds, plain decoding first."""
        costs = self._costs
        found = [Option(PLAIN, 1.0, 1.0, costs.plain)]
        if 2 in self._kinds:
            a, error = self.estimates.of(2)
            kind, depth = PassKind(2, 1), self.depth
            found.append(Option(kind, tokens_of(a, depth), tokens_of(a + error, depth), costs.of(kind)))
        if 3 in self._kinds:
            a, error = self.estimates.of(3)
            gathered, most = self.tokens_per_round, self.max_draft_tokens
            for rounds in range(1, math.ceil(most / gathered) + 1):
                kind, chain = PassKind(3, rounds), min(float(most), rounds * gathered)
                seconds = costs.of(kind, chain / most)
                found.append(Option(kind, tokens_of(a, chain), tokens_of(a + error, chain), seconds))
                if rounds > 1 and found[-1].highest_rate < found[-2].highest_rate:
                    # Further rounds bring less and less in the same time.
                    break
        return found

    def observe(
        self, kind: PassKind, sequences: int = 1, gathered: int = 0, accepted: int = 0, rejected: int = 0
    ) -> None:
        """Update the estimates after a pass. Counts are sums over the sequences that were still running.

        Args:
            kind: of the pass; for a plain one the other counts are ignored.
            sequences: at least 1.
            gathered: draft tokens that its rounds added (3 levels).
            accepted: draft tokens that the target accepted.
            rejected: sequences in which it rejected one. A rejection ends the chain, so
                accepted / (accepted + rejected) estimates the acceptance.
        """
        if self.fixed is None:
            self._charge(kind, 1 + accepted / sequences, gathered / sequences)
        if kind.levels == 1:
            return
        self._passes += 1
        self.estimates.observe(kind, gathered / sequences, accepted, rejected)

    def refine(
        self, kind: PassKind, gathered: float, seconds: Mapping[str, float], resumed: bool = False
    ) -> None:
        """Move the costs towards the measured seconds of one pass.

        Args:
            gathered: draft tokens of a sequence that its rounds added.
            seconds: ``draft`` and ``retrieval`` of all its rounds, ``target`` of the target's stage,
                ``prepare`` before the first one.
            resumed: whether the pass before it was plain.
        """
        old = self.costs
        if old is None:
            return
        drafting = ("draft", "retrieval") if kind.rounds else ()
        measured = {name: seconds[name] / kind.rounds for name in drafting if seconds.get(name)}
        factor = seconds["target"] / old.verification(kind, self._filled(kind, gathered))
        for name in {1: ("plain",), 2: ("tree",), 3: ("chain", "root")}[kind.levels]:
            if (value := getattr(old, name)) < math.inf:
                measured[name] = value * factor
        if old.prepare and resumed and seconds.get("prepare"):
            measured["prepare"] = seconds["prepare"]
        new = {name: _mean(getattr(old, name), value) for name, value in measured.items()}
        self.costs = StageSeconds(**{**vars(old), **new})

    @property
    def _costs(self) -> StageSeconds:
        if self.costs is None:
            raise ValueError("costs=None, but the choice of rounds needs them: set costs, or fix the rounds")
        return self.costs

    def _filled(self, kind: PassKind, gathered: float) -> float:
        return gathered / self.max_draft_tokens if kind.levels == 3 else 1.0

    def _worth_a_trial(self, options: list[Option], best: Option) -> Option | None:
        """A pass of another number of levels that may be better than the best, if trials may cost so much."""
        others = [option for option in options if option.kind.levels != best.kind.levels]
        other = max(others, key=lambda option: option.rate, default=best)
        if other.highest_rate <= best.rate:
            return None
        # Tokens that the best kind of pass is expected to yield in the same time, beyond the other's own.
        cost = other.seconds * best.rate - other.tokens
        if cost > self._trials:
            return None
        self._trial = other.kind, cost
        return other

    def _worst_loss(self, kind: PassKind) -> float:
        """Plain passes that a pass loses if it yields a single token."""
        most = kind.rounds * (self.depth + 1)
        return self._seconds(kind, self._filled(kind, most)) / self._costs.plain - 1

    def _seconds(self, kind: PassKind, filled: float) -> float:
        return self._costs.of(kind, filled) + (self._costs.prepare if self._last_plain else 0.0)

    def _needed(self, kind: PassKind) -> float:
        """The least budget with which a pass is made."""
        return self._worst_loss(kind) / (1.0 if self._passes else _FIRST_PASS)

    def _charge(self, kind: PassKind, tokens: float, gathered: float) -> None:
        """Charge or credit the budgets with a pass that yielded so many tokens per sequence."""
        self._trials = min(self._trials + TRIALS * tokens, _MOST_TRIALS)
        if self._trial is not None and self._trial[0] == kind:
            self._trials -= self._trial[1]
        self._trial = None
        if kind.levels > 1:
            gain = tokens - self._seconds(kind, self._filled(kind, gathered)) / self._costs.plain
            self._budget = min(self._budget + gain, _MOST_BUDGET)
            self._gained += gain
            self._last_plain = False
            return
        self._paused = max(0, self._paused - 1)
        self._last_plain = True
        self._budget = max(self._budget, min(self._budget + REFILL, self._most_refilled))

    def _pause_drafting(self) -> None:
        paid = self._gained > 0 or not self._pause
        self._pause = _FIRST_PAUSE if paid else min(2 * self._pause, _LONGEST_PAUSE)
        self._paused = self._pause
        self._passes, self._gained = 0, 0.0
        self.estimates.begin_again(_LATER)


def _mean(old: float, new: float) -> float:
    return old + _NEW * (min(max(new, old / _OUTLIER), old * _OUTLIER) - old)

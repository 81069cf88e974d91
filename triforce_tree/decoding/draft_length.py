"""Draft length: how many rounds of drafting precede the target's verification, 0 for plain decoding.

With acceptance a per token and m tokens a round, r rounds draft n = m r tokens, of which a verification
yields (1 - a^(n+1)) / (1 - a) in r t_round + t_verify seconds (Leviathan et al., arXiv 2211.17192,
equation 1). The r with the most tokens per second is chosen from running estimates of a and m.

Two rules bound what drafting may cost where it does not pay:

* Loss budget. It is charged with the time by which a drafting pass exceeded plain decoding of the tokens it
  yielded, credited with what a pass gained, and grows with the time of plain decoding. A pass is made only
  if the budget covers its worst case, one token. So decoding takes at most ``START_BUDGET`` plain passes and
  ``REFILL`` of its time more than plain decoding would, whatever is accepted.
* Pauses. Where no number of rounds is likely to beat plain decoding, drafting pauses, longer after each trial
  that did not pay, and is then tried again with new estimates: the text may have changed, or the trial may
  have been unlucky.

A later request may resume from what an earlier one learnt: its estimates, its costs, and its loss budget, so
that the bound holds for all of them together. Pauses end with the request.
"""

import math
from dataclasses import dataclass

START_BUDGET = 6.0
"""Plain passes that drafting may lose before it has gained anything."""
REFILL = 0.008
"""Share of the time of plain decoding by which the loss budget grows."""
# Gains are credited up to this many plain passes: where acceptance falls, the loss is bounded by them.
_MOST_BUDGET = 64.0
# Share of the budget that the first pass of a trial may lose: what one pass shows may be chance.
_FIRST_PASS = 0.5
# Tokens decoded without drafts after a trial that did not pay: after the first one, and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 64, 4096
# Share of the evidence that is kept from one drafting pass to the next.
_KEPT = 0.98
# Expected estimates weigh as many as these judged tokens and rounds; in later trials this share of them.
_PRIOR_TOKENS, _PRIOR_ROUNDS, _LATER = 3.0, 2.0, 0.5
_PRIOR_ACCEPTANCE = 0.9
# Drafting pauses where it would not pay at an acceptance this many standard errors above the estimate.
_STANDARD_ERRORS = 1.0
# Weight of a newly measured time, which is clamped to this many times the mean, and to its inverse.
_NEW, _OUTLIER = 0.15, 2.0

CostFactors = tuple[float, float, float]
"""Measured seconds of the stages, in the order of ``StageSeconds``, as multiples of the expected ones."""


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of each stage for a batch.

    Attributes:
        draft_round: a round of drafting, with the retrieval level's verification where there is one.
        verification: of all drafted tokens, by the target.
        plain: an autoregressive pass of the target.

    Raises:
        ValueError: one of them is not above 0 and finite.
    """

    draft_round: float
    verification: float
    plain: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < math.inf:
                raise ValueError(f"{name}={value!r} seconds must be above 0 and finite")

    def relative_to(self, base: "StageSeconds") -> CostFactors:
        """Its seconds as multiples of those of ``base``."""
        return (
            self.draft_round / base.draft_round,
            self.verification / base.verification,
            self.plain / base.plain,
        )

    def scaled(self, factors: CostFactors) -> "StageSeconds":
        """Each of its seconds times its factor, as :meth:`relative_to` returns them."""
        draft_round, verification, plain = factors
        return StageSeconds(
            self.draft_round * draft_round, self.verification * verification, self.plain * plain
        )


@dataclass(frozen=True)
class LearntDraftLength:
    """What a request leaves to the next one.

    Attributes:
        acceptance, tokens_per_round: as last estimated.
        budget: the loss budget, in plain passes.
        cost_factors: of its measured costs to those of the table of stage costs.
    """

    acceptance: float
    tokens_per_round: float
    budget: float
    cost_factors: CostFactors


class DraftLengthController:
    """Chooses the draft rounds before each verification, without a clock or random numbers.

    The same costs and observations give the same choices.

    Args:
        levels: 3: a round adds what the retrieval level accepted to a chain of draft tokens. 2: the target
            verifies the draft's tree itself, after one round or none. 1: there are no rounds.
        depth: of the draft's trees; 0 for one level.
        max_draft_tokens: most tokens of the chain; with two levels ``depth``.
        fixed: always this many rounds (one at most with two levels), whatever they cost.

    Attributes:
        costs: set before ``rounds`` is called, unless rounds are fixed; may be changed at any time.
    """

    def __init__(self, levels: int, depth: int, max_draft_tokens: int, fixed: int | None = None) -> None:
        self.levels, self.depth, self.max_draft_tokens = levels, depth, max_draft_tokens
        self.fixed = fixed if fixed is None or levels > 2 else min(fixed, 1)
        if levels == 1:
            self.fixed = 0
        self.costs: StageSeconds | None = None
        self._expected = (_PRIOR_ACCEPTANCE, 1 + 0.5 * depth)
        self._budget = START_BUDGET
        self._paused = self._pause = self._passes = 0
        self._gained = self._accepted = self._judged = self._gathered = self._drafted = 0.0
        # Estimates at the end of the last trial, or those of an earlier request.
        self._last: tuple[float, float] | None = None
        self._begin_trial(1.0, self._expected)

    def expect(self, acceptance: float, tokens_per_round: float) -> None:
        """Begin trials from estimates that were measured earlier; the first one only if none were resumed.

        Raises:
            ValueError: the acceptance is not within 0 and 1, or a round brings less than a token.
        """
        if not 0 <= acceptance <= 1 or not 1 <= tokens_per_round < math.inf:
            raise ValueError(
                f"acceptance={acceptance!r} must be within 0 and 1, and "
                f"tokens_per_round={tokens_per_round!r} at least 1"
            )
        self._expected = (acceptance, tokens_per_round)
        if self._last is None:
            self._begin_trial(1.0, self._expected)

    def resume(self, learnt: LearntDraftLength) -> None:
        """Begin the first trial from an earlier request's estimates, with its loss budget."""
        self._budget = learnt.budget
        self._last = learnt.acceptance, learnt.tokens_per_round
        self._begin_trial(1.0, self._last)

    def learnt(self, cost_factors: CostFactors) -> LearntDraftLength:
        """What a later request may :meth:`resume` from, with the caller's cost factors."""
        estimates = self.acceptance, self.tokens_per_round
        if not self._passes and self._last is not None:
            # Nothing was drafted in this trial: its estimates are only expectations.
            estimates = self._last
        return LearntDraftLength(*estimates, self._budget, cost_factors)

    @property
    def acceptance(self) -> float:
        """Estimated probability that the target accepts a draft token whose predecessors it accepted."""
        return self._accepted / self._judged

    @property
    def tokens_per_round(self) -> float:
        """Estimated draft tokens that a round adds."""
        return self._gathered / self._drafted if self.levels == 3 else float(self.depth)

    def rounds(self) -> int:
        """Rounds of the next pass, 0 for an autoregressive one."""
        if self.fixed is not None:
            return self.fixed
        if self._paused:
            return 0
        affordable = [rounds for rounds in self._promising() if self._affordable(rounds)]
        if affordable:
            return max(affordable, key=self.rate)
        # The cheapest pass shows whether a longer one would pay.
        return int(self._passes == 0 and self._affordable(1))

    def rate(self, rounds: int) -> float:
        """Expected tokens per second and sequence, in passes of at least one round."""
        return self._rate(rounds, self.acceptance)

    def observe(
        self, rounds: int, sequences: int = 1, gathered: int = 0, accepted: int = 0, rejected: int = 0
    ) -> None:
        """Update the estimates after a pass. Counts are sums over the sequences that were still running.

        Args:
            rounds: of the pass; 0 for an autoregressive one, for which the other counts are ignored.
            sequences: at least 1.
            gathered: draft tokens that its rounds added (3 levels).
            accepted: draft tokens that the target accepted.
            rejected: sequences in which it rejected one. A rejection ends the chain, so
                accepted / (accepted + rejected) estimates the acceptance.
        """
        if self.fixed is None:
            self._charge(rounds, 1 + accepted / sequences)
        if rounds == 0:
            return
        self._passes += 1
        self._accepted = _KEPT * self._accepted + accepted
        self._judged = _KEPT * self._judged + accepted + rejected
        self._gathered = _KEPT * self._gathered + gathered / sequences
        self._drafted = _KEPT * self._drafted + rounds
        if self.fixed is None and not self._promising():
            self._pause_drafting()

    def refine(self, rounds: int, drafting: float, target: float) -> None:
        """Move the costs towards the measured seconds of one pass.

        Args:
            rounds: of the pass.
            drafting: seconds of all its rounds.
            target: seconds of the target's stage.
        """
        old = self.costs
        if old is None:
            return
        if rounds == 0:
            self.costs = StageSeconds(old.draft_round, old.verification, _mean(old.plain, target))
        else:
            draft_round = _mean(old.draft_round, drafting / rounds)
            self.costs = StageSeconds(draft_round, _mean(old.verification, target), old.plain)

    @property
    def _costs(self) -> StageSeconds:
        if self.costs is None:
            raise ValueError("costs=None, but the choice of rounds needs them: set costs, or fix the rounds")
        return self.costs

    def _seconds(self, rounds: int) -> float:
        return rounds * self._costs.draft_round + self._costs.verification

    def _rate(self, rounds: int, acceptance: float) -> float:
        chain = min(self.max_draft_tokens, rounds * self.tokens_per_round)
        a = min(acceptance, 0.9999)
        return float((1 - a ** (chain + 1)) / (1 - a)) / self._seconds(rounds)

    def _promising(self) -> list[int]:
        """Rounds that beat plain decoding at the upper end of the acceptance's confidence interval."""
        a, plain = self.acceptance, 1 / self._costs.plain
        upper = a + _STANDARD_ERRORS * math.sqrt(a * (1 - a) / self._judged)
        most = math.ceil(self.max_draft_tokens / self.tokens_per_round) if self.levels == 3 else 1
        return [rounds for rounds in range(1, most + 1) if self._rate(rounds, upper) > plain]

    def _worst_loss(self, rounds: int) -> float:
        """Plain passes that a pass loses if it yields a single token."""
        return self._seconds(rounds) / self._costs.plain - 1

    def _affordable(self, rounds: int) -> bool:
        return self._worst_loss(rounds) <= self._budget * (1.0 if self._passes else _FIRST_PASS)

    def _charge(self, rounds: int, tokens: float) -> None:
        """Charge or credit the loss budget with a pass that yielded so many tokens per sequence."""
        if rounds:
            gain = tokens - self._seconds(rounds) / self._costs.plain
            self._budget = min(self._budget + gain, _MOST_BUDGET)
            self._gained += gain
            return
        self._paused = max(0, self._paused - 1)
        # The budget grows up to START_BUDGET, or further if the cheapest useful pass needs more.
        if self._passes:
            needed = self._worst_loss(min(self._promising(), default=1))
        else:
            needed = self._worst_loss(1) / _FIRST_PASS
        self._budget = max(self._budget, min(self._budget + REFILL, max(START_BUDGET, needed)))

    def _pause_drafting(self) -> None:
        paid = self._gained > 0 or not self._pause
        self._pause = _FIRST_PAUSE if paid else min(2 * self._pause, _LONGEST_PAUSE)
        self._paused = self._pause
        self._last = self.acceptance, self.tokens_per_round
        self._begin_trial(_LATER, self._expected)

    def _begin_trial(self, weight: float, estimates: tuple[float, float]) -> None:
        """Replace the evidence by these estimates, weighing ``weight`` times the usual prior."""
        acceptance, tokens = estimates
        self._passes, self._gained = 0, 0.0
        self._judged, self._drafted = weight * _PRIOR_TOKENS, weight * _PRIOR_ROUNDS
        self._accepted, self._gathered = acceptance * self._judged, tokens * self._drafted


def _mean(old: float, new: float) -> float:
    return old + _NEW * (min(max(new, old / _OUTLIER), old * _OUTLIER) - old)

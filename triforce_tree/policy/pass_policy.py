"""Chooses each pass: one, two or three levels, the number of drafting rounds, and the tree.

The kind of pass with the most tokens per second is chosen: tokens from running estimates of acceptance
(``estimates.py``, ``matched_tokens.py``), seconds from the costs of its stages (``costs.py``). Three accounts
bound what a choice may cost where it does not pay:

* The loss budget, in plain passes. It is charged with the time by which a drafting pass exceeded plain
  decoding of its tokens, credited with what a pass gained, and grows with the time of plain decoding
  (``REFILL``). A pass is made only if the budget covers its worst case, a single token. All requests share
  the budget. A request may use ``START_SHARE`` of its tokens. Its first drafting pass may also use what later
  requests have, up to ``CREDIT``, and passes after long matches may use all of it.
* Trials of other numbers of levels and other shapes of trees cost at most ``TRIALS`` of the tokens.
* On a GPU, making the stages of a further shape takes seconds. This waits until passes with them would have
  saved as much, which costs at most twice what was best in hindsight (the ski rental rule: Karlin et al.,
  "Competitive snoopy caching", Algorithmica 3, 1988).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from triforce_tree.policy.costs import PassCosts
from triforce_tree.policy.estimates import Estimates, tokens_of
from triforce_tree.policy.matched_tokens import Match, MatchedTokens
from triforce_tree.policy.passes import PLAIN, PassKind, SpeculationLimit
from triforce_tree.trees.device_shapes import DeviceTreeShape

START_BUDGET = 3.0
"""Plain passes that drafting may lose before it has gained anything."""
START_SHARE = 0.015
"""Share of a request's tokens that this is at most, in plain passes."""
REFILL = 0.005
"""Share of the time of plain decoding by which the budget grows."""
TRIALS = 0.02
"""Share of the tokens that trials may cost."""
CREDIT = 1.0
"""Plain passes that a request's first drafting pass may lose even if this is more than its share."""
# Share of it that a request's first drafting pass may lose: what one pass shows may be chance.
_FIRST_PASS = 0.75
# Gains are credited up to so many plain passes: where acceptance falls, the loss is bounded by them.
_MOST_BUDGET = 64.0
# Tokens that trials may cost at first, and at most.
_FIRST_TRIALS, _MOST_TRIALS = 1.0, 4.0
# Matched tokens may lose what later requests have if they are expected to be this much faster.
_LIKELY = 1.3
# A pass is useful if it may be this much faster than plain decoding.
_MARGIN = 1.02
# The factor by which a pass that was not measured may be faster than expected.
_UNSURE = 1.5
# Plain passes are measured before anything is drafted, unless drafting is expected to be this much faster.
_SURE = 3.0
# Plain passes after a choice of plain decoding, until drafting passes are considered again.
_PAUSE = 8
# Numbers of matched tokens among which a pass chooses where fewer cost less. With the newest token these are
# multiples of four tokens, which kernels compute together.
_LENGTHS = 3, 7, 15


@dataclass(frozen=True)
class PassLevels:
    """Describes the passes that a program has.

    Attributes:
        levels: the most levels of a pass. With 3, each round adds the tokens that the retrieval level
            accepted to a chain of draft tokens. With 2, the target verifies the draft's tree itself. With 1,
            nothing is drafted.
        shapes: the shapes of the draft's trees, the configured one first, chains of matched tokens last.
        max_draft_tokens: the most tokens of the chain; with two levels the tree's depth.
        two_levels: whether passes of two levels may be chosen as well, if ``levels`` is 3.
        tail: whether the target also verifies a tree of the first shape at the end of each chain.
        cuts: whether a pass over fewer matched tokens than its shape has costs less, as on a CPU.
    """

    levels: int
    shapes: Sequence[DeviceTreeShape]
    max_draft_tokens: int
    two_levels: bool = False
    tail: bool = False
    cuts: bool = False


class Option(NamedTuple):
    """Holds the tokens per sequence and the seconds that are expected of a kind of pass.

    Attributes:
        most_tokens: the expected tokens if acceptance is at the upper end of its confidence interval.
        doubt: the factor by which the accepted tokens may exceed the expected ones. It counts if the best
            pass has as many levels.
        filled: the most draft tokens that the target verifies, as a share of those that it can verify.
    """

    kind: PassKind
    tokens: float
    most_tokens: float
    seconds: float
    doubt: float = 1.0
    filled: float = 1.0

    @property
    def rate(self) -> float:
        """Returns the expected tokens per second and sequence."""
        return self.tokens / self.seconds

    @property
    def highest_rate(self) -> float:
        return self.most_tokens / self.seconds

    def within(self, remaining: float) -> "Option":
        """Returns the option where a sequence gets no more than the remaining tokens."""
        return self._replace(tokens=min(self.tokens, remaining), most_tokens=min(self.most_tokens, remaining))


@dataclass
class Learnt:
    """What the requests of a program learn. Each request continues from what the earlier ones have learnt.

    Attributes:
        estimates: the estimates of acceptance.
        matches: the estimates for matched tokens.
        budget: the loss budget, in plain passes.
        missed: seconds that trees of shapes without stages would have saved, by shape.
    """

    estimates: Estimates
    matches: MatchedTokens = field(default_factory=MatchedTokens)
    budget: float = START_BUDGET
    missed: dict[int, float] = field(default_factory=dict)


class PassPolicy:
    """Chooses the kind of each pass, without clock or random numbers: equal observations give equal choices.

    Args:
        passes: the passes to choose from.
        costs: the costs of the passes; None where ``fixed`` is given.
        fixed: the number of rounds of every pass (at most one with two levels), whatever they cost; None to
            choose it.
        learnt: what earlier requests have learnt, which is updated; None to begin anew.
        held_back: the seconds that it takes to make the stages of each shape that has none.
        limit: what passes may draft at most. If no other pass is within it, all passes are plain.

    Attributes:
        learnt: the given object, or a new one.
        proposed: the number of matched tokens that each sequence has in the last pass that :meth:`choose`
            returned, if it chose to verify matched tokens.
    """

    def __init__(
        self,
        passes: PassLevels,
        costs: PassCosts | None = None,
        fixed: int | None = None,
        learnt: Learnt | None = None,
        held_back: Mapping[int, float] | None = None,
        limit: SpeculationLimit | None = None,
    ) -> None:
        self._passes, self.costs, self._limit = passes, costs, limit or SpeculationLimit()
        levels = passes.levels
        self.fixed = 0 if levels == 1 else fixed if fixed is None or levels > 2 else min(fixed, 1)
        if costs is not None:
            self._costs = costs
        elif self.fixed is None:
            raise ValueError("costs=None, but the choice of rounds needs them: give costs, or fix the rounds")
        self.learnt = learnt or Learnt(Estimates(passes.shapes))
        self.learnt.estimates.begin()
        self.learnt.budget = self._start = min(self.learnt.budget, START_BUDGET)
        self._held = dict(held_back or {})
        self.proposed: list[int] = []
        # The tokens that are expected after the match of each sequence, and of those that run.
        self._after: list[list[float]] = []
        self._running: list[list[float]] = []
        self._filled = 1.0
        self._remaining, self._made, self._trials = math.inf, 0.0, _FIRST_TRIALS
        self._pause, self._drafted, self._resumes = 0, False, False

    def matched(self, kind: PassKind) -> bool:
        """Returns whether a pass verifies matched tokens."""
        return kind.levels == 2 and self._passes.shapes[kind.shape].matched

    def choose(self, remaining: float = math.inf, matches: Sequence[Match | None] = ()) -> PassKind:
        """Returns the next pass.

        Args:
            remaining: the most tokens that a sequence may still get.
            matches: the match of each sequence; None for a sequence that has ended. It is empty if passes
                have no matched tokens.
        """
        if self.fixed is not None:
            kind = PassKind(self._passes.levels, self.fixed) if self.fixed else PLAIN
            return kind if self._allows(kind) else PLAIN
        self._remaining, costs = remaining, self._costs
        self._read(matches)
        found = self._matched_options()
        if self._pause and not found:
            return PLAIN
        if not self._pause:
            found += self.options()[1:]
        found = [option for option in found if self._allows(option.kind)]
        plain = Option(PLAIN, 1.0, 1.0, costs.of(PLAIN))
        if not costs.certain(PLAIN) and max(o.rate for o in [plain, *found]) < _SURE * plain.rate:
            return PLAIN
        ready = self._prepared([plain, *(option.within(remaining) for option in found)])
        useful = [option for option in ready[1:] if option.highest_rate > _MARGIN * plain.rate]
        # Where no pass is expected to be faster, the one that may be the fastest comes first.
        useful.sort(key=lambda o: o.rate if o.rate > plain.rate else o.highest_rate - 1e9, reverse=True)
        best = self._affordable(useful)
        if best is None:
            self._pause = self._pause or _PAUSE
            return PLAIN
        if not self.matched(best.kind):
            return self._trial_beside(best, useful)
        self._filled = best.filled
        most = round(best.filled * self._passes.shapes[best.kind.shape].depth)
        self.proposed = [min(most, len(tokens) - 1) for tokens in self._after]
        return best.kind

    def _allows(self, kind: PassKind) -> bool:
        """Returns whether a pass is within the limit."""
        levels, length = self._limit
        if kind == PLAIN or length is None:
            return kind.levels <= max(levels, 1)
        depth = self._passes.shapes[kind.shape].depth
        longest = kind.rounds * (depth + 1) if kind.levels == 3 else depth
        return kind.levels <= levels and min(longest, self._passes.max_draft_tokens) <= length

    def options(self) -> list[Option]:
        """Returns the options without matched tokens, plain decoding first."""
        costs, estimates, passes = self._costs, self.learnt.estimates, self._passes
        found = [Option(PLAIN, 1.0, 1.0, costs.of(PLAIN))]
        estimates.settle()
        for shape in costs.shapes:
            matched = passes.shapes[shape].matched
            if not matched and self._with_two_levels:
                kind, (tokens, error, doubt) = PassKind(2, 1, shape), estimates.tree(2, shape)
                most = min(tokens + error, passes.shapes[shape].depth)
                seconds, unsure = costs.of(kind), 1.0 if costs.certain(kind) else _UNSURE
                found.append(Option(kind, 1 + tokens, unsure * (1 + most), seconds, unsure * doubt))
            # The trees of the first shape may be matched tokens.
            if passes.levels == 3 and not (matched and shape):
                found += self._options_of_rounds(shape)
        return found

    @property
    def _with_two_levels(self) -> bool:
        return self._passes.levels == 2 or self._passes.two_levels

    def filled(self, kind: PassKind, gathered: float) -> float:
        """Returns the most draft tokens that the target verified in the last pass, as a share of those that
        it can verify. Where fewer cost nothing less, all count as verified.

        Args:
            gathered: the tokens in the chain of each sequence.
        """
        if kind.levels == 3:
            return gathered / self._passes.max_draft_tokens
        return self._filled if self.matched(kind) else 1.0

    def observe(self, kind: PassKind, report: Sequence[Sequence[int]]) -> None:
        """Updates estimates and budgets after a pass.

        Args:
            report: for each sequence of the batch: its committed tokens, 0 for one that has ended; the draft
                tokens that the target verified; the tokens that the retrieval level added to the chain.
        """
        if self.fixed is not None:
            return
        running = [row for row in report if row[0]]
        if not running:
            return
        estimates, count, gathered = self.learnt.estimates, len(running), sum(row[2] for row in running)
        self._charge(kind, sum(row[0] for row in running) / count, gathered / count)
        if kind.levels == 2 and not self.matched(kind):
            # A drafter that found nothing to propose was not rejected.
            judged = [row[0] - 1 for row in running if row[1]]
            estimates.add_trees(2, kind.shape, len(judged), sum(judged))
        elif kind.levels == 3:
            if kind.rounds:
                estimates.add_trees(3, kind.shape, kind.rounds * count, gathered - kind.rounds * count)
            for committed, _, emitted, *_ in running:
                chain = min(emitted, self._passes.max_draft_tokens)
                estimates.add_chain(min(committed - 1, chain), int(committed <= chain))
                if self._passes.tail and committed > chain:
                    estimates.add_trees(2, 0, 1, committed - 1 - chain)
        estimates.passed()

    # The choice

    def _read(self, matches: Sequence[Match | None]) -> None:
        """Learns what followed earlier matches, and computes what is expected after the present ones."""
        estimates = self.learnt.matches
        deepest = max((shape.depth for shape in self._passes.shapes), default=0)
        for match in matches:
            if match is not None and match.text.fresh:
                estimates.learn(match.text)
        self._after = [estimates.after(match, deepest) for match in matches]
        self._running = [own for own, match in zip(self._after, matches, strict=True) if match is not None]

    def _expected(self, most: int) -> float:
        """Returns the expected tokens of a sequence if at most so many matched tokens are proposed."""
        return sum(own[min(most, len(own) - 1)] for own in self._running) / len(self._running)

    def _options_of_rounds(self, shape: int) -> list[Option]:
        """Returns passes of three levels up to the best number of rounds."""
        estimates, most = self.learnt.estimates, float(self._passes.max_draft_tokens)
        a, error = estimates.chain()
        tokens_per_tree, _, doubt = estimates.tree(3, shape)
        unsure = 1.0 if self._costs.certain(PassKind(3, 1, shape)) else _UNSURE
        behind = estimates.tree(2, 0)[0] if self._passes.tail else 0.0
        tree, found, gathered = self._passes.shapes[shape], list[Option](), 0.0
        while gathered < most:
            # Only in the first round it is known how long the match is.
            first = tree.matched and self._running and not found
            gathered += self._expected(tree.depth) if first else 1 + tokens_per_tree
            chain, rounds = min(most, gathered), len(found) + 1
            tokens, most_tokens = (
                tokens_of(each, chain) + min(1.0, each) ** chain * behind for each in (a, a + error)
            )
            kind = PassKind(3, rounds, shape)
            seconds = self._costs.of(kind, chain / most)
            longest = rounds * (tree.depth + 1) / most
            found.append(Option(kind, tokens, unsure * most_tokens, seconds, unsure * doubt, longest))
            if rounds > 1 and found[-1].highest_rate < found[-2].highest_rate:
                break  # Further rounds bring less and less in the same time.
        return found

    def _matched_options(self) -> list[Option]:
        """Returns passes that verify matched tokens."""
        shapes, cuts, found = self._passes.shapes, self._passes.cuts, list[Option]()
        longest = max((len(own) - 1 for own in self._running), default=0)
        numbers = [shape for shape in self._costs.shapes if shapes[shape].matched]
        if not longest or not numbers or not self._with_two_levels:
            return found
        if cuts:
            # The longest shape takes the place of shorter ones.
            numbers = [max(numbers, key=lambda number: shapes[number].depth)]
        for number in numbers:
            kind, depth = PassKind(2, 1, number), shapes[number].depth
            for length in (*(n for n in _LENGTHS if n < depth), depth) if cuts else (depth,):
                tokens, filled = self._expected(length), length / depth
                found.append(Option(kind, tokens, tokens, self._costs.of(kind, filled), filled=filled))
                if length >= longest:
                    break
        return found

    def _affordable(self, useful: Sequence[Option]) -> Option | None:
        """Returns the first useful option that the budget covers, or else the cheapest one on credit."""
        own, shared = self._spendable, self.learnt.budget
        first, likely = 1.0 if self._drafted else _FIRST_PASS, _LIKELY / self._costs.of(PLAIN)
        for option in useful:
            budget = first * own
            if self.matched(option.kind):
                budget = shared if option.rate > likely else own
            if self._covers(option, budget):
                return option
        if not self._drafted:
            for option in sorted(useful, key=lambda option: option.seconds):
                if not self.matched(option.kind) and self._covers(option, min(shared, CREDIT)):
                    return option
        return None

    def _trial_beside(self, best: Option, useful: Sequence[Option]) -> PassKind:
        """Returns a pass of other levels or trees that may be better than the best, if it may be tried."""

        def promise(option: Option) -> float:
            if option.kind.levels != best.kind.levels:
                return option.highest_rate
            return (1 + option.doubt * (option.tokens - 1)) / option.seconds

        drafting = [option for option in reversed(useful) if not self.matched(option.kind)]
        groups = {(option.kind.levels, option.kind.shape): option for option in drafting}
        del groups[best.kind.levels, best.kind.shape]
        for other in sorted(groups.values(), key=promise, reverse=True):
            # The price of trying ``other``: tokens that the best kind would yield in that time, less its own.
            cost = other.seconds * best.rate - other.tokens
            if promise(other) > best.rate and cost <= self._trials and self._covers(other, self._spendable):
                self._trials -= cost
                return other.kind
        return best.kind

    def _prepared(self, options: list[Option]) -> list[Option]:
        """Returns the options whose stages are made, after counting what the other ones would save."""
        if not self._held:
            return options
        ready = [option for option in options if option.kind.shape not in self._held]
        best, missed = max(ready, key=lambda option: option.rate), self.learnt.missed
        for shape, seconds in list(self._held.items()):
            rate = max((o.rate for o in options if o.kind.shape == shape), default=0.0)
            if rate > best.rate:
                missed[shape] = missed.get(shape, 0.0) + best.tokens * (1 / best.rate - 1 / rate)
                if missed[shape] >= seconds:
                    del self._held[shape]
        return ready

    # The budget of what drafting may lose

    @property
    def _spendable(self) -> float:
        """Returns the plain passes that this request may lose now: later requests keep the rest."""
        return self.learnt.budget - max(0.0, self._start - START_SHARE * (self._made + self._remaining))

    def _covers(self, option: Option, budget: float) -> bool:
        """Returns whether a budget covers a pass that yields a single token.

        A request's first drafting pass must also be repaid by the remaining tokens, at its highest rate.
        """
        costs, kind = self._costs, option.kind
        plain = costs.of(PLAIN)
        loss = costs.of(kind, option.filled, self._resumes and not self.matched(kind)) / plain - 1
        repaid = self._remaining * (1 - 1 / (option.highest_rate * plain))
        return loss <= budget and (self._drafted or self.matched(kind) or loss <= repaid)

    def _charge(self, kind: PassKind, tokens: float, gathered: float) -> None:
        """Updates the loss budget and the budget of trials after a pass.

        A drafting pass adds to the loss budget, in plain passes, the tokens that it yielded less those that
        plain passes would have yielded in the same time.

        Args:
            tokens: tokens that the pass yielded for each sequence.
            gathered: tokens in the chain of each sequence, of which the target verified so many.
        """
        tokens, learnt, matched = min(tokens, self._remaining), self.learnt, self.matched(kind)
        self._made += tokens
        self._trials = min(self._trials + TRIALS * tokens, _MOST_TRIALS)
        if kind == PLAIN:
            self._pause = max(0, self._pause - 1)
            learnt.budget = min(learnt.budget + REFILL, _MOST_BUDGET)
        else:
            costs = self._costs
            seconds = costs.of(kind, self.filled(kind, gathered), self._resumes and not matched)
            learnt.budget = min(learnt.budget + tokens - seconds / costs.of(PLAIN), _MOST_BUDGET)
            self._drafted = self._drafted or not matched
        self._resumes = kind == PLAIN or matched

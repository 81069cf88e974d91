"""Chooses each pass: one, two or three levels, the number of drafting rounds, and the tree.

The kind of pass with the most tokens per second is chosen: tokens from running estimates of acceptance
(``estimates.py``), seconds from the costs of its stages (``costs.py``). Three rules bound what a choice may
cost where it does not pay:

* Loss budget (``LossBudget``). It is charged with the time by which a drafting pass exceeded plain decoding
  of the tokens it yielded, credited with what a pass gained, and grows with the time of plain decoding. A
  pass is made only if the budget covers its worst case, one token. So decoding takes at most ``START_SHARE``
  of a request's tokens, and no more than ``START_BUDGET`` plain passes, and ``REFILL`` of its time more than
  plain decoding would, whatever is accepted: 2 %. Where that is less than the cheapest pass, one trial may
  use what earlier requests have not; where the estimates say that it will not pay, only once the whole budget
  is there again. No trial is begun that the remaining tokens could not repay.
* Pauses. Where no kind of pass is likely to beat plain decoding, drafting pauses, longer after each trial
  that did not pay, and is then tried again with new estimates: the text may have changed, or the trial may
  have been unlucky.
* Trials of other numbers of levels and shapes of trees are made only where they would be better at the upper
  end of the confidence interval, and cost at most ``TRIALS`` of the tokens together.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from triforce_tree.policy.budgets import REFILL, START_BUDGET, LossBudget, Option, Preparation, Trials
from triforce_tree.policy.costs import PassCosts
from triforce_tree.policy.estimates import Estimates, Learnt, MatchAcceptance, Ranks, Tails, tokens_of
from triforce_tree.policy.passes import PLAIN, PassKind
from triforce_tree.trees.device_shapes import DeviceTreeShape

# Share of the budget that the first pass of a trial may lose: what one pass shows may be chance.
_FIRST_PASS = 0.75
# Tokens decoded without drafts after a trial that did not pay: after the first one, and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 64, 4096
_REPAID_LATER = 8  # The pause where a trial could not be repaid: sequences that join bring more tokens.
# Share of the prior's weight in later trials of a request.
_LATER = 0.5
# Drafting pauses where it is not this much faster than plain decoding at the confidence intervals' upper end.
_MARGIN = 1.02


@dataclass(frozen=True)
class PassLevels:
    """The passes that a program has.

    Attributes:
        levels: most levels of a pass. 3: a round adds what the retrieval level accepted to a chain of draft
            tokens. 2: the target verifies the draft's tree itself. 1: there is no draft.
        shapes: of the draft's trees, the configured one first, chains of matched tokens last.
        max_draft_tokens: most tokens of the chain; with two levels the tree's depth.
        two_levels: with three levels: whether passes of two levels may be chosen as well.
        tail: whether the target also verifies a tree of the first shape at the end of each chain.
    """

    levels: int
    shapes: Sequence[DeviceTreeShape]
    max_draft_tokens: int
    two_levels: bool = False
    tail: bool = False

    @property
    def grown(self) -> Sequence[DeviceTreeShape]:
        """Returns the shapes of trees, without chains of matched tokens."""
        return [shape for shape in self.shapes if not shape.matched]

    @property
    def drafting(self) -> tuple[int, ...]:
        """The numbers of levels that drafting passes may have."""
        return {1: (), 2: (2,), 3: (2, 3) if self.two_levels else (3,)}[self.levels]


@dataclass(frozen=True)
class LearntChoice:
    """Holds the estimates and budgets that a request leaves to the next one.

    Attributes:
        estimates: the last estimates.
        budget: the loss budget, in plain passes.
        missed: seconds that trees of shapes without stages would have saved, by shape.
    """

    estimates: Learnt
    budget: float = START_BUDGET
    missed: Mapping[int, float] = field(default_factory=dict)


class PassPolicy:
    """Chooses the kind of each pass, without clock or random numbers: equal observations give equal choices.

    Args:
        passes: that there are.
        costs: of the passes; None where ``fixed`` is given.
        fixed: always this many rounds (one at most with two levels), whatever they cost.
        learnt: what an earlier request left, with its loss budget, so that all requests together lose
            ``START_BUDGET`` and ``REFILL`` at most.
        held_back: seconds to make the stages of shapes that have none, by shape.

    Attributes:
        proposed: matched tokens of each sequence in the last pass that :meth:`choose` returned, where it
            verifies matched tokens.
    """

    def __init__(
        self,
        passes: PassLevels,
        costs: PassCosts | None = None,
        fixed: int | None = None,
        learnt: LearntChoice | None = None,
        held_back: Mapping[int, float] | None = None,
    ) -> None:
        self.levels, self.costs, self._kinds = passes.levels, costs, passes.drafting
        self.fixed = 0 if self.levels == 1 else fixed if fixed is None or self.levels > 2 else min(fixed, 1)
        self.max_draft_tokens, self._shapes = passes.max_draft_tokens, passes.shapes
        self._grown = len(passes.grown)
        self.estimates = Estimates(
            self.levels, passes.grown, passes.two_levels, passes.tail, learnt.estimates if learnt else None
        )
        self.matches = MatchAcceptance()
        self.preparation = Preparation(held_back or {}, learnt.missed if learnt else {})
        self.budget = LossBudget(learnt.budget if learnt else START_BUDGET)
        self.proposed: list[int] = []
        self._remaining, self._made = math.inf, 0.0
        self._trials = Trials()
        self._paused = self._pause = self._passes = 0
        self._gained, self._last_plain = 0.0, False

    def learnt(self) -> LearntChoice:
        """Returns the estimates and budgets that a later request may begin with."""
        estimates = self.estimates.learnt(bool(self._passes))
        return LearntChoice(estimates, self.budget.kept, dict(self.preparation.missed))

    def matched(self, kind: PassKind) -> bool:
        """Returns whether a pass verifies matched tokens."""
        return kind.levels == 2 and self._shapes[kind.shape].matched

    def choose(self, remaining: float = math.inf, common: Sequence[int | None] = ()) -> PassKind:
        """Returns the next pass.

        Args:
            remaining: tokens that a sequence may still get at most.
            common: tokens that each sequence's match has in common with its end, 0 without a match; None for
                a sequence that has ended. Empty where passes have no matched tokens.
        """
        if self.fixed is not None:
            return PassKind(self.levels, self.fixed) if self.fixed else PLAIN
        self._remaining = remaining
        options: list[Option] | None = None
        if any(common):
            options = None if self._paused else self.options()
            if (kind := self._matched_pass(common, options)) is not None:
                return kind
        self.budget.bound(self._made + remaining)
        if self._paused:
            return PLAIN
        return self._drafting_pass(options or self.options())

    def options(self) -> list[Option]:
        """Returns the options up to the best number of rounds of each kind of pass, plain decoding first."""
        found = [Option(PLAIN, 1.0, 1.0, self._costs.of(PLAIN))]
        for shape in self._known:
            if 2 in self._kinds:
                a, error = self.estimates.of(2, shape)
                kind, depth = PassKind(2, 1, shape), self._shapes[shape].depth
                tokens, most = tokens_of(a, depth), tokens_of(a + error, depth)
                found.append(Option(kind, tokens, most, self._costs.of(kind), self.estimates.doubt(2, shape)))
            if 3 in self._kinds:
                found += self._options_of_rounds(shape)
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
        matched: Sequence[tuple[int, int, int]] = (),
    ) -> None:
        """Updates the estimates after a pass. Counts are sums over the sequences that were still running.

        Args:
            kind: the kind of the pass; for a plain pass the other counts are ignored.
            sequences: at least 1.
            gathered: draft tokens that its rounds added (3 levels).
            accepted: draft tokens that the target accepted.
            rejected: sequences in which it rejected one of the chain, which ends it: accepted / (accepted +
                rejected) estimates the acceptance.
            ranks: acceptance of the draft's trees by depth and rank, where there are several shapes.
            tails: trees at the ends of chains; their accepted tokens are in ``accepted`` too.
            matched: of a pass with matched tokens, for each sequence with any: tokens that its match had in
                common, proposed tokens, and accepted ones.
        """
        if self.fixed is None:
            self._charge(kind, 1 + accepted / sequences, gathered / sequences)
        if self.matched(kind):
            for common, proposed, tokens in matched:
                self.matches.observe(common, min(tokens, proposed), int(tokens < proposed))
        elif kind.levels > 1:
            self._passes += 1
            self.estimates.observe(kind, gathered / sequences, accepted, rejected, ranks, tails)

    # The choice

    def _drafting_pass(self, options: Sequence[Option]) -> PassKind:
        """Returns a pass with trees, or a plain pass."""
        plain = _MARGIN / options[0].seconds
        if self._passes and all(option.highest_rate <= plain for option in options[1:]):
            self.preparation.count(options)
            self._pause_drafting()
            return PLAIN
        # Near its end a request gets no more than it asked for, however many tokens are accepted.
        options = [option.within(self._remaining) for option in options]
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
            if needed <= self.budget.left or self.budget.cover(self._worst_loss(kind), least):
                return kind
        elif useful:
            needed = least = min(self._needed(option.kind) for option in useful)
        else:
            return PLAIN
        # The budget grows up to START_BUDGET, or further if the cheapest useful pass needs more.
        self.budget.ceiling = max(START_BUDGET, needed)
        self._paused = max(1, math.ceil(self.budget.lacks(needed, least) / REFILL))
        return PLAIN

    def _matched_pass(
        self, common: Sequence[int | None], options: Sequence[Option] | None
    ) -> PassKind | None:
        """A pass with matched tokens, if it is expected to yield more tokens a second than any other.

        Args:
            options: of other passes; None while drafting pauses.
        """
        plain = Option(PLAIN, _MARGIN, 1.0, self._costs.of(PLAIN))
        best = max((o.within(self._remaining) for o in options or [plain]), key=lambda option: option.rate)
        counts: dict[int, list[int]] = {}
        found = []
        for shape in self._costs.shapes:
            if not self._shapes[shape].matched:
                continue
            depth = self._shapes[shape].depth
            counts[shape] = [0 if c is None else self.matches.count(c, depth) for c in common]
            running = [(c, n) for c, n in zip(common, counts[shape], strict=True) if c is not None]
            tokens = sum(tokens_of(self.matches.of(c), n) if n else 1.0 for c, n in running) / len(running)
            kind = PassKind(2, 1, shape)
            found.append(Option(kind, tokens, tokens, self._seconds(kind, 1.0)).within(self._remaining))
        self.preparation.count([best, *found])
        better = [o for o in found if o.rate > best.rate and self.preparation.ready(o.kind.shape)]
        for option in sorted(better, key=lambda option: -option.rate):
            if self.budget.cover(self._worst_loss(option.kind)):
                self.proposed = counts[option.kind.shape]
                return option.kind
        return None

    def _options_of_rounds(self, shape: int) -> list[Option]:
        """Passes of three levels up to the best number of rounds."""
        a, error = self.estimates.of(3)
        gathered, doubt = self.estimates.per_round(shape), self.estimates.doubt(3, shape)
        most, found = float(self.max_draft_tokens), list[Option]()
        for rounds in range(1, math.ceil(most / gathered) + 1):
            kind, chain = PassKind(3, rounds, shape), min(most, rounds * gathered)
            seconds = self._costs.of(kind, chain / most)
            tokens, most_tokens = (self.estimates.chain_tokens(each, chain) for each in (a, a + error))
            found.append(Option(kind, tokens, most_tokens, seconds, doubt))
            if rounds > 1 and found[-1].highest_rate < found[-2].highest_rate:
                break  # Further rounds bring less and less in the same time.
        return found

    def _cheapest(self) -> tuple[float, PassKind]:
        """The drafting pass that needs the least budget."""
        shapes = [shape for shape in self._known if self.preparation.ready(shape)]
        cheapest = [PassKind(levels, 1, shape) for levels in self._kinds for shape in shapes]
        return min((self._needed(kind), kind) for kind in cheapest)

    # What passes cost and lose

    @property
    def _costs(self) -> PassCosts:
        if self.costs is None:
            raise ValueError("costs=None, but the choice of rounds needs them: give costs, or fix the rounds")
        return self.costs

    @property
    def _known(self) -> list[int]:
        """The shapes of trees that passes may take."""
        return [shape for shape in self._costs.shapes if shape < self._grown]

    def _filled(self, kind: PassKind, gathered: float) -> float:
        return gathered / self.max_draft_tokens if kind.levels == 3 else 1.0

    def _repays(self, useful: Sequence[Option]) -> bool:
        """Returns whether the remaining tokens can repay the first pass of a trial.

        The upper ends of the confidence intervals decide for kinds of passes that may be useful. If none may
        be, the cheapest pass must double the speed.
        """
        if self._passes or self._remaining == math.inf:
            return True
        plain = self._costs.of(PLAIN)
        saved = [(option.kind, 1 - 1 / (option.highest_rate * plain)) for option in useful]
        saved = saved or [(self._cheapest()[1], 0.5)]
        return any(self._remaining * share >= self._worst_loss(kind) for kind, share in saved)

    def _worst_loss(self, kind: PassKind) -> float:
        """Returns the plain passes that a pass loses if it yields a single token."""
        most = kind.rounds * (self._shapes[kind.shape].depth + 1)
        return self._seconds(kind, self._filled(kind, most)) / self._costs.of(PLAIN) - 1

    def _seconds(self, kind: PassKind, filled: float) -> float:
        prepare = self._costs.prepare if self._last_plain and not self.matched(kind) else 0.0
        return self._costs.of(kind, filled) + prepare

    def _needed(self, kind: PassKind) -> float:
        """The least budget with which a pass is made."""
        return self._worst_loss(kind) / (1.0 if self._passes else _FIRST_PASS)

    def _charge(self, kind: PassKind, tokens: float, gathered: float) -> None:
        """Charges or credits the budgets with a pass that yielded so many tokens per sequence."""
        tokens = min(tokens, self._remaining)
        self._made += tokens
        self._trials.charge(kind, tokens)
        if kind.levels > 1:
            gain = tokens - self._seconds(kind, self._filled(kind, gathered)) / self._costs.of(PLAIN)
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

"""Bounds what drafting may lose against plain decoding, and what trials and preparing stages may cost."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from triforce_tree.policy.passes import PassKind

START_BUDGET = 3.0
"""Plain passes that drafting may lose before it has gained anything."""
START_SHARE = 0.015
"""Share of a request's tokens that this is at most, in plain passes."""
REFILL = 0.005
"""Share of the time of plain decoding by which the budget grows."""
TRIALS = 0.02
"""Share of the tokens that trials may cost."""
# Gains are credited up to this many plain passes: where acceptance falls, the loss is bounded by them.
_MOST_BUDGET = 64.0
# Tokens that trials may cost at first, and at most.
_FIRST_TRIALS, _MOST_TRIALS = 1.0, 4.0


class Option(NamedTuple):
    """Holds the tokens per sequence and the seconds that are expected of a kind of pass.

    Attributes:
        most_tokens: expected tokens at the upper end of the acceptance's confidence interval.
        doubt: factor by which the pass may yield more, beside passes of as many levels with other trees.
    """

    kind: PassKind
    tokens: float
    most_tokens: float
    seconds: float
    doubt: float = 1.0

    def within(self, remaining: float) -> "Option":
        """Returns the option where a sequence gets no more than the remaining tokens."""
        if self.tokens <= remaining and self.most_tokens <= remaining:
            return self
        return self._replace(tokens=min(self.tokens, remaining), most_tokens=min(self.most_tokens, remaining))

    @property
    def rate(self) -> float:
        """Returns the expected tokens per second and sequence."""
        return self.tokens / self.seconds

    @property
    def highest_rate(self) -> float:
        return self.most_tokens / self.seconds


class LossBudget:
    """Limits what the drafting passes of one request may lose, in plain passes.

    A request of few tokens may lose few plain passes, or one unlucky trial would be several per cent of it.
    The rest is withheld and kept for later requests, so that requests share one account.

    Args:
        kept: what an earlier request has left.

    Attributes:
        left: what drafting may still lose.
        ceiling: plain passes refill the budget up to here.
    """

    def __init__(self, kept: float = START_BUDGET) -> None:
        self.left, self.ceiling = min(kept, START_BUDGET), START_BUDGET
        self._withheld = 0.0
        self._released: float | None = None
        self._drafted = False

    @property
    def kept(self) -> float:
        """Returns the loss, in plain passes, that later requests may use."""
        return self.left + self._withheld

    def bound(self, tokens: float) -> None:
        """Withholds what exceeds ``START_SHARE`` of a request of so many new tokens.

        Where sequences have joined and there are more tokens, a further call releases more.
        """
        share = START_SHARE * tokens
        if self._released is None:
            self._withheld = max(0.0, self.left - share)
            self.left -= self._withheld
        elif share > self._released:
            self._release(min(self._withheld, share - self._released))
        self._released = max(share, self._released or 0.0)

    def cover(self, loss: float, least: float | None = None) -> bool:
        """Take a possible loss from what is withheld for later requests.

        Args:
            loss: of the pass, where it yields a single token.
            least: for the first drafting pass of a request, which is a trial: what must be there in all.
                None for passes that are expected to gain, which may take from later requests at any time.

        Returns:
            whether the budget covers the loss now.
        """
        if self.kept < (loss if least is None else least) or (least is not None and self._drafted):
            return False
        self._release(max(0.0, loss - self.left))
        return True

    def lacks(self, needed: float, least: float) -> float:
        """Returns by how much the budget must grow until ``needed`` is there, or can be taken."""
        return needed - self.left if self._drafted else min(needed - self.left, least - self.kept)

    def plain(self) -> None:
        """A plain pass was made."""
        self.left = max(self.left, min(self.left + REFILL, self.ceiling))

    def charge(self, gain: float) -> None:
        """Adds the plain passes that a drafting pass gained; a negative number is a loss."""
        self.left, self._drafted = min(self.left + gain, _MOST_BUDGET), True

    def _release(self, amount: float) -> None:
        self._withheld -= amount
        self.left += amount


class Trials:
    """Trials of passes of other levels or trees, beside the best kind of pass so far.

    Attributes:
        chosen: the pass that was found worth a trial, and the tokens that it may cost; None after a pass.
    """

    def __init__(self) -> None:
        self._left = _FIRST_TRIALS
        self.chosen: tuple[PassKind, float] | None = None

    def worth(self, options: Sequence[Option], best: Option) -> Option | None:
        """Returns a pass of other levels or trees that may be better than the best, if it may be tried."""
        # The best of each group that may be better; the most promising one first.
        groups = {(o.kind.levels, o.kind.shape): o for o in sorted(options, key=lambda option: option.rate)}
        del groups[best.kind.levels, best.kind.shape]
        hopeful = [(_promise(option, best), option) for option in groups.values()]
        for rate, other in sorted(hopeful, reverse=True):
            # Tokens that the best kind of pass is expected to yield in the same time, beyond the other's own.
            cost = other.seconds * best.rate - other.tokens
            if rate > best.rate and cost <= self._left:
                self.chosen = other.kind, cost
                return other
        return None

    def charge(self, kind: PassKind, tokens: float) -> None:
        """A pass was made, and yielded so many tokens per sequence."""
        self._left = min(self._left + TRIALS * tokens, _MOST_TRIALS)
        if self.chosen is not None and self.chosen[0] == kind:
            self._left -= self.chosen[1]
        self.chosen = None


def _promise(option: Option, best: Option) -> float:
    """Returns the tokens per second that an option may yield.

    Acceptance is as uncertain for trees of other shapes as for the best one's, but no more.
    """
    if option.kind.levels == best.kind.levels:
        return (1 + option.doubt * (option.tokens - 1)) / option.seconds
    return option.highest_rate


class Preparation:
    """The shapes whose stages are not made yet, because making them takes long.

    On a GPU kernels are compiled and graphs captured for a further shape of tree, which takes seconds the
    first time. A shape is released once it would have saved as much as its preparation costs. This costs at
    most twice what was best in hindsight, however long the text turns out to be (the ski rental rule: Karlin
    et al., "Competitive snoopy caching", Algorithmica 3, 1988).

    Attributes:
        seconds: that making the stages of a shape is expected to take, by its number.
        missed: seconds that its passes would have saved so far.
    """

    def __init__(self, seconds: Mapping[int, float] = {}, missed: Mapping[int, float] = {}) -> None:
        self.seconds, self.missed = dict(seconds), dict(missed)

    def ready(self, shape: int) -> bool:
        """Returns whether passes may use trees of this shape."""
        return shape not in self.seconds

    def count(self, options: Sequence[Option]) -> None:
        """Before a pass: add up what the shapes that are held back would save, and release those that pay.

        Args:
            options: what is expected of each kind of pass; at least one, plain decoding, is of a ready shape.
        """
        if not self.seconds:
            return
        best = max((o for o in options if self.ready(o.kind.shape)), key=lambda option: option.rate)
        for shape in list(self.seconds):
            rate = max((o.rate for o in options if o.kind.shape == shape), default=0.0)
            if rate > best.rate:
                saved = best.tokens * (1 / best.rate - 1 / rate)
                self.missed[shape] = self.missed.get(shape, 0.0) + saved
                if self.missed[shape] >= self.seconds[shape]:
                    del self.seconds[shape]

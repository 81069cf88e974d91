"""What drafting may lose against plain decoding: in a request, and in all requests together.

A request of few tokens may lose few plain passes, or one unlucky trial would be several per cent of it. What
it may not lose itself is withheld, and kept for later requests: so requests share one account.
"""

START_BUDGET = 3.0
"""Plain passes that drafting may lose before it has gained anything."""
START_SHARE = 0.015
"""Share of a request's tokens that this is at most, in plain passes."""
REFILL = 0.005
"""Share of the time of plain decoding by which the budget grows."""
# Gains are credited up to this many plain passes: where acceptance falls, the loss is bounded by them.
_MOST_BUDGET = 64.0


class LossBudget:
    """The budget of one request, in plain passes.

    Attributes:
        left: what drafting may still lose.
        ceiling: plain passes refill it up to here.
    """

    def __init__(self) -> None:
        self.left = self.ceiling = START_BUDGET
        self._withheld = self._released = 0.0
        self._bound = self._drafted = False

    @property
    def kept(self) -> float:
        """What is left to later requests."""
        return self.left + self._withheld

    def resume(self, kept: float) -> None:
        """Begin with what an earlier request has left; never with more than ``START_BUDGET``."""
        self.left = min(kept, START_BUDGET)

    def bound(self, tokens: float) -> None:
        """Withhold what exceeds ``START_SHARE`` of a request of so many new tokens.

        May be called again: where sequences have joined and there are more tokens, more is released.
        """
        share = START_SHARE * tokens
        if not self._bound:
            self._bound, self._released = True, share
            self._withheld = max(0.0, self.left - share)
            self.left -= self._withheld
        elif share > self._released:
            self._release(min(self._withheld, share - self._released))
            self._released = share

    def lend(self, loss: float, least: float) -> bool:
        """Take a possible loss from what is withheld, for the first drafting pass of a request.

        Args:
            loss: that the pass may make.
            least: with less in all, nothing is lent; at least ``loss``.

        Returns:
            whether the budget covers it now.
        """
        if self._drafted or self.kept < least:
            return False
        self._release(max(0.0, loss - self.left))
        return True

    def cover(self, loss: float) -> bool:
        """Whether a pass that is expected to gain may lose so much, of what later requests have too."""
        if self.kept < loss:
            return False
        self._release(max(0.0, loss - self.left))
        return True

    def lacks(self, needed: float, least: float) -> float:
        """By how much it must grow until ``needed`` is there, or can be lent."""
        return needed - self.left if self._drafted else min(needed - self.left, least - self.kept)

    def plain(self) -> None:
        """A plain pass was made."""
        self.left = max(self.left, min(self.left + REFILL, self.ceiling))

    def charge(self, gain: float) -> None:
        """A drafting pass gained so many plain passes; below 0 it lost them."""
        self.left, self._drafted = min(self.left + gain, _MOST_BUDGET), True

    def _release(self, amount: float) -> None:
        self._withheld -= amount
        self.left += amount

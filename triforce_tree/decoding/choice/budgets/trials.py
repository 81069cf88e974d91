"""Trials of passes of other levels or trees, beside the best kind of pass so far."""

from collections.abc import Sequence

from triforce_tree.decoding.choice.passes import Option, PassKind

TRIALS = 0.02
"""Share of the tokens that trials may cost."""
# Tokens that they may cost at first, and at most.
_FIRST, _MOST = 1.0, 4.0


class Trials:
    """What trials may cost, and which is worth it.

    Attributes:
        chosen: the pass that was found worth a trial, and the tokens that it may cost; None after a pass.
    """

    def __init__(self) -> None:
        self._left = _FIRST
        self.chosen: tuple[PassKind, float] | None = None

    def worth(self, options: Sequence[Option], best: Option) -> Option | None:
        """A pass of other levels or trees that may be better than the best, if trials may cost so much."""

        def group(option: Option) -> tuple[int, int]:
            return option.kind.levels, option.kind.shape

        # The best of each group that may be better; the most promising one first.
        groups: dict[tuple[int, int], Option] = {}
        for option in sorted(options, key=lambda option: option.rate):
            groups[group(option)] = option
        groups.pop(group(best))
        found = [(_promise(option, best), option) for option in groups.values()]
        hopeful = [(rate, option) for rate, option in found if rate > best.rate]
        for _, other in sorted(hopeful, reverse=True):
            # Tokens that the best kind of pass is expected to yield in the same time, beyond the other's own.
            cost = other.seconds * best.rate - other.tokens
            if cost <= self._left:
                self.chosen = other.kind, cost
                return other
        return None

    def charge(self, kind: PassKind, tokens: float) -> None:
        """A pass was made, and yielded so many tokens per sequence."""
        self._left = min(self._left + TRIALS * tokens, _MOST)
        if self.chosen is not None and self.chosen[0] == kind:
            self._left -= self.chosen[1]
        self.chosen = None


def _promise(option: Option, best: Option) -> float:
    """The rate that it may have: acceptance is as uncertain for trees of other shapes, but no more."""
    if option.kind.levels == best.kind.levels:
        return (1 + option.doubt * (option.tokens - 1)) / option.seconds
    return option.highest_rate

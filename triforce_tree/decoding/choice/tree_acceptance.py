"""Running acceptance of trees by depth and sibling rank, and what it lets expect of a shape of tree."""

import math
from collections.abc import Iterable, Sequence

from triforce_tree.trees.device_shapes import DeviceTreeShape
from triforce_tree.trees.shapes import DEFAULT_ACCEPTANCE

MOST_RANKS = 8
"""Sibling ranks that are counted; the few tokens of later ones that are accepted are left out."""

ByRank = tuple[tuple[float, ...], ...]
"""By depth, then rank: the probability that this child is the accepted one, given that its parent was."""

# Share of the evidence that is kept from one drafting pass to the next: of acceptance, and of what a shape
# yields beside what is expected of it, which depends less on the text.
_KEPT, _KEPT_RATIO = 0.98, 0.998
# What the prior weighs, in judged nodes of each rank; what all depths together weigh in the estimate of one.
_PRIOR, _POOLED = 8.0, 12.0
# What the common ratio weighs in that of one kind of pass and shape, in expected tokens; the first ratio in
# the common one.
_COMMON, _FIRST = 60.0, 8.0
# How much more a shape may yield that was not tried, and after how many expected tokens half of it is left.
_DOUBT, _SETTLED = 0.15, 10.0
# Expectations are computed anew after each of so many passes, and then after every so many.
_OFTEN = 8


class _Ratio:
    """Observed tokens for each expected one, of one kind of pass."""

    def __init__(self) -> None:
        self.observed = self.expected = 0.0

    def forget(self) -> None:
        self.observed, self.expected = _KEPT_RATIO * self.observed, _KEPT_RATIO * self.expected


class TreeAcceptance:
    """Acceptance by depth and rank, common to trees of all shapes, and what it lets expect of each.

    A depth's estimate starts from that of its rank at all depths, and this one from the prior. All shapes are
    compared by the same estimates: what is chance in them favours none. Trees that choose their topology by
    the draft's probabilities yield more than a fixed one with the same acceptance, verification from the
    leaves on adds to all, and the target accepts other tokens than the retrieval level. Hence a ratio of
    observed to expected tokens for each shape and number of levels, which starts from that of all of them.

    Args:
        shapes: what is expected of each is kept, and computed anew every few passes.
        prior: by rank, or an earlier request's table.
    """

    def __init__(self, shapes: Sequence[DeviceTreeShape], prior: ByRank = (DEFAULT_ACCEPTANCE,)) -> None:
        self._shapes, depths = shapes, max(len(shape.widths) for shape in shapes)
        self._prior = [_padded(prior[min(d, len(prior) - 1)]) for d in range(depths)]
        self._tried = [[0.0] * MOST_RANKS for _ in range(depths)]
        self._accepted = [[0.0] * MOST_RANKS for _ in range(depths)]
        self._ratios = {(levels, n): _Ratio() for levels in (2, 3) for n in range(len(shapes))}
        self._passes = 0
        self._commons: dict[int, float] = {}
        self._compute()

    def observe(
        self,
        tried: Sequence[Sequence[int]],
        accepted: Sequence[Sequence[int]],
        trees: int,
        levels: int,
        shape: int,
    ) -> None:
        """Take up the verifications of a pass.

        Args:
            tried: by depth and rank: how often the accepted path reached a node with such a child.
            accepted: how often this child was accepted.
            trees: how many were verified.
            levels, shape: of the pass.
        """
        rows = (*self._tried, *self._accepted)
        for row, new in zip(rows, (*tried, *accepted), strict=True):
            row[:] = [_KEPT * count + more for count, more in zip(row, new, strict=True)]
        self._passes += 1
        if self._passes <= _OFTEN or self._passes % _OFTEN == 0:
            self._compute()
        for ratio in self._ratios.values():
            ratio.forget()
        # After the table has taken up the same verifications: their chance is in both.
        self.count(levels, shape, trees, sum(map(sum, accepted)))

    def count(self, levels: int, shape: int, trees: int, accepted: int) -> None:
        """Take up how many tokens of so many trees were accepted, in passes of so many levels."""
        self._ratios[levels, shape].observed += accepted
        self._ratios[levels, shape].expected += trees * self._tokens[shape]
        self._commons = {}

    def table(self) -> ByRank:
        """The estimates."""
        pooled = [
            (sum(row[r] for row in self._accepted), sum(row[r] for row in self._tried))
            for r in range(MOST_RANKS)
        ]
        found = []
        for prior, tried, accepted in zip(self._prior, self._tried, self._accepted, strict=True):
            at_depth = []
            for r in range(MOST_RANKS):
                start = (pooled[r][0] + _PRIOR * prior[r]) / (pooled[r][1] + _PRIOR)
                at_depth.append((accepted[r] + _POOLED * start) / (tried[r] + _POOLED))
            # Siblings exclude each other.
            scale = max(1.0, sum(at_depth))
            found.append(tuple(a / scale for a in at_depth))
        return tuple(found)

    def ratio(self, levels: int, shape: int) -> float:
        """Observed tokens for each expected one, in passes of so many levels with trees of one shape."""
        own, common = self._ratios[levels, shape], self._common(levels)
        return (own.observed + _COMMON * common) / (own.expected + _COMMON)

    def doubt(self, levels: int, shape: int) -> float:
        """Factor by which it may turn out to yield more."""
        return 1 + _DOUBT / math.sqrt(1 + self._ratios[levels, shape].expected / _SETTLED)

    def expected(self, levels: int, shape: int) -> float:
        """Expected tokens of one verification of such a tree, the one that it adds included."""
        most = float(len(self._shapes[shape].widths))
        return 1 + min(most, self.ratio(levels, shape) * self._tokens[shape])

    def _common(self, levels: int) -> float:
        """The ratio of all shapes in passes of so many levels, which starts from that of all passes."""
        if levels not in self._commons:
            start = self._sum(self._ratios.values(), 1.0)
            of_levels = (r for (own, _), r in self._ratios.items() if own == levels)
            self._commons[levels] = self._sum(of_levels, start)
        return self._commons[levels]

    @staticmethod
    def _sum(ratios: Iterable[_Ratio], first: float) -> float:
        ratios = list(ratios)
        expected = sum(ratio.expected for ratio in ratios)
        return (sum(ratio.observed for ratio in ratios) + _FIRST * first) / (expected + _FIRST)

    def _compute(self) -> None:
        table = self.table()
        self._tokens = [accepted_tokens(shape, table) for shape in self._shapes]


def accepted_tokens(shape: DeviceTreeShape, acceptance: ByRank) -> float:
    """Expected accepted tokens of a tree, without a chain beside it.

    Of a best-first tree the nodes of each depth that are reached most often under ``acceptance``.

    Args:
        acceptance: its last row serves all deeper depths.
    """
    frontier, total = [1.0], 0.0
    for depth, width in enumerate(shape.widths):
        by_rank = acceptance[min(depth, len(acceptance) - 1)]
        if shape.places is None:
            reached = sorted((mass * a for mass in frontier for a in by_rank), reverse=True)[:width]
            reached += [0.0] * (width - len(reached))
        else:
            reached = [
                frontier[parent] * by_rank[rank] if rank < len(by_rank) else 0.0
                for parent, rank in shape.places[depth]
            ]
        total += sum(reached)
        frontier = reached
    return total


def _padded(row: Sequence[float]) -> list[float]:
    return [*row[:MOST_RANKS], *[0.0] * (MOST_RANKS - len(row))]

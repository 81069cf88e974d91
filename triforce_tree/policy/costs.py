"""Estimates the seconds of passes from a table of stage costs and from the times of earlier passes."""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from triforce_tree.policy.passes import PLAIN, PassKind, StageSeconds
from triforce_tree.trees.device_shapes import DeviceTreeShape

EVIDENCE = 200
"""Number of passes of one kind whose times are needed to correct the table."""
TOLERANCE = 1.25
"""The table is corrected if three quarters of the times differ from it by more than this factor, all in one
direction."""
COPIED = 0.05
"""The seconds to copy matched tokens to the device, as a share of the seconds to draft a tree."""
# Stages of the target, whose costs grow with the context.
_OF_TARGET = ("plain", "chain", "root", "tree")
# Number of newest passes of a kind whose median time is expected of the next one, and number of passes after
# which the seconds of a kind count as known.
_NEWEST, _KNOWN = 15, 3
# Number of drafting passes in a row after which plain passes are measured anew.
_STALE = 512
# Costs are interpolated again after this number of tokens, or this share of the context if it is more.
_STEP, _SHARE = 8, 1 / 128


@dataclass(frozen=True)
class StageCosts:
    """The seconds of the stages at several context lengths.

    Attributes:
        lengths: the lengths of the context in tokens, in ascending order.
        seconds: the seconds of the stages at each length.

    Raises:
        ValueError: the lengths do not ascend, or there are not as many as seconds.
    """

    lengths: tuple[int, ...]
    seconds: tuple[StageSeconds, ...]

    def __post_init__(self) -> None:
        count = len(self.lengths)
        if not count or len(self.seconds) != count:
            raise ValueError(f"{count} lengths, but {len(self.seconds)} seconds; give as many")
        if list(self.lengths) != sorted(set(self.lengths)):
            raise ValueError(f"lengths={self.lengths} are not ascending; sort them")

    def at(self, tokens: int) -> StageSeconds:
        """Returns the seconds after ``tokens`` of context, interpolated between the lengths."""
        right = next((i for i, length in enumerate(self.lengths) if length >= tokens), len(self.lengths) - 1)
        low, high = self.seconds[max(0, right - 1)], self.seconds[right]
        if right == 0 or tokens >= self.lengths[right]:
            return high
        share = (tokens - self.lengths[right - 1]) / (self.lengths[right] - self.lengths[right - 1])
        pairs = {name: (getattr(low, name), getattr(high, name)) for name in _OF_TARGET}
        return replace(low, **{n: a + share * (b - a) for n, (a, b) in pairs.items() if b < math.inf})


class KnownCosts:
    """The stage costs of a program, and how far the times of its passes are off.

    The load of a machine and the work of the host between stages change the times of passes. Passes with the
    same number of levels and the same shape of tree have a common factor: the median of their newest times,
    each divided by the time that the table gives. The median of drafting passes includes the factor of plain
    passes twice, so that single passes decide nothing. Plain passes are measured anew after ``_STALE``
    drafting passes, since the load may have been another one.

    Args:
        tables: the costs with trees of each shape, the configured shape first; None for a shape that passes
            must not take.
        guessed: whether the costs follow from the sizes of the models, and nothing was measured.

    Attributes:
        ratios: the measured times of passes, divided by those of the table, for each (levels, shape).
        factors: the factor for each (levels, shape). Passes without one have that of plain passes, since load
            slows all passes.
    """

    ratios: dict[tuple[int, int], deque[float]]
    factors: dict[tuple[int, int], float]

    def __init__(self, tables: Sequence[StageCosts | None], guessed: bool = False) -> None:
        self.guessed = guessed
        self.replace(tables)

    def replace(self, tables: Sequence[StageCosts | None]) -> None:
        """Replaces the costs, and forgets the times of passes."""
        self.tables, self.ratios, self.factors = list(tables), {}, {}
        self._drafting = 0

    def add(self, kind: PassKind, ratio: float) -> None:
        """Adds the measured seconds of a pass, divided by those of the table."""
        if 0 < ratio < math.inf:
            key = kind.levels, kind.shape
            ratios = self.ratios.setdefault(key, deque(maxlen=EVIDENCE))
            ratios.append(ratio)
            expected = [] if kind == PLAIN else 2 * [self.factors.get((1, 0), 1.0)]
            self.factors[key] = statistics.median_low([*expected, *list(ratios)[-_NEWEST:]])
            self._drafting = 0 if kind == PLAIN else self._drafting + 1
            if self._drafting == _STALE:
                self.ratios.pop((1, 0), None)

    def corrected(self) -> StageCosts | None:
        """Returns better costs with trees of the first shape; None if the table is not clearly wrong.

        Only clear evidence counts, because the choices of requests with a seed follow from the table alone.
        """
        found: dict[int, float] = {}
        for (levels, shape), ratios in self.ratios.items():
            if not shape and len(ratios) == ratios.maxlen:
                low, median, high = statistics.quantiles(ratios, n=4)
                found[levels] = median if low > TOLERANCE or high < 1 / TOLERANCE else 1.0
        table = self.tables[0]
        if table is None or all(factor == 1 for factor in found.values()):
            return None
        # Passes that were not measured are as wrong as plain passes, or as the others.
        known = found.get(1) or next(iter(found.values()))
        plain, tree, chain = (found.get(levels, known) for levels in (1, 2, 3))
        factors = {"plain": plain, "tree": tree, **dict.fromkeys(("retrieval", "chain", "root"), chain)}
        factors |= dict.fromkeys(("draft", "prepare"), found.get(3, tree))

        def scaled(old: StageSeconds) -> StageSeconds:
            """Returns the seconds with two significant digits."""
            return StageSeconds(**{n: float(f"{getattr(old, n) * f:.1e}") for n, f in factors.items()})

        return StageCosts(table.lengths, tuple(map(scaled, table.seconds)))


class PassCosts:
    """Estimates the seconds of passes at the present length of the context.

    Args:
        known: the costs of the program's stages.
        follow: whether the times of earlier passes correct those of the table.
    """

    def __init__(self, known: KnownCosts, follow: bool = True) -> None:
        self._known, self._follow = known, follow
        self._until, self._stages = 0, list[StageSeconds | None]()
        self.at(1)

    def certain(self, kind: PassKind) -> bool:
        """Returns whether the seconds of such passes are known, or follow from the table alone."""
        return not self._follow or len(self._known.ratios.get((kind.levels, kind.shape), ())) >= _KNOWN

    @property
    def shapes(self) -> list[int]:
        """Returns the shapes of trees that passes may take."""
        return [shape for shape, costs in enumerate(self._known.tables) if costs is not None]

    def at(self, tokens: int) -> None:
        """Sets the length of the context."""
        if tokens >= self._until:
            self._stages = [None if costs is None else costs.at(tokens) for costs in self._known.tables]
            self._until = tokens + max(_STEP, int(_SHARE * tokens))

    def changed(self) -> None:
        """Lets the next length be shorter, because the sequences of the batch have changed."""
        self._until = 0

    def drop_other_shapes(self) -> None:
        """Restricts passes to trees of the first shape."""
        others = len(self._known.tables) - 1
        self._known.tables[1:] = [None] * others
        self._stages[1:] = [None] * others

    def stages(self, shape: int) -> StageSeconds:
        """Returns the seconds of the stages with trees of one shape, by the table."""
        stages = self._stages[shape]
        assert stages is not None, "passes take only trees whose costs are known"
        return stages

    def of(self, kind: PassKind, filled: float = 1.0, resumed: bool = False) -> float:
        """Returns the expected seconds of a pass.

        Args:
            filled: see ``StageSeconds.of``.
            resumed: whether the drafter first has to process what plain passes have added.
        """
        seconds = self.stages(kind.shape).of(kind, filled)
        if resumed:
            seconds += self.stages(0).prepare
        if not self._follow:
            return seconds
        factors = self._known.factors
        return seconds * (factors.get((kind.levels, kind.shape)) or factors.get((1, 0), 1.0))

    def learn(self, kind: PassKind, filled: float, resumed: bool, seconds: float) -> None:
        """Adds the measured seconds of a pass; the other arguments are those of :meth:`of`."""
        if (stages := self._stages[kind.shape]) is not None:
            self._known.add(kind, seconds / (stages.of(kind, filled) + resumed * self.stages(0).prepare))


def predicted(
    first: StageCosts, known: DeviceTreeShape, shape: DeviceTreeShape, chain: int, tail: bool = False
) -> StageCosts:
    """Returns the costs with trees of ``shape``, which were not measured.

    The seconds of verifying a tree are interpolated by its number of nodes between those that were measured;
    the retrieval level's grow by the same factor as the target's. The seconds of drafting are proportional to
    the draft's forwards. Matched tokens need no forward, and the retrieval level does not verify them.

    Args:
        first: the costs with trees of ``known``.
        chain: number of tokens in the target's verification of a draft chain.
        tail: whether the stage that verifies a chain first drafts a tree at the end of the chain.
    """
    forwards = COPIED if shape.matched else max(1, len(shape.widths)) / max(1, len(known.widths))

    def of_shape(seconds: StageSeconds) -> StageSeconds:
        points = [(1, seconds.plain), (known.nodes, seconds.tree)]
        points.append((chain, seconds.chain - seconds.draft if tail else seconds.chain))
        measured = sorted((tokens, value) for tokens, value in points if value < math.inf)
        ratio = _interpolated(measured, shape.nodes) / _interpolated(measured, known.nodes)
        return replace(
            seconds,
            draft=seconds.draft * forwards,
            retrieval=math.inf if shape.matched else seconds.retrieval * ratio,
            tree=seconds.tree * ratio,
        )

    return StageCosts(first.lengths, tuple(map(of_shape, first.seconds)))


def _interpolated(points: Sequence[tuple[int, float]], tokens: int) -> float:
    """Returns the seconds of a verification of ``tokens`` tokens, interpolated between measured points.

    Beyond the last point the slope is that between the first and the last one.

    Args:
        points: the measured (tokens, seconds), in ascending order.
    """
    (first, least), (last, most) = points[0], points[-1]
    for (low, before), (high, after) in pairwise(points):
        if low <= tokens <= high and high > low:
            return before + max(0.0, after - before) * (tokens - low) / (high - low)
    return least + max(0.0, most - least) * (tokens - first) / max(1, last - first)

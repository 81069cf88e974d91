"""Holds the costs of passes: a table of stage costs in one file, and times measured while decoding.

The table holds the seconds of each stage for a machine, a pair of models and their settings. While requests
are decoded, the times of their passes correct it: those of the newest passes for the running request, and
those of many passes of several requests in the file. Requests with a seed follow the table alone.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from triforce_tree.policy.passes import OF_SHAPE, PLAIN, STAGE_FIELDS, PassKind, StageSeconds
from triforce_tree.runtime.files.json_files import JsonTable
from triforce_tree.trees.device_shapes import DeviceTreeShape

MOST_ENTRIES = 1000
"""Entries of the file; the oldest ones beyond are dropped."""
LEAST_PASSES, LEAST_REQUESTS = 200, 2
"""Passes with a stage, and requests, before the table is corrected: a request may have met a busy machine."""
TOLERANCE = 1.25
"""Factor by which both quartiles must be off, on one side, before the table is corrected: outliers, and a
table that is nearly right, change nothing."""
COPIED = 0.05
"""The copy of matched tokens to the device, as a share of the draft of a tree."""
# Stages of the target, whose costs grow with the context.
_OF_TARGET = ("plain", "chain", "root", "tree")
# Passes that correct the costs of the running request, and all passes that are kept for the table.
_NEWEST, _KEPT = 15, 400
# With fewer passes nothing is known about a stage.
_SEEN = 20
# Costs are interpolated again after so many tokens at least, and after this share of the context: they change
# by no more, and the table has two digits.
_STEP, _SHARE = 8, 1 / 128


@dataclass(frozen=True)
class StageCosts:
    """Holds the seconds of the stages at several context lengths.

    Attributes:
        lengths: tokens of context, ascending.
        seconds: at each of the lengths; no stage of the target costs less at a longer one.

    Raises:
        ValueError: lengths that are not ascending, or not as many as the seconds; seconds that decrease.
    """

    lengths: tuple[int, ...]
    seconds: tuple[StageSeconds, ...]

    def __post_init__(self) -> None:
        count = len(self.lengths)
        if not count or len(self.seconds) != count:
            raise ValueError(f"{count} lengths, but {len(self.seconds)} seconds; give as many")
        if list(self.lengths) != sorted(set(self.lengths)):
            raise ValueError(f"lengths={self.lengths} are not ascending; sort them")
        for name in _OF_TARGET:
            values = [getattr(seconds, name) for seconds in self.seconds]
            if values != sorted(values):
                raise ValueError(
                    f"{name}={values} costs less at a longer context; give seconds that do not decrease"
                )

    def at(self, tokens: int) -> StageSeconds:
        """Returns the seconds after ``tokens`` of context, interpolated, or extrapolated beyond the last
        length.
        """
        lengths = self.lengths
        if len(lengths) == 1 or tokens <= lengths[0]:
            return self.seconds[0]
        right = next((i for i, length in enumerate(lengths) if length >= tokens), len(lengths) - 1)
        left, right_seconds = self.seconds[right - 1], self.seconds[right]
        share = (tokens - lengths[right - 1]) / (lengths[right] - lengths[right - 1])
        changed = {}
        for name in _OF_TARGET:
            low, high = getattr(left, name), getattr(right_seconds, name)
            if high < math.inf:
                changed[name] = low + share * (high - low)
        return replace(left, **changed)

    def scaled(self, factors: Mapping[str, float]) -> "StageCosts":
        """Each stage's seconds times its factor, where there is one, in two significant digits."""
        found = []
        for seconds in self.seconds:
            own = {name: getattr(seconds, name) * factor for name, factor in factors.items()}
            found.append(replace(seconds, **{name: float(f"{value:.1e}") for name, value in own.items()}))
        return replace(self, seconds=tuple(found))


class CostTable:
    """Costs by settings, in this process and in a file that processes share.

    Args:
        path: of the file, which need not exist; None for a table in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._file = JsonTable(path, MOST_ENTRIES, "stage costs are measured again")
        self._known: dict[str, StageCosts] = {}

    def find(self, settings: Mapping[str, Any]) -> StageCosts | None:
        """The costs measured under these settings; None if there are none."""
        key = JsonTable.key(settings)
        if key not in self._known and (held := _costs(self._file.entries().get(key))) is not None:
            self._known[key] = held
        return self._known.get(key)

    def add(self, settings: Mapping[str, Any], costs: StageCosts) -> StageCosts:
        """Add ``costs``, unless another process has written its own in the meantime.

        Returns:
            what the table now holds.
        """
        if (held := _costs(self._file.entries().get(JsonTable.key(settings)))) is None:
            return self.replace(settings, costs)
        return self._known.setdefault(JsonTable.key(settings), held)

    def replace(self, settings: Mapping[str, Any], costs: StageCosts) -> StageCosts:
        """Write ``costs`` in the place of what the table holds under these settings, and return them."""
        columns = {name: [getattr(seconds, name) for seconds in costs.seconds] for name in STAGE_FIELDS}
        # JSON has no infinity, which a stage that there is not would take.
        finite = {name: [None if value == math.inf else value for value in c] for name, c in columns.items()}
        key = JsonTable.key(settings)
        self._file.put(key, {"lengths": costs.lengths, "seconds": finite, "settings": dict(settings)})
        self._known[key] = costs
        if len(self._known) > MOST_ENTRIES:
            del self._known[next(iter(self._known))]
        return costs


def _costs(entry: Any) -> StageCosts | None:
    """The costs of an entry of the file; None if it is damaged."""
    try:
        columns = {name: list(entry["seconds"][name]) for name in STAGE_FIELDS}
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        known = [{name: float(value) for name, value in row.items() if value is not None} for row in rows]
        lengths = tuple(int(length) for length in entry["lengths"])
        return StageCosts(lengths, tuple(StageSeconds(**row) for row in known))
    except (KeyError, TypeError, ValueError, OverflowError, IndexError):
        return None


class MeasuredTimes:
    """Times of the passes of a program with one kind of sampling, as multiples of the table's.

    The factor of a stage is the median of its newest ratios and of two expected ones, so that a single pass
    decides nothing. The load of a machine changes the speed of all stages: a stage that no pass has measured
    is expected to be as far off as plain passes. It would otherwise seem faster or slower than it is beside
    them, and drafting would be tried too often, or never.
    """

    def __init__(self) -> None:
        self.clear()
        # Seconds of passes beyond those of their stages: the host chooses, launches and learns while the
        # device waits. Of plain passes, and of all others.
        self._host = {plain: deque[float](maxlen=_NEWEST) for plain in (True, False)}

    def clear(self) -> None:
        """Forget the ratios: the table has changed."""
        self._ratios: dict[tuple[str, int], deque[float]] = {}
        self._requests: dict[tuple[str, int], int] = {}
        self._seen: set[tuple[str, int]] = set()

    def begin(self) -> None:
        """Begins another request."""
        self._seen = set()

    def add(
        self, kind: PassKind, filled: float, seconds: Mapping[str, float], table: StageSeconds, resumed: bool
    ) -> None:
        """Adds the times of one pass.

        Args:
            filled: the chain's length as a share of the most that it can hold.
            seconds: ``draft`` and ``retrieval`` of all rounds, ``target`` of the target's stage, ``prepare``
                before the first round.
            table: with trees of its shape, at its length of the context.
            resumed: whether the pass before it was plain.
        """
        target = {1: "plain", 2: "tree", 3: "chain"}[kind.levels]
        self._note(target, kind.shape, seconds["target"] / table.verification(kind, filled))
        for name in ("draft", "retrieval") if kind.rounds else ():
            if name in seconds:
                self._note(name, kind.shape, seconds[name] / kind.rounds / getattr(table, name))
        if resumed and table.prepare and "prepare" in seconds:
            self._note("prepare", 0, seconds["prepare"] / table.prepare)

    def add_host(self, kind: PassKind, seconds: float) -> None:
        """Take up the seconds of a pass less those of its stages; with two clocks they may be below 0."""
        self._host[kind == PLAIN].append(max(0.0, seconds))

    def host(self, kind: PassKind) -> float:
        """Seconds that a pass is expected to take beyond its stages.

        Drafting passes take as long as plain ones at least, also as long as none was measured.
        """
        plain = statistics.median_low([0.0, 0.0, *self._host[True]])
        if kind == PLAIN:
            return plain
        return max(plain, statistics.median_low([0.0, 0.0, *self._host[False]]))

    def factors(self, shape: int) -> dict[str, float]:
        """By how much the table's seconds with trees of one shape are off now, by stage."""
        plain = self._newest("plain", 0, 1.0)
        found = {name: self._newest(name, shape, plain) for name in STAGE_FIELDS}
        return found | {"plain": plain, "root": found["chain"]}

    def corrections(self) -> dict[str, float]:
        """By how much the table's seconds with trees of the first shape are wrong, by stage.

        Only clear evidence counts, since the choices of requests with a seed depend on the table.
        """
        found: dict[str, float] = {}
        for (name, shape), ratios in self._ratios.items():
            if shape or len(ratios) < LEAST_PASSES or self._requests[name, shape] < LEAST_REQUESTS:
                continue
            low, median, high = statistics.quantiles(ratios, n=4)
            if low > TOLERANCE or high < 1 / TOLERANCE:
                found[name] = median
        if "plain" in found:
            # A machine that was busy while plain passes were timed was busy with the other stages too.
            for name in STAGE_FIELDS:
                known = list(self._ratios.get((name, 0), ()))
                factor = statistics.median(known) if len(known) >= _SEEN else found["plain"]
                if not 1 / TOLERANCE <= factor <= TOLERANCE:
                    found.setdefault(name, factor)
        if "chain" in found:
            found["root"] = found["chain"]
        return found

    def _newest(self, name: str, shape: int, expected: float) -> float:
        ratios = self._ratios.get((name, shape if name in OF_SHAPE else 0))
        if ratios is None:
            return expected
        return statistics.median_low([expected, expected, *list(ratios)[-_NEWEST:]])

    def _note(self, name: str, shape: int, ratio: float) -> None:
        if not 0 < ratio < math.inf:
            return
        key = name, shape if name in OF_SHAPE else 0
        self._ratios.setdefault(key, deque(maxlen=_KEPT)).append(ratio)
        if key not in self._seen:
            self._seen.add(key)
            self._requests[key] = self._requests.get(key, 0) + 1


class PassCosts:
    """Estimates the seconds of passes at the present length of the context.

    Args:
        table: costs with trees of each shape, the first one's first; None for a shape that passes must not
            take.
        measured: collects the times of passes beside the table's.
        follow: whether costs follow the measured times, and not the table alone.

    Attributes:
        table: as given.
    """

    def __init__(
        self,
        table: Sequence[StageCosts | None],
        measured: MeasuredTimes | None = None,
        follow: bool = True,
    ) -> None:
        self.table, self._follow = list(table), follow
        self._measured = measured or MeasuredTimes()
        self._measured.begin()
        self._until = 0
        self.at(1)

    @property
    def shapes(self) -> list[int]:
        """The shapes of trees that passes may take."""
        return [shape for shape, costs in enumerate(self.table) if costs is not None]

    def at(self, tokens: int) -> None:
        """Sets the length of the context; the costs are updated every few tokens."""
        if tokens >= self._until:
            self._expected = [None if costs is None else costs.at(tokens) for costs in self.table]
            self._until = tokens + max(_STEP, int(_SHARE * tokens))
            self._now: dict[int, StageSeconds] = {}

    def changed(self) -> None:
        """Sequences have changed: the next length may be shorter."""
        self._until = 0

    def drop_other_shapes(self) -> None:
        """Let passes take trees of the first shape alone."""
        self.table[1:] = [None] * len(self.table[1:])
        self._expected[1:] = [None] * len(self.table[1:])

    def stages(self, shape: int) -> StageSeconds:
        """Returns the seconds of the stages with trees of one shape."""
        if shape not in self._now:
            expected = self._expected[shape]
            assert expected is not None, "passes take only trees whose costs are known"
            if self._follow:
                factors = self._measured.factors(shape)
                expected = StageSeconds(**{name: s * factors[name] for name, s in vars(expected).items()})
            self._now[shape] = expected
        return self._now[shape]

    def of(self, kind: PassKind, filled: float = 1.0) -> float:
        """Seconds of a pass, without what the drafter does after plain passes.

        Args:
            filled: the chain's length as a share of the most that it can hold.
        """
        host = self._measured.host(kind) if self._follow else 0.0
        return self.stages(kind.shape).of(kind, filled) + host

    @property
    def prepare(self) -> float:
        """Seconds of what the drafter does before its first proposal after plain passes."""
        return self.stages(0).prepare

    def learn(self, kind: PassKind, filled: float, seconds: Mapping[str, float], resumed: bool) -> None:
        """Adds the times of a pass; the arguments are those of :meth:`MeasuredTimes.add`."""
        if (expected := self._expected[kind.shape]) is not None:
            self._measured.add(kind, filled, seconds, expected, resumed)
            self._now = {}

    def learn_host(self, kind: PassKind, seconds: float) -> None:
        """Adds the seconds of a pass less those of its stages."""
        self._measured.add_host(kind, seconds)


def predicted(
    first: StageCosts, known: DeviceTreeShape, shape: DeviceTreeShape, chain: int, tail: bool = False
) -> StageCosts:
    """Costs with trees of ``shape``, which were not measured; stages that ``first`` lacks are left out.

    A verification's time is interpolated by its number of tokens between those that were measured. A draft's
    time is in proportion to its forwards. Matched tokens take no forward of the draft, and level 1 does not
    verify them.

    Args:
        first: measured with trees of ``known``.
        chain: tokens of the target's verification of a draft chain.
        tail: whether the stage that verifies a chain begins with the draft of a tree at its end.
    """
    measured = [_points(seconds, known.nodes, chain, tail) for seconds in first.seconds]
    trees = [_interpolated(points, shape.nodes) for points in measured]
    here = [_interpolated(points, known.nodes) for points in measured]
    forwards = COPIED if shape.matched else max(1, len(shape.widths)) / max(1, len(known.widths))
    found = []
    for seconds, tree, same in zip(first.seconds, trees, here, strict=True):
        # The retrieval level reads the same weights, and a budget of the context: as at the shortest one.
        more = max(trees[0] - here[0], -seconds.retrieval / 2) if seconds.retrieval < math.inf else 0.0
        found.append(
            replace(
                seconds,
                draft=seconds.draft * forwards,
                retrieval=math.inf if shape.matched else seconds.retrieval + more,
                tree=max(seconds.plain / 2, seconds.tree + tree - same),
            )
        )
    # Longer contexts cost no less, also where the last two points are extrapolated.
    ascending = accumulate((seconds.tree for seconds in found), max)
    return StageCosts(
        first.lengths, tuple(replace(s, tree=tree) for s, tree in zip(found, ascending, strict=True))
    )


def _points(seconds: StageSeconds, nodes: int, chain: int, tail: bool) -> list[tuple[int, float]]:
    """(tokens, seconds) of the target's verifications, by ascending tokens; no more tokens take less time."""
    measured = {1: seconds.plain}
    of_chain = seconds.chain - seconds.draft if tail else seconds.chain
    for tokens, value in ((nodes, seconds.tree), (chain, of_chain)):
        if value < math.inf and tokens > 1:
            measured.setdefault(tokens, value)
    counts = sorted(measured)
    return list(zip(counts, accumulate((measured[count] for count in counts), max), strict=True))


def _interpolated(points: Sequence[tuple[int, float]], tokens: int) -> float:
    """Linear between two points, and beyond the last as between the first and the last: two measured points
    that are near each other say little about the slope."""
    if len(points) == 1:
        return points[0][1]
    right = next((i for i, (count, _) in enumerate(points) if i and count >= tokens), 0)
    (low, before), (high, after) = (points[right - 1], points[right]) if right else (points[0], points[-1])
    return before + (after - before) * (tokens - low) / (high - low)

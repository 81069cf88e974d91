"""Coordinate descent over settings: which values are tried, in which order, and when one is better.

Three levels and two are searched separately, since most settings apply to only one of them.

Nothing is measured here: a measure returns milliseconds per token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from triforce_tree.config import HierarchyConfig
from triforce_tree.trees.device_shapes import PassLimits
from triforce_tree.trees.shapes import chain_shape, parse_shape, shape_name, with_chain
from triforce_tree.tune.fitted import MOST_DEPTH, MOST_TOKENS, PROBES

Options = dict[str, Any]
Measure = Callable[[Options, Options | None], float]
"""Milliseconds per token of the first options; may stop early if clearly worse than the second ones."""

# A smaller gain is noise.
LEAST_GAIN = 0.02
# A starting point this many times slower than the best one is not searched from.
_MUCH_SLOWER = 1.5
# In longer contexts a GPU spends its time on reading the cache, and large trees, large budgets and a cheap
# level 1 are faster (docs/measurements.md).
_LONG = 32_768
_LONG_ON_GPU: Options = {
    "levels": 3, "gamma": 20, "tree": "best-first:10,9,7,5", "retrieval_weight_bits": 8, "budget": 8192,
    "chunk": 32, "runner_ups": False,
}  # fmt: skip
# Passes over all coordinates; the second one repeats those that depend on later ones.
_SWEEPS = 2
# Settings that are not searched, beside other_trees, and the numbers of levels that they apply to.
_CARRIED = {"recent": (3,), "sinks": (2, 3), "window": (2, 3)}


class OutOfTime(Exception):
    """The time limit is reached."""


@dataclass(frozen=True)
class Coordinate:
    """One option and the values it may take.

    ``ordered`` values are tried upwards or else downwards from the current one while they gain; others are
    all tried. ``levels``: the numbers of levels that the option applies to.
    """

    name: str
    values: tuple[Any, ...]
    ordered: bool = True
    levels: tuple[int, ...] = (3,)


GRID = (
    Coordinate(
        "tree",
        (
            "chain:4",
            "best-first:6,5,4",
            "best-first:8,8,6,4",
            "best-first:12,10,8,6,4,4",
        ),
        ordered=False,
        levels=(2, 3),
    ),
    Coordinate("lookup", (4, 8, 15, 31), levels=(2, 3)),
    Coordinate("retrieval_weight_bits", (16, 8, 4), ordered=False),
    Coordinate("gamma", (4, 6, 8, 12, 16, 24)),
    Coordinate("budget", (512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16_384, 32_768)),
    # Selection of chunks in every pass of level 1, in every other, ...; with 0 once for each pass of level 2.
    Coordinate("refresh", (1, 2, 4, 0)),
    Coordinate("chunk", (8, 16, 32)),
    Coordinate("runner_ups", (True, False), ordered=False),
    Coordinate("tail_tree", (True, False), ordered=False),
)


@dataclass(frozen=True)
class Space:
    """The grid for one context length: the coordinates that apply, and where the search begins.

    Args:
        start: the settings without a profile: the engine's own, and the device's defaults.
        context: tokens of the prompts.
        gpu, draft: whether there is a GPU, and a draft model.
        fixed: options that the user has given.
        grid: all coordinates.
    """

    start: HierarchyConfig
    context: int
    gpu: bool
    draft: bool
    fixed: frozenset[str] = frozenset()
    grid: Sequence[Coordinate] = field(default=GRID)

    @property
    def _inapplicable(self) -> str:
        """Only a draft model takes the option ``tree``; ``lookup`` is searched where there is none."""
        return "lookup" if self.draft else "tree"

    def coordinates(self, fitted: Sequence[str] = ()) -> list[Coordinate]:
        """The coordinates that apply; ``fitted`` are trees to try beside the grid's."""
        left_out = {self._inapplicable}
        if not self.gpu:
            left_out.add("retrieval_weight_bits")
        result = [c for c in self.grid if c.name not in self.fixed | left_out]
        result = [replace(c, values=(*c.values, *fitted)) if c.name == "tree" else c for c in result]
        return [
            replace(c, values=tuple(b for b in c.values if 2 * b <= self.context))
            if c.name == "budget"
            else c
            for c in result
        ]

    def starts(self) -> list[Options]:
        """The engine's own settings, by number of levels, with a budget smaller than the context.

        On a GPU also settings for long contexts, where the context is long enough.
        """
        own = self._own
        options = {"levels": own["levels"]}
        options |= {c.name: own[c.name] for c in GRID if c.name != self._inapplicable}
        if self.draft:
            # By name, so that records and profiles hold them.
            others = (with_chain(shape, 0) for shape in self.start.other_trees or ())
            options["other_trees"] = " ".join(map(shape_name, others)) or "none"
        else:
            options["lookup"] = self.start.matched_tokens(draft_model=False)
        if options["runner_ups"] is None:
            options["runner_ups"] = self.gpu
        if 2 * options["budget"] > self.context:
            ladder = next((c.values for c in self.coordinates() if c.name == "budget"), ())
            smaller = [b for b in ladder if self.allows(options | {"levels": 3, "budget": b})]
            options["budget"] = max(smaller, default=options["budget"])
        if not self._chooses_levels:
            return [options]
        found = [options | {"levels": 3}, options | {"levels": 2}]
        if options["retrieval_weight_bits"] != 16 and "retrieval_weight_bits" not in self.fixed:
            # Memory may be short for a copy of the weights in fewer bits.
            found.insert(1, found[0] | {"retrieval_weight_bits": 16})
        if self.gpu and self.context >= _LONG:
            found.append(options | {k: v for k, v in _LONG_ON_GPU.items() if k not in self.fixed})
        return [o for o in found if self.allows(o)]

    def allows(self, options: Options) -> bool:
        """Whether these options are valid, with a budget of at most half the context."""
        try:
            self.config(options)
        except ValueError:
            return False
        return bool(options["levels"] != 3 or 2 * options["budget"] <= self.context)

    def extent(self) -> PassLimits:
        """The largest trees and chains that are tried."""
        values = {c.name: c.values for c in self.grid}
        shapes = [parse_shape(self.start.tree)]
        if self.draft:
            trees = (*values.get("tree", ()), _LONG_ON_GPU["tree"])
            shapes += [parse_shape(with_chain(tree, self.start.matched_tokens(True))) for tree in trees]
        else:
            shapes += [chain_shape(length) for length in values.get("lookup", ())]
        found = [PassLimits.of(replace(self.start, tree=shape), 2) for shape in shapes]
        depth = max(extent.depth for extent in found)
        nodes = max(extent.nodes for extent in found)
        if self.draft:
            beside = self.start.matched_tokens(True)
            nodes, depth = max(nodes, 1 + MOST_TOKENS + beside), max(depth, MOST_DEPTH)
        gamma = max(*values.get("gamma", ()), _LONG_ON_GPU["gamma"], self.start.gamma)
        return PassLimits(depth, nodes, max(depth, gamma))

    def probes(self, options: Options) -> HierarchyConfig | None:
        """``options`` with the trees whose stages are timed; None for one level."""
        first, *others = PROBES
        tried = options | {"tree": first, "other_trees": " ".join(others)}
        return self.config(self.measured(tried)) if options["levels"] != 1 else None

    def complete(self, options: Options) -> Options:
        """All options that reproduce a measurement, whatever the defaults are."""
        own = self._own
        carried = {name: own[name] for name, levels in _CARRIED.items() if options["levels"] in levels}
        found = relevant(options) | carried
        found.pop(self._inapplicable, None)
        if self.draft and self.start.lookup and options["levels"] > 1:
            found["lookup"] = self.start.lookup
        return found

    def config(self, options: Options) -> HierarchyConfig:
        return HierarchyConfig.from_options(**{**self._own, **options})

    def measured(self, options: Options) -> Options:
        """What is measured for these options: what a profile's entry of them runs.

        Passes of two levels, matched tokens among them, may then take the place of those of three.
        """
        return options | {"levels": "auto"} if options["levels"] == 3 and self._chooses_levels else options

    @property
    def _chooses_levels(self) -> bool:
        """Whether the number of levels is not given."""
        return "levels" not in self.fixed or self.start.levels == "auto"

    @property
    def _own(self) -> Options:
        """The options of ``start``, with numbers; the chain beside its trees follows from ``lookup``."""
        own = self.start.as_options()
        return own | {"tree": with_chain(own["tree"], 0), "retrieval_weight_bits": self.start.weight_bits}


def relevant(options: Options) -> Options:
    """The options that apply with their number of levels, so that equal settings compare equal."""
    level = options["levels"]
    applicable = {"levels", *(c.name for c in GRID if level in c.levels)}
    if level > 1:
        applicable.add("other_trees")
    return {name: value for name, value in options.items() if name in applicable}


def search(
    measure: Measure,
    starts: Sequence[Options],
    coordinates: Sequence[Coordinate],
    allows: Callable[[Options], bool],
) -> tuple[list[Options], bool]:
    """The best options for each number of levels, the fastest first, and whether the search was completed.

    Of several starting points with as many levels only the fastest one is searched from.

    Raises:
        OutOfTime: before the first starting point was measured.
    """
    found = [(measure(starts[0], None), starts[0])]
    try:
        found += [(measure(start, None), start) for start in starts[1:]]
    except OutOfTime:
        return list(starts), False
    finished = True
    found.sort(key=lambda pair: pair[0], reverse=True)
    found = list({start["levels"]: (ms, start) for ms, start in found}.values())
    found.sort(key=lambda pair: pair[0])
    nearest = found[0][0]
    for number, (ms, start) in enumerate(found):
        if ms <= _MUCH_SLOWER * nearest:
            best, best_ms, done = descend(measure, start, ms, coordinates, allows)
            found[number] = (best_ms, best)
            finished &= done
    found.sort(key=lambda pair: pair[0])
    return [options for _, options in found], finished


def descend(
    measure: Measure,
    start: Options,
    start_ms: float,
    coordinates: Sequence[Coordinate],
    allows: Callable[[Options], bool],
) -> tuple[Options, float, bool]:
    """The best options with as many levels as ``start``, their time, and whether the search was completed."""
    best, best_ms = start, start_ms

    def improves(value: Any, name: str) -> bool:
        nonlocal best, best_ms
        tried = best | {name: value}
        if value == best.get(name) or not allows(tried):
            return False
        ms = measure(tried, best)
        if ms >= (1 - LEAST_GAIN) * best_ms:
            return False
        best, best_ms = tried, ms
        return True

    try:
        for _ in range(_SWEEPS):
            before = best
            for coordinate in coordinates:
                if best["levels"] not in coordinate.levels:
                    continue
                if coordinate.ordered:
                    _climb(coordinate, best.get(coordinate.name), improves)
                    continue
                for value in coordinate.values:
                    improves(value, coordinate.name)
            if best == before:
                break
    except OutOfTime:
        return best, best_ms, False
    return best, best_ms, True


def _climb(coordinate: Coordinate, value: Any, improves: Callable[[Any, str], bool]) -> None:
    """Try the values upwards, or else downwards, as long as each gains."""
    values = coordinate.values
    at = values.index(value) if value in values else sum(v < value for v in values)
    for direction in (range(at if value not in values else at + 1, len(values)), range(at - 1, -1, -1)):
        moved = False
        for index in direction:
            if not improves(values[index], coordinate.name):
                break
            moved = True
        if moved:
            return

"""Tree shapes: chains, static topologies, Sequoia's dynamic programme, best-first.

A shape names nodes by *ranks*: the path of sibling ranks from the root, as in Medusa's lists, so ``(0, 1)``
is the second child of the first child. How many children a node gets may depend on the distributions so far,
never on the draws of these children: that would bias the distribution that they follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

Ranks = tuple[int, ...]
# Limits of a tree: every proposed token is verified in one forward, every depth takes a forward of the draft.
MOST_NODES, MOST_DEPTH = 1024, 128


class Static:
    """A fixed topology, given by the rank paths of its nodes (Medusa's form).

    A path implies its prefixes and the earlier siblings of its nodes, since siblings are drawn in order.
    """

    def __init__(self, paths: Iterable[Sequence[int]]) -> None:
        self.counts: dict[Ranks, int] = {}
        for path in paths:
            _check_size(max(path, default=0) + 1, len(path))
            if any(rank < 0 for rank in path):
                raise ValueError(f"path {list(path)} has a negative rank; the first sibling is 0")
            for depth, rank in enumerate(path):
                parent = tuple(path[:depth])
                self.counts[parent] = max(self.counts.get(parent, 0), rank + 1)
        if not self.counts:
            raise ValueError("a static tree needs at least one path, such as [[0], [0, 0], [1]]")
        _check_size(self.size, 1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self.counts == other.counts

    def __hash__(self) -> int:
        return hash(frozenset(self.counts.items()))

    @property
    def size(self) -> int:
        """Proposed tokens, without the root."""
        return sum(self.counts.values())

    @property
    def name(self) -> str:
        """As :func:`parse_shape` reads it; the last child of each node implies the others."""
        last = [(*parent, count - 1) for parent, count in self.counts.items()]
        return "static:" + ";".join(".".join(map(str, path)) for path in last)


class BestFirst:
    """At every depth, the ``widths[depth]`` continuations of highest path probability.

    The topology is chosen anew for each tree from the draft distributions, as in DDTree and EAGLE-2. If
    acceptance by rank is the same at every node, it is Sequoia's optimum under the same widths.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        if not widths or min(widths) < 1:
            raise ValueError(f"widths={list(widths)} must be positive; use for example 6,5,4")
        _check_size(sum(widths), len(widths))
        self.widths = tuple(widths)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BestFirst) and self.widths == other.widths

    def __hash__(self) -> int:
        return hash(self.widths)


Shape = Static | BestFirst


def chain_shape(length: int) -> Static:
    """A shape of one proposed token per depth."""
    _check_size(length, length)
    return Static([[0] * length])


def sequoia(acceptance: Sequence[float], size: int, depth: int) -> Static:
    """The tree of ``size`` proposed tokens and at most ``depth`` depths with most expected accepted tokens.

    Sequoia (arXiv 2402.12374, section 3.2): T[m, l] is the best expectation of a tree of m nodes and l depths
    below its root, T[m, l, b] the same with b children; the b-th child, accepted with probability
    ``acceptance[b - 1]`` given that its parent was, takes y of the m nodes:
    T[m, l, b] = max_y T[m - y, l, b - 1] + acceptance[b - 1] * (1 + T[y - 1, l - 1]).

    Args:
        acceptance: probability that the sibling of rank r is the accepted one, r = 0, 1, ...
        size: proposed tokens.
        depth: length of the longest path.
    """
    if size < 1 or depth < 1:
        raise ValueError(f"size={size} and depth={depth} must be at least 1")
    if not acceptance or min(acceptance) < 0 or sum(acceptance) > 1 + 1e-6:
        raise ValueError(
            f"acceptance={list(acceptance)} must be probabilities of sum at most 1; use for example 0.5, 0.2"
        )
    _check_size(size, depth)
    levels = _plans(acceptance, size, depth)
    paths: list[Ranks] = []

    def walk(parent: Ranks, nodes: int, level: int) -> None:
        if nodes == 0 or level == 0:
            return
        for rank, subtree in enumerate(levels[min(level, len(levels)) - 1].sizes(nodes)):
            paths.append((*parent, rank))
            walk((*parent, rank), subtree - 1, level - 1)

    walk((), size, depth)
    return Static(paths)


@dataclass(frozen=True)
class _Plan:
    """The best allocation of the nodes below one node to the subtrees of its children.

    Attributes:
        children: int ``[size + 1]``, the number of children if there are m nodes to allocate.
        last_sizes: int ``[ranks, size + 1]``, of m nodes, those in the subtree of the last of rank + 1
            children.
    """

    children: Any
    last_sizes: Any

    def sizes(self, nodes: int) -> list[int]:
        """Nodes in the subtree of each child, the child included."""
        sizes = []
        for rank in reversed(range(int(self.children[nodes]))):
            sizes.append(int(self.last_sizes[rank][nodes]))
            nodes -= sizes[-1]
        return sizes[::-1]


def _plans(acceptance: Sequence[float], size: int, depth: int) -> list[_Plan]:
    """The best plans for 1, 2, ... depths below a node, up to ``depth`` or until one more gains nothing."""
    # Imported here, since the command line's help does not need it.
    import numpy as np

    plans = []
    # gains[m]: the best expectation of at most m nodes below a node, with one depth more in each iteration.
    gains = np.zeros(size + 1)
    for _ in range(depth):
        # values[m] with children 1..b, each of at least one node; -inf if m are too few.
        best, values = np.zeros(size + 1), np.zeros(size + 1)
        children, last_sizes = np.zeros(size + 1, dtype=int), []
        for rank in range(min(len(acceptance), size)):
            padded = np.concatenate([np.full(size, -np.inf), values])
            # [m, y - 1]: the expectation of m - y nodes below the earlier children.
            before = np.lib.stride_tricks.sliding_window_view(padded, size)[:-1, ::-1]
            total = before + acceptance[rank] * (1 + gains[:-1])
            last_sizes.append(total.argmax(axis=1) + 1)
            values = total.max(axis=1)
            children[values > best] = rank + 1
            best = np.maximum(best, values)
        plans.append(_Plan(children, np.stack(last_sizes)))
        if np.array_equal(best, gains):
            # This plan is also the best for more depths.
            break
        gains = best
    return plans


def expected_acceptances(shape: Static, acceptance: Sequence[float]) -> float:
    """Expected accepted tokens of a static tree if acceptance depends on rank alone; without the bonus."""
    total = 0.0
    frontier: list[tuple[Ranks, float]] = [((), 1.0)]
    while frontier:
        parent, chance = frontier.pop()
        for rank in range(min(shape.counts.get(parent, 0), len(acceptance))):
            total += chance * acceptance[rank]
            frontier.append(((*parent, rank), chance * acceptance[rank]))
    return total


# Greedy acceptance by rank of a distilled draft at long context; a profile measured on the user's own pair
# (triforce-tree check --acceptance) replaces it.
DEFAULT_ACCEPTANCE = (0.50, 0.13, 0.06, 0.04, 0.03, 0.02, 0.015, 0.01)


def parse_shape(text: str | Shape) -> Shape:
    """Parse the name of a shape.

    ``chain:4`` | ``best-first:6,5,4`` (widths by depth) | ``sequoia:16x4`` (size x depth) |
    ``static:0;0.0;1`` (rank paths) | a :class:`Static` or :class:`BestFirst` object.

    Raises:
        ValueError: it is none of these, has more than ``MOST_NODES`` nodes, or is deeper than ``MOST_DEPTH``.
    """
    if not isinstance(text, str):
        if not isinstance(text, Static | BestFirst):
            raise ValueError(f"tree={text!r} is neither a name like chain:4 nor a tree shape; {_KNOWN}")
        return text
    shown = text if len(text) < 60 else f"{text[:60]}..."
    try:
        shape = _named(text)
    except ValueError as error:
        raise ValueError(f"tree={shown!r} cannot be read: {error}") from error
    if shape is None:
        raise ValueError(f"tree={shown!r} is no known shape; {_KNOWN}")
    return shape


_KNOWN = "use chain:4, best-first:6,5,4, sequoia:16x4 or static:0;0.0;1"


@lru_cache(maxsize=64)
def _named(text: str) -> Shape | None:
    kind, _, rest = text.partition(":")
    if kind == "chain":
        return chain_shape(_positive(rest))
    if kind == "best-first":
        return BestFirst([_positive(w) for w in rest.split(",")])
    if kind == "sequoia":
        size, _, depth = rest.partition("x")
        return sequoia(DEFAULT_ACCEPTANCE, _positive(size), _positive(depth))
    if kind == "static":
        return Static([int(r) for r in path.split(".")] for path in rest.split(";"))
    return None


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(f"{value} must be at least 1")
    return value


def _check_size(nodes: int, depth: int) -> None:
    if nodes > MOST_NODES or depth > MOST_DEPTH:
        raise ValueError(
            f"a tree has at most {MOST_NODES} proposed tokens and a depth of {MOST_DEPTH}, this one {nodes} "
            f"and {depth}; use a smaller one"
        )

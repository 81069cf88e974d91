"""Sequoia's dynamic programme (arXiv 2402.12374, section 3.2).

Nodes are named by rank paths, as in ``trees.shapes``. Acceptance is the probability that the sibling of rank
r is the accepted one given that their parent was: one vector for the whole tree, or one for each depth, the
last of which holds for all deeper ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Ranks = tuple[int, ...]
Acceptance = Sequence[float] | Sequence[Sequence[float]]
"""By rank, or by depth and rank."""


def vectors_by_depth(acceptance: Acceptance) -> list[list[float]]:
    """One vector for each depth that has its own.

    Raises:
        ValueError: no probabilities, or those of siblings add up to more than 1.
    """
    rows: Any = [acceptance] if not acceptance or not isinstance(acceptance[0], Sequence) else acceptance
    vectors = [[float(a) for a in row] for row in rows]
    for vector in vectors:
        if not vector or not all(0 <= a <= 1 for a in vector) or sum(vector) > 1 + 1e-6:
            raise ValueError(
                f"acceptance={vector} must be probabilities of sum at most 1; use for example 0.5, 0.2"
            )
    return vectors


def at_most_one(acceptance: Sequence[float]) -> list[float]:
    """Acceptance of siblings, whose sum rounding may have raised above 1."""
    return [a / max(1.0, sum(acceptance)) for a in acceptance]


def best_paths(acceptance: Acceptance, size: int, depth: int) -> list[Ranks]:
    """The rank paths of the tree of ``size`` nodes and ``depth`` depths with most expected accepted tokens.

    T[m, l] is the best expectation of m nodes in l depths below a node, T[m, l, b] the same with b children;
    the b-th child, accepted with probability a_b, takes y of the m nodes:
    T[m, l, b] = max_y T[m - y, l, b - 1] + a_b (1 + T[y - 1, l - 1]), where a_b may depend on the depth.
    """
    plans = list(plans_by_depth(vectors_by_depth(acceptance), size, depth))
    paths: list[Ranks] = []

    def walk(parent: Ranks, nodes: int, below: int) -> None:
        if nodes == 0 or below == 0:
            return
        for rank, subtree in enumerate(plans[min(below, len(plans)) - 1].sizes(nodes)):
            paths.append((*parent, rank))
            walk((*parent, rank), subtree - 1, below - 1)

    walk((), size, depth)
    return paths


@dataclass(frozen=True)
class _Plan:
    """The best allocation of the nodes below one node to the subtrees of its children.

    Attributes:
        children: int ``[size + 1]``, the number of children if there are m nodes to allocate.
        last_sizes: int ``[ranks, size + 1]``, of m nodes, those in the subtree of the last of rank + 1
            children.
        gains: float ``[size + 1]``, the expectation of at most m nodes.
    """

    children: Any
    last_sizes: Any
    gains: Any

    def sizes(self, nodes: int) -> list[int]:
        """Nodes in the subtree of each child, the child included."""
        sizes = []
        for rank in reversed(range(int(self.children[nodes]))):
            sizes.append(int(self.last_sizes[rank][nodes]))
            nodes -= sizes[-1]
        return sizes[::-1]


def plans_by_depth(vectors: Sequence[Sequence[float]], size: int, depth: int) -> Iterator[_Plan]:
    """The best plans for 1, 2, ... depths below a node, the deepest nodes first.

    With one vector they are those of every node with so many depths below it, and end where one depth more
    gains nothing: the last one then serves more depths too.
    """
    # Imported here, since the command line's help does not need it.
    import numpy as np

    gains = np.zeros(size + 1)
    for level in range(depth):
        # The children whose plan this is are at depth - level, counted from 1.
        acceptance = vectors[min(depth - level - 1, len(vectors) - 1)]
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
        yield _Plan(children, np.stack(last_sizes), best)
        if len(vectors) == 1 and np.array_equal(best, gains):
            break
        gains = best

"""Sequoia's dynamic programme (arXiv 2402.12374, section 3.2), which finds the best tree of a given size.

Nodes are named by rank paths, as in ``trees.shapes``. Acceptance is the probability that the child of rank r
is accepted given that its parent was. It is one vector for the whole tree, or one vector per depth, of which
the last also holds for all deeper nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Ranks = tuple[int, ...]
Acceptance = Sequence[float] | Sequence[Sequence[float]]
"""Acceptance by rank, or by depth and rank."""


def vectors_by_depth(acceptance: Acceptance) -> list[list[float]]:
    """Returns acceptance as a list of vectors by depth; a single vector gives a list of one.

    Raises:
        ValueError: a vector is empty, has values outside 0 to 1, or has a sum above 1.
    """
    rows: Any = [acceptance] if not acceptance or not isinstance(acceptance[0], Sequence) else acceptance
    vectors = [[float(a) for a in row] for row in rows]
    for vector in vectors:
        if not vector or not all(0 <= a <= 1 for a in vector) or sum(vector) > 1 + 1e-6:
            raise ValueError(
                f"acceptance={vector} must be probabilities of sum at most 1; use for example 0.5, 0.2"
            )
    return vectors


def best_paths(acceptance: Acceptance, size: int, depth: int) -> list[Ranks]:
    """Returns the rank paths of the tree with most expected accepted tokens.

    T[m, l] is the largest expected number of accepted tokens among m nodes in l depths below a node, and
    T[m, l, b] the same if that node has b children. The b-th child, accepted with probability a_b, and its
    descendants take y of the m nodes: T[m, l, b] = max_y T[m - y, l, b - 1] + a_b (1 + T[y - 1, l - 1]). The
    probability a_b may depend on the depth.

    Args:
        size: number of nodes without the root.
        depth: most depths.
    """
    plans = list(_plans_by_depth(vectors_by_depth(acceptance), size, depth))
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
    """The best division of m descendants of a node among the subtrees of its children, for m = 0 to size.

    Attributes:
        children: int ``[size + 1]``, the number of children by m.
        last_sizes: int ``[ranks, size + 1]``, by rank and m: the nodes in the subtree of the last child if
            there are rank + 1 children.
    """

    children: Any
    last_sizes: Any

    def sizes(self, nodes: int) -> list[int]:
        """Returns the number of nodes in the subtree of each child, including the child.

        Args:
            nodes: m, the number of descendants to divide.
        """
        sizes = []
        for rank in reversed(range(int(self.children[nodes]))):
            sizes.append(int(self.last_sizes[rank][nodes]))
            nodes -= sizes[-1]
        return sizes[::-1]


def _plans_by_depth(vectors: Sequence[Sequence[float]], size: int, depth: int) -> Iterator[_Plan]:
    """Yields the best plans for 1, 2, ... depths below a node, beginning with the deepest nodes.

    With a single vector the plans hold at every depth of the tree. They then end when one more depth gains
    nothing, and the last plan also holds for more depths.
    """
    # Imported here, so that the command line prints its help without loading numpy.
    import numpy as np

    gains = np.zeros(size + 1)
    for level in range(depth):
        # The children that this plan allocates are at depth ``depth - level``; the root is at depth 0.
        acceptance = vectors[min(depth - level - 1, len(vectors) - 1)]
        # values[m] is the best expectation with exactly b children so far; -inf if m < b.
        best, values = np.zeros(size + 1), np.zeros(size + 1)
        children, last_sizes = np.zeros(size + 1, dtype=int), []
        for rank in range(min(len(acceptance), size)):
            padded = np.concatenate([np.full(size, -np.inf), values])
            # before[m, y - 1] is the best expectation of m - y nodes in the subtrees of the earlier children.
            before = np.lib.stride_tricks.sliding_window_view(padded, size)[:-1, ::-1]
            total = before + acceptance[rank] * (1 + gains[:-1])
            last_sizes.append(total.argmax(axis=1) + 1)
            values = total.max(axis=1)
            children[values > best] = rank + 1
            best = np.maximum(best, values)
        yield _Plan(children, np.stack(last_sizes))
        if len(vectors) == 1 and np.array_equal(best, gains):
            break
        gains = best

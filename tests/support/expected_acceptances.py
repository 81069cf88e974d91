"""All small trees, and the expected length of what a target accepts of a tree, to judge shapes by."""

from collections.abc import Iterable, Iterator
from functools import cache

from triforce_tree.trees.sequoia import Acceptance, Ranks, vectors_by_depth
from triforce_tree.trees.shapes import Static


def expected_acceptances(shape: Static, acceptance: Acceptance) -> float:
    """Returns the expected accepted tokens of a static tree, without the bonus token.

    Args:
        acceptance: by rank, or by depth and rank.
    """
    vectors, total = vectors_by_depth(acceptance), 0.0
    frontier: list[tuple[Ranks, float]] = [((), 1.0)]
    while frontier:
        parent, chance = frontier.pop()
        vector = vectors[min(len(parent), len(vectors) - 1)]
        for rank in range(min(shape.counts.get(parent, 0), len(vector))):
            total += chance * vector[rank]
            frontier.append(((*parent, rank), chance * vector[rank]))
    return total


@cache
def every_tree(size: int) -> list[frozenset[Ranks]]:
    """Returns all ordered trees of ``size`` nodes below a root, as sets of rank paths."""

    def below(path: Ranks, nodes: int, rank: int = 0) -> Iterator[list[Ranks]]:
        if nodes == 0:
            yield []
            return
        child = (*path, rank)
        for inside in range(nodes):
            for deeper in below(child, inside):
                for later in below(path, nodes - inside - 1, rank + 1):
                    yield [child, *deeper, *later]

    return [frozenset(tree) for tree in below((), size)]


def expectation(tree: Iterable[Ranks], by_depth: list[list[float]]) -> float:
    """Returns the expected accepted tokens, the sum over all nodes of the probability of their paths."""
    total = 0.0
    for path in tree:
        chance = 1.0
        for depth, rank in enumerate(path):
            vector = by_depth[min(depth, len(by_depth) - 1)]
            chance *= vector[rank] if rank < len(vector) else 0.0
        total += chance
    return total

"""The expected length of what a target accepts of a tree, to judge shapes by."""

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

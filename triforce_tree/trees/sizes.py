"""Sizes of Sequoia's trees by the seconds of a pass (arXiv 2402.12374, section 3.3)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from triforce_tree.trees.sequoia import Acceptance, plans_by_depth, vectors_by_depth

Seconds = Callable[[int, int], float]
"""Seconds of a pass with a tree of so many proposed tokens and so many depths: drafting and verification."""
Points = Sequence[tuple[int, float]]
"""(tokens, seconds), by ascending tokens; more tokens count as no cheaper than fewer."""


@dataclass(frozen=True)
class SizedTree:
    """The tree with most expected tokens per second.

    Attributes:
        size, depth: proposed tokens, and the longest path that the programme may use.
        tokens: expected tokens of a pass, the one that the verification adds included.
        seconds: of a pass.
    """

    size: int
    depth: int
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Expected tokens per second."""
        return self.tokens / self.seconds


def best_gains(acceptance: Acceptance, size: int, depth: int) -> list[list[float]]:
    """Expected accepted tokens ``[depth][size + 1]`` of the best trees of 1, 2, ... depths."""
    vectors = vectors_by_depth(acceptance)
    if len(vectors) == 1:
        found = [plan.gains.tolist() for plan in plans_by_depth(vectors, size, depth)]
        return found + [found[-1]] * (depth - len(found))
    # The programme begins at the deepest nodes, so that each number of depths is a run of its own.
    return [list(plans_by_depth(vectors, size, limit))[-1].gains.tolist() for limit in range(1, depth + 1)]


def best_size(acceptance: Acceptance, seconds: Seconds, most_size: int, most_depth: int) -> SizedTree:
    """The size and depth whose best tree has most expected tokens per second (section 3.3).

    Args:
        acceptance: by rank, or by depth and rank.
        seconds: measured or modelled, of every size and depth up to these limits.
        most_size, most_depth: at least 1.

    Raises:
        ValueError: no probabilities, limits below 1, or seconds that are not above 0 and finite.
    """
    if most_size < 1 or most_depth < 1:
        raise ValueError(f"most_size={most_size} and most_depth={most_depth} must be at least 1")
    best: SizedTree | None = None
    for depth, gains in enumerate(best_gains(acceptance, most_size, most_depth), 1):
        for size in range(depth, most_size + 1):
            took = seconds(size, depth)
            if not 0 < took < math.inf:
                raise ValueError(f"seconds({size}, {depth})={took!r} must be above 0 and finite")
            tree = SizedTree(size, depth, 1 + gains[size], took)
            # At equal rates the smaller tree: these loops begin with it.
            if best is None or tree.rate > best.rate * (1 + 1e-12):
                best = tree
    if best is None:
        raise ValueError(f"most_size={most_size} is too small for any tree; use 1 or more")
    return best


def measured_seconds(verification: Points, drafting: Points, beside: int = 1) -> Seconds:
    """Seconds of a pass from measured ones: linear between two points, before the first as at the first.

    Args:
        verification: of a forward over so many tokens.
        drafting: of one depth of a tree, in passes of so many tokens. A single point stands for all trees.
        beside: tokens of a pass that are not the tree's, the root among them.

    Raises:
        ValueError: (from the result) a tree has more tokens than were measured.
    """
    verified, drafted = _interpolated(verification), _interpolated(drafting)
    return lambda size, depth: verified(size + beside) + depth * drafted(size + beside)


def _interpolated(points: Points) -> Callable[[int], float]:
    known = list(zip([t for t, _ in points], accumulate((s for _, s in points), max), strict=True))

    def at(tokens: int) -> float:
        if tokens <= known[0][0] or len(known) == 1:
            return known[0][1]
        for (low, cheap), (high, dear) in pairwise(known):
            if tokens <= high:
                return cheap + (dear - cheap) * (tokens - low) / (high - low)
        raise ValueError(f"{tokens} tokens are more than {known[-1][0]}, the most that were measured")

    return at

"""Chooses the size of Sequoia's tree by the seconds of a pass (arXiv 2402.12374, section 3.3).

A pass is one run of drafting a tree and verifying it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from triforce_tree.trees.sequoia import Acceptance, plans_by_depth, vectors_by_depth

Seconds = Callable[[int, int], float]
"""A function of a tree's proposed tokens and depths that returns the seconds of a pass."""
Points = Sequence[tuple[int, float]]
"""Measured (tokens, seconds) pairs by ascending tokens. Seconds that decrease are raised to the previous."""


@dataclass(frozen=True)
class SizedTree:
    """The tree with most expected tokens per second.

    Attributes:
        size: number of proposed tokens.
        depth: most tokens on a path.
        tokens: expected tokens per pass, including the one that verification adds.
        seconds: seconds per pass.
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
    """Returns expected accepted tokens ``[depth][size + 1]`` of the best trees of 1 to ``depth`` depths."""
    vectors = vectors_by_depth(acceptance)
    if len(vectors) == 1:
        gains = [plan.gains.tolist() for plan in plans_by_depth(vectors, size, depth)]
        return gains + [gains[-1]] * (depth - len(gains))
    # The programme begins at the deepest nodes, so each number of depths needs a run of its own.
    return [list(plans_by_depth(vectors, size, limit))[-1].gains.tolist() for limit in range(1, depth + 1)]


def best_size(acceptance: Acceptance, seconds: Seconds, most_size: int, most_depth: int) -> SizedTree:
    """Returns the size and depth whose best tree has most expected tokens per second (section 3.3).

    Args:
        acceptance: acceptance by rank, or by depth and rank.
        seconds: measured or modelled seconds of a pass for every size and depth up to the limits.
        most_size, most_depth: limits of size and depth, at least 1.

    Raises:
        ValueError: ``acceptance`` is not made of probabilities, a limit is below 1, or seconds are not
            positive and finite.
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
            # At equal rates the smaller tree is kept, which the loops reach first.
            if best is None or tree.rate > best.rate * (1 + 1e-12):
                best = tree
    if best is None:
        raise ValueError(f"most_size={most_size} is too small for any tree; use 1 or more")
    return best


def measured_seconds(verification: Points, drafting: Points, beside: int = 1) -> Seconds:
    """Returns a function that interpolates measured seconds of a pass linearly.

    For fewer tokens than measured it returns the seconds of the first point. For more tokens it raises
    ValueError.

    Args:
        verification: seconds of a verifying forward by its number of tokens.
        drafting: seconds of drafting one depth, by the number of tokens of the pass. A single point stands
            for all trees.
        beside: number of verified tokens that are not proposed ones of the tree, such as the root.
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

"""Costs with trees of a shape that was not measured, from those with trees of the first shape.

Measuring takes the shape's stages, and on a GPU seconds to make them. A verification's time is interpolated
by its number of tokens between those that were measured; a draft's is in proportion to its forwards.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from triforce_tree.decoding.choice.passes import StageSeconds
from triforce_tree.decoding.choice.stage_costs import StageCosts
from triforce_tree.trees.device_shapes import DeviceTreeShape

# The copy of matched tokens to the device, as a share of the draft of a tree.
_COPIED = 0.05


def predicted(
    first: StageCosts, known: DeviceTreeShape, shape: DeviceTreeShape, chain: int, tail: bool = False
) -> StageCosts:
    """Costs with trees of ``shape``; stages that the first shape does not have are left out as there.

    Matched tokens take no forward of the draft, and level 1 does not verify them.

    Args:
        first: measured with trees of ``known``.
        chain: tokens of the target's verification of a draft chain.
        tail: whether the stage that verifies a chain begins with the draft of a tree at its end.
    """
    measured = [_points(seconds, known.nodes, chain, tail) for seconds in first.seconds]
    trees = [_interpolated(points, shape.nodes) for points in measured]
    here = [_interpolated(points, known.nodes) for points in measured]
    forwards = _COPIED if shape.matched else max(1, len(shape.widths)) / max(1, len(known.widths))
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
    """Linear between two points, and beyond the last as between the last two."""
    if len(points) == 1:
        return points[0][1]
    right = next((i for i, (count, _) in enumerate(points) if i and count >= tokens), len(points) - 1)
    (low, before), (high, after) = points[right - 1], points[right]
    return before + (after - before) * (tokens - low) / (high - low)

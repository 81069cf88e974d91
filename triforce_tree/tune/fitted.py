"""Sequoia's trees of the best sizes for the acceptance and the stage times that were measured.

With two levels the target verifies the draft's tree, with three the retrieval level: each has its own
acceptance and its own times, and so its own tree.
"""

from collections.abc import Mapping, Sequence

from triforce_tree.trees.sequoia import at_most_one
from triforce_tree.trees.shapes import sequoia
from triforce_tree.trees.sizes import Points, best_size, measured_seconds

RANKS, MOST_DEPTH, MOST_TOKENS = 8, 8, 63
"""Of the trees that are considered: siblings, depths, and tokens; with the root 64 fill a tile of a GPU."""
PROBES = ("best-first:4,4,4,3", "chain:2", "best-first:16,17,16,14")
"""Trees whose stages are timed: few tokens, some, and most; times of other sizes lie between theirs."""
DRAFT = "draft"
_STAGES = {"draft -> target": "target", "draft -> retrieval": "retrieval"}


def fitted_trees(
    acceptance: Mapping[str, Sequence[Sequence[float]]], stages: Mapping[str, Points], beside: int
) -> list[str]:
    """Names of the trees with most expected tokens a second, one for each level that verifies them.

    Args:
        acceptance: by depth and rank, for each pair of levels.
        stages: seconds of the stages ``target`` and ``retrieval``, where there are such, in passes of so many
            tokens, and of one depth of ``draft``.
        beside: tokens of a pass that are not the tree's, the root among them.
    """
    found = []
    for pair, stage in _STAGES.items():
        by_depth = [at_most_one(ranks) for ranks in acceptance.get(pair, ())]
        # A tree that nothing is accepted of has no best size.
        if stage not in stages or not by_depth or not sum(by_depth[0]):
            continue
        seconds = measured_seconds(stages[stage], stages[DRAFT], beside)
        best = best_size(by_depth, seconds, MOST_TOKENS, MOST_DEPTH)
        found.append(sequoia(by_depth, best.size, best.depth).name)
    return list(dict.fromkeys(found))

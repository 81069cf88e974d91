"""What drafting over recurrent layers is limited to: two levels, and chains of proposed tokens."""

from dataclasses import replace

from triforce_tree.config import HierarchyConfig
from triforce_tree.trees.device_shapes import device_tree_shape
from triforce_tree.trees.shapes import parse_shape

MOST_LEVELS = 2
_CHAIN = "chain:5"


def within_limits(name: str, config: HierarchyConfig, draft_model: bool) -> HierarchyConfig:
    """Settings that a model with recurrent layers can be decoded with.

    Args:
        name: of the model, for errors.
        config: the settings; with a draft model the default tree becomes a chain.
        draft_model: whether a draft model grows ``config.tree``; else it is the drafter's own.

    Raises:
        ValueError: three levels, or a tree that branches.
    """
    if config.levels == 3:
        raise ValueError(
            f"levels=3 is not possible with {name}: level 1 would need recurrent states of its own, after "
            "tokens that level 2 has not verified; use levels=2 or levels='auto'"
        )
    if all(width == 1 for width in device_tree_shape(parse_shape(config.tree)).widths):
        return config
    if draft_model and config.tree == HierarchyConfig().tree:
        return replace(config, tree=_CHAIN)
    raise ValueError(
        f"tree={config.tree!r} branches, and {name} would need a recurrent state for every branch; use a "
        f"chain, like tree={_CHAIN!r}"
    )

"""Limits of models with recurrent layers: two levels, and chains of proposed tokens instead of trees."""

from dataclasses import replace
from typing import NoReturn

from triforce_tree.config import HierarchyConfig
from triforce_tree.models.supported import UnsupportedModelError
from triforce_tree.trees.device_shapes import device_tree_shape
from triforce_tree.trees.shapes import parse_shape

_CHAIN = "chain:5"


def within_limits(name: str, config: HierarchyConfig, draft_model: bool) -> HierarchyConfig:
    """Returns settings that a model with recurrent layers can be decoded with.

    Args:
        name: name of the model, for error messages.
        config: the settings. With a draft model the default tree becomes a chain.
        draft_model: whether a draft model grows ``config.tree``. Otherwise the drafter chooses its own tree.

    Raises:
        ValueError: the settings have three levels, or a tree that branches.
    """
    if config.levels == 3:
        raise ValueError(
            f"levels=3 is not possible with {name}: level 1 would need recurrent states of its own, after "
            "tokens that level 2 has not verified; use levels=2 or levels='auto'"
        )
    shape = device_tree_shape(parse_shape(config.tree))
    if shape.widths and shape.chain:
        raise ValueError(
            f"lookup={shape.chain} adds a branch to the draft's trees, and {name} would need a recurrent "
            "state for every branch; leave lookup out"
        )
    config = replace(config, other_trees=())
    if all(width == 1 for width in shape.widths):
        return config
    if draft_model and config.tree == HierarchyConfig().tree:
        return replace(config, tree=_CHAIN)
    raise ValueError(
        f"tree={config.tree!r} branches, and {name} would need a recurrent state for every branch; use a "
        f"chain, like tree={_CHAIN!r}"
    )


def refuse_draft(name: str) -> NoReturn:
    """Raise UnsupportedModelError, because a draft model has recurrent layers."""
    raise UnsupportedModelError(
        f"{name} keeps recurrent state, and a draft sees a window of the newest tokens, which a state cannot "
        "be cut to; use a draft without such layers, or none (suffix matching)"
    )


def refuse_without_attention(name: str) -> NoReturn:
    """Raise UnsupportedModelError, because all layers of a model are recurrent."""
    raise UnsupportedModelError(
        f"{name} has recurrent layers alone; hierarchical decoding needs layers with attention"
    )

"""Which drafter ``load`` was asked for, and options that this drafter would ignore."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from transformers import PreTrainedModel

from triforce_tree.drafters.base import Drafter

Model = PreTrainedModel | str | Path
DRAFTERS = ("model", "lookup")
_CONTRACT = ("name", "tree", "deterministic", "capturable", "features", "bind", "start", "prepare", "propose")


def own_drafter(drafter: Drafter | str | None, draft: Model | None) -> Drafter | None:
    """The user's own drafter; None where a name was given, or nothing.

    Raises:
        ValueError: an unknown name, two drafters, or an object that is no drafter.
    """
    if isinstance(drafter, str) and drafter not in DRAFTERS:
        raise ValueError(
            f"drafter={drafter!r} is not known; use {', '.join(DRAFTERS)} or an object of your own"
        )
    if drafter is None or drafter == "model":
        return None
    if draft is not None:
        raise ValueError(f"drafter={drafter!r} uses no draft model, and one was given; leave one out")
    if isinstance(drafter, str):
        return None
    missing = [name for name in _CONTRACT if not hasattr(drafter, name)]
    if missing:
        raise ValueError(
            f"{type(drafter).__name__} is no drafter: it has no {', '.join(missing)} "
            "(triforce_tree.drafters.base.Drafter describes each)"
        )
    return drafter


def check_drafter_options(
    drafter: Drafter | str | None, draft: object | None, options: Mapping[str, Any]
) -> None:
    """Check that the drafter is there, and takes the options that were given.

    Args:
        drafter: a name, an object, or None for the draft model where there is one, and else suffix matching.
        draft: the draft model; None without one.
        options: those that the user has given.

    Raises:
        ValueError: ``drafter="model"`` without a draft; an option that the drafter would ignore.
    """
    if draft is None and drafter == "model":
        raise ValueError("drafter='model' needs a draft; give one, or drafter='lookup'")
    if draft is None and "tree" in options:
        _refuse_tree(options["tree"], drafter)
    if (lookup := options.get("lookup")) is not None and not isinstance(drafter, str | None):
        raise ValueError(
            f"lookup={lookup!r} is the number of tokens that drafter='lookup' proposes, but drafter "
            f"{drafter.name!r} is an object with settings of its own; leave lookup out, or use that name"
        )


def _refuse_tree(tree: object, drafter: Drafter | str | None) -> NoReturn:
    if drafter is None or isinstance(drafter, str):
        raise ValueError(
            f"tree={tree!r} shapes a draft model's trees, but suffix matching proposes chains; set lookup=N "
            "instead, or give a draft model"
        )
    raise ValueError(
        f"tree={tree!r} shapes a draft model's trees, but drafter {drafter.name!r} has a tree of its own; "
        "change drafter.tree instead"
    )

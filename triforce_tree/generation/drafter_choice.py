"""Which drafter ``load`` was asked for, and options that this drafter would ignore."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from transformers import PreTrainedModel

from triforce_tree.drafters.base import Drafter
from triforce_tree.drafters.heads.choice import FILES, heads_in
from triforce_tree.loading.model_files import downloaded

Model = PreTrainedModel | str | Path
DRAFTERS = ("model", "lookup")
_CONTRACT = ("name", "tree", "deterministic", "capturable", "features", "bind", "start", "prepare", "propose")


def own_drafter(
    drafter: Drafter | str | Path | None, draft: Model | None, options: Mapping[str, Any]
) -> Drafter | None:
    """The user's own drafter, or that of a folder of heads; None where a name was given, or nothing.

    Args:
        options: those that the user has given: heads take ``tree``, ``sinks`` and ``window``.

    Raises:
        ValueError: an unknown name, two drafters, an object that is no drafter, or heads that cannot be used.
        OSError: heads whose files are missing.
    """
    if names_heads(drafter):
        if draft is not None:
            raise ValueError(
                f"drafter={str(drafter)!r} uses no draft model, and one was given; leave one out"
            )
        return heads_in(_folder(drafter), options)  # type: ignore[arg-type]
    if drafter is None or drafter == "model":
        return None
    if draft is not None:
        raise ValueError(f"drafter={drafter!r} uses no draft model, and one was given; leave one out")
    if isinstance(drafter, str | Path):
        return None
    missing = [name for name in _CONTRACT if not hasattr(drafter, name)]
    if missing:
        raise ValueError(
            f"{type(drafter).__name__} is no drafter: it has no {', '.join(missing)} "
            "(triforce_tree.drafters.base.Drafter describes each)"
        )
    return drafter


def names_heads(drafter: Drafter | str | Path | None) -> bool:
    """Whether this is a folder or a hub id of heads, and not a name or an object."""
    return isinstance(drafter, Path) or (isinstance(drafter, str) and drafter not in DRAFTERS)


def _folder(source: str | Path) -> Path:
    """The folder of heads; of a hub id the snapshot with their files, which is downloaded."""
    if Path(source).is_dir():
        return Path(source)
    if isinstance(source, str) and source.count("/") == 1 and not source.startswith((".", "/", "~")):
        return downloaded(source, FILES)
    raise ValueError(
        f"drafter={str(source)!r} is not known; use {', '.join(DRAFTERS)} or an object of your own, or a "
        "folder or hub id with Medusa heads or an EAGLE-3 head"
    )


def check_drafter_options(
    drafter: Drafter | str | Path | None, draft: object | None, options: Mapping[str, Any]
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
    for name in ("tree", "other_trees") if draft is None else ():
        if name in options and not names_heads(drafter):
            _refuse_tree(name, options[name], drafter)
    if (lookup := options.get("lookup")) is not None:
        _check_lookup(lookup, drafter)


def _refuse_tree(name: str, tree: object, drafter: Drafter | str | Path | None) -> NoReturn:
    if drafter is None or isinstance(drafter, str | Path):
        raise ValueError(
            f"{name}={tree!r} shapes a draft model's trees, but suffix matching proposes chains; set "
            "lookup=N instead, or give a draft model"
        )
    raise ValueError(
        f"{name}={tree!r} shapes a draft model's trees, but drafter {drafter.name!r} has a tree of its own; "
        "change drafter.tree instead"
    )


def _check_lookup(lookup: object, drafter: Drafter | str | Path | None) -> None:
    if names_heads(drafter):
        raise ValueError(
            f"lookup={lookup!r} is the number of tokens that drafter='lookup' proposes, but the heads in "
            f"{str(drafter)!r} propose here; leave lookup out, or use that name"
        )
    if drafter is not None and not isinstance(drafter, str | Path):
        raise ValueError(
            f"lookup={lookup!r} is the number of tokens that drafter='lookup' proposes, but drafter "
            f"{drafter.name!r} is an object with settings of its own; leave lookup out, or use that name"
        )

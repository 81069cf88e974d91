"""The drafter that ``load`` is asked for by a name, a folder or an object, and the options that it takes.

Importing this module does not import torch, so that wrong options are refused at once.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triforce_tree.drafters.registry import ASSISTANTS, FILES, format_of, trained_drafter
from triforce_tree.loading.gguf_header import is_gguf
from triforce_tree.loading.model_folder import downloaded, settings_of
from triforce_tree.trees.shapes import grown_alone, other_shapes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from triforce_tree.drafters.base import Drafter

DRAFTERS = ("model", "lookup", "mtp")


def names_trained(drafter: "Drafter | str | Path | None") -> bool:
    """Returns whether this names a folder or a hub id, and is neither a drafter's name nor an object."""
    return isinstance(drafter, Path) or (isinstance(drafter, str) and drafter not in DRAFTERS)


def trained_folder(source: str | Path) -> Path:
    """Returns the folder of a trained drafter. A hub id is downloaded.

    Raises:
        ValueError: ``source`` is neither a folder nor a hub id.
        FileNotFoundError: the folder holds no trained drafter.
    """
    folder = Path(source)
    if not folder.is_dir():
        is_id = str(source).count("/") == 1 and not str(source).startswith((".", "/", "~"))
        if isinstance(source, Path) or not is_id:
            near = get_close_matches(str(source), DRAFTERS, 1, 0.7)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(
                f"drafter={str(source)!r} is not known{hint}; use {', '.join(DRAFTERS)} or an object of your "
                "own, or the folder or hub id of a trained drafter"
            )
        folder = downloaded(source, FILES)
    format_of(folder)
    return folder


def own_drafter(
    drafter: "Drafter | str | Path | None",
    draft: "PreTrainedModel | str | Path | None",
    options: Mapping[str, Any],
) -> "Drafter | None":
    """Returns the user's drafter object, or the trained drafter in a folder; None if neither was given.

    MTP layers (``drafter="mtp"``) are made when the target is loaded, see ``loading/mtp_checkpoint.py``.

    Args:
        options: the options that the user gave.

    Raises:
        ValueError: the name is unknown, two drafters were given, the object is not a drafter, or the trained
            drafter cannot be used.
        OSError: files of the drafter are missing.
    """
    if drafter is None or drafter == "model":
        return None
    if draft is not None:
        named = str(drafter) if isinstance(drafter, Path) else drafter
        raise ValueError(f"drafter={named!r} uses no draft model, and one was given; leave one out")
    if isinstance(drafter, str | Path):
        if not names_trained(drafter):
            return None
        return trained_drafter(trained_folder(drafter), _of_trees(options))
    from triforce_tree.drafters.base import check_members  # imports torch

    check_members(drafter)
    return drafter


def mtp_drafter(target: "PreTrainedModel", options: Mapping[str, Any], named: bool) -> "Drafter | None":
    """Returns a drafter with the MTP layers in a target's checkpoint.

    Args:
        target: the loaded target.
        options: the options that the user gave.
        named: whether the user asked for it. Otherwise None is returned if there are no such layers or they
            cannot be used, and the reason is logged.

    Raises:
        OSError, ValueError: the user asked for it, and there are no such layers or they cannot be used.
    """
    import transformers
    from transformers import modeling_layers

    # Earlier releases have a class of this name that reads no checkpoint.
    if hasattr(getattr(modeling_layers, "MtpModel", None), "get_weight_conversions"):
        from triforce_tree.loading import mtp_checkpoint

        return mtp_checkpoint.mtp_drafter(target, _of_trees(options), named)
    if named:
        raise ValueError(
            f"drafter='mtp' runs the layers by MtpModel of transformers, which release "
            f"{transformers.__version__} does not have; update transformers, or use drafter='lookup'"
        )
    return None


def with_assistant(
    drafter: "Drafter | str | Path | None", draft: "PreTrainedModel | str | Path | None"
) -> "tuple[Drafter | str | Path | None, PreTrainedModel | str | Path | None]":
    """Returns the drafter and the draft that were given; an assistant given as the draft is the drafter."""
    if drafter in (None, "model") and isinstance(draft, str | Path) and not is_gguf(draft):
        try:
            kind = settings_of(draft)[1].get("model_type")
        except (OSError, ValueError):  # refused later, as any draft
            return drafter, draft
        if kind in ASSISTANTS:
            return Path(draft) if Path(draft).is_dir() else draft, None
    return drafter, draft


def check_drafter_options(
    drafter: "Drafter | str | Path | None", draft: object | None, options: Mapping[str, Any]
) -> None:
    """Checks that the drafter exists and takes the options that were given.

    Args:
        drafter: a name or an object; None means the draft model if there is one, and else suffix matching.
        draft: the draft model; None without one.
        options: the options that the user gave.

    Raises:
        ValueError: ``drafter="model"`` was given without a draft, or the drafter would ignore an option.
    """
    if draft is None and drafter == "model":
        raise ValueError("drafter='model' needs a draft; give one, or drafter='lookup'")
    if draft is not None or drafter == "mtp" or names_trained(drafter):
        return
    own = None if isinstance(drafter, str | Path | None) else drafter
    for name, value in options.items():
        if name == "tree" or (name == "other_trees" and (own is None or _of_trees({name: value})[name])):
            why = f"{name}={value!r} shapes a draft model's trees, but "
            if own is None:
                raise ValueError(
                    f"{why}suffix matching proposes chains; give a draft model, or drafter='mtp' if the "
                    "target has MTP layers, or leave it out"
                )
            raise ValueError(f"{why}drafter {own.name!r} has a tree of its own; change drafter.tree instead")


def _of_trees(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options without the chains of matched tokens in ``other_trees``, which are no trees of a
    drafter's own (``drafters/draft_level.py``).
    """
    if options.get("other_trees") is None:
        return dict(options)
    return {**options, "other_trees": grown_alone(other_shapes(options["other_trees"]))}

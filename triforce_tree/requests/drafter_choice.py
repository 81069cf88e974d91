"""The drafter that ``load`` was asked for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from triforce_tree.drafters.base import Drafter
from triforce_tree.drafters.heads.choice import heads_in
from triforce_tree.requests.drafter_options import DRAFTERS as DRAFTERS
from triforce_tree.requests.drafter_options import heads_folder, names_heads

Model = PreTrainedModel | str | Path
_CONTRACT = ("name", "tree", "deterministic", "capturable", "features", "bind", "start", "prepare", "propose")


def own_drafter(
    drafter: Drafter | str | Path | None, draft: Model | None, options: Mapping[str, Any]
) -> Drafter | None:
    """Returns the user's drafter object, or the drafter in a folder of heads; None if a name or nothing was
    given.

    Args:
        options: the options that the user gave. Heads use ``tree``, ``sinks`` and ``window``.

    Raises:
        ValueError: the name is unknown, two drafters were given, the object is not a drafter, or the heads
            cannot be used.
        OSError: files of the heads are missing.
    """
    if names_heads(drafter):
        if draft is not None:
            raise ValueError(
                f"drafter={str(drafter)!r} uses no draft model, and one was given; leave one out"
            )
        return heads_in(heads_folder(drafter), options)  # type: ignore[arg-type]
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

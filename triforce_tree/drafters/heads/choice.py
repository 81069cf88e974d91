"""Recognises the kind of trained heads in a folder from its files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triforce_tree.drafters.base import Drafter
from triforce_tree.drafters.heads import eagle, medusa
from triforce_tree.drafters.heads.files import weights_file
from triforce_tree.drafters.heads.names import EAGLE, MEDUSA, no_heads

NAMES = ("tree", "other_trees", "sinks", "window")


def heads_in(folder: Path, options: Mapping[str, Any]) -> Drafter:
    """Returns the drafter whose weights a folder holds.

    Args:
        options: settings; ``tree`` and ``other_trees`` are used, and by EAGLE-3 ``sinks`` and ``window`` too.

    Raises:
        OSError, ValueError: the folder holds no heads, or they cannot be used.
    """
    chosen = {name: options[name] for name in NAMES if options.get(name) is not None}
    if weights_file(folder, MEDUSA) is not None:
        return medusa.Medusa(folder, chosen.get("tree"), chosen.get("other_trees", ()))
    if weights_file(folder, EAGLE) is not None:
        return eagle.Eagle3(folder, **chosen)
    raise FileNotFoundError(no_heads(folder))

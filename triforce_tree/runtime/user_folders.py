"""Where files of a user's own lie."""

import os
from pathlib import Path


def user_cache(name: str) -> Path:
    """The place ``name`` in the user's cache folder; it need not exist.

    The folder is the one that ``TRIFORCE_TREE_CACHE`` names, or else ``~/.cache/triforce-tree``, or the same
    below ``XDG_CACHE_HOME``.

    Args:
        name: what is kept there: "profiles", "kernels", "stage_costs.json".

    Raises:
        RuntimeError: none of these is set, and the user has no home folder.
    """
    if own := os.environ.get("TRIFORCE_TREE_CACHE"):
        return Path(own) / name
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "triforce-tree" / name

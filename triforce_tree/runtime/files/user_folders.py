"""Finds the user's cache folder."""

import os
from pathlib import Path


def user_cache(name: str) -> Path:
    """Returns the path of ``name`` in the user's cache folder, which need not exist.

    The cache folder is ``TRIFORCE_TREE_CACHE`` if it is set, else ``triforce-tree`` in ``XDG_CACHE_HOME`` or
    ``~/.cache``.

    Args:
        name: a file or folder, such as "kernels", "gguf" or "stage_costs.json".

    Raises:
        RuntimeError: neither variable is set, and the user has no home folder.
    """
    if chosen := os.environ.get("TRIFORCE_TREE_CACHE"):
        return Path(chosen) / name
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "triforce-tree" / name

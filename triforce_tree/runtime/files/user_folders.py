"""Folders for files that belong to the user, not to the package."""

import os
from pathlib import Path


def user_cache(name: str) -> Path:
    """The path of ``name`` in the user's cache folder; it need not exist.

    The cache folder is ``TRIFORCE_TREE_CACHE`` if it is set, else ``triforce-tree`` in ``XDG_CACHE_HOME`` or
    ``~/.cache``.

    Args:
        name: a file or folder: "kernels", "gguf", "stage_costs.json".

    Raises:
        RuntimeError: neither variable is set, and the user has no home folder.
    """
    if own := os.environ.get("TRIFORCE_TREE_CACHE"):
        return Path(own) / name
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "triforce-tree" / name

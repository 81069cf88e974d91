"""Where files of a user's own lie."""

import os
from pathlib import Path


def user_cache(name: str) -> Path:
    """``~/.cache/triforce-tree/<name>``, or the same below ``XDG_CACHE_HOME``; it need not exist.

    Args:
        name: what is kept there: "profiles", "kernels".
    """
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "triforce-tree" / name

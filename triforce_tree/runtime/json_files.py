"""JSON files of unknown origin, read within limits of size and nesting."""

import json
from pathlib import Path
from typing import Any

MOST_BYTES = 64 << 20
MOST_DEPTH = 32


def read_json(path: Path) -> Any:
    """The contents of a JSON file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON in UTF-8, larger than ``MOST_BYTES``, or nested deeper than ``MOST_DEPTH``.
    """
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"it has {path.stat().st_size} bytes, at most {MOST_BYTES} are read")
    try:
        contents = json.loads(path.read_bytes())
    except RecursionError:
        contents, deep = None, True
    else:
        deep = _depth(contents) > MOST_DEPTH
    if deep:
        raise ValueError(f"it is nested deeper than {MOST_DEPTH} levels")
    return contents


def _depth(contents: Any) -> int:
    """Levels of nesting, at most ``MOST_DEPTH + 1``."""
    level, depth = [contents], -1
    while level and depth <= MOST_DEPTH:
        level = [
            child
            for value in level
            if isinstance(value, dict | list)
            for child in (value.values() if isinstance(value, dict) else value)
        ]
        depth += 1
    return depth

"""JSON files of unknown origin, read within limits of size and nesting."""

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triforce_tree.runtime.files.replacing import replace_file

MOST_BYTES = 64 << 20
MOST_DEPTH = 32
_LOG = logging.getLogger(__name__)


def read_json(path: Path) -> Any:
    """The contents of a JSON file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON in UTF-8, larger than ``MOST_BYTES``, or nested deeper than ``MOST_DEPTH``.
    """
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"it has {path.stat().st_size} bytes, at most {MOST_BYTES} are read")
    return parse_json(path.read_bytes())


def parse_json(data: bytes) -> Any:
    """What JSON in UTF-8 says.

    Raises:
        ValueError: it is no JSON in UTF-8, or nested deeper than ``MOST_DEPTH``.
    """
    try:
        contents = json.loads(data)
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


class JsonTable:
    """Entries by settings in a JSON file that processes share; it is replaced, never changed in place.

    A file that cannot be read or written is no error: it is named in one warning.

    Args:
        path: of the file, which need not exist; None for no file.
        most: entries; the oldest ones beyond are dropped.
        consequence: what follows where the file cannot be used, for the warning.
    """

    def __init__(self, path: Path | None, most: int, consequence: str) -> None:
        self.path, self._most, self._consequence = path, most, consequence
        self._warned = False

    @staticmethod
    def key(settings: Mapping[str, Any]) -> str:
        """Of an entry; equal for equal settings in any order."""
        return hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()[:24]

    def entries(self) -> dict[str, Any]:
        """What the file holds now, by key."""
        if self.path is None:
            return {}
        try:
            held = read_json(self.path)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            self._warn(f"cannot be read ({error})")
            return {}
        entries = held.get("entries") if isinstance(held, dict) else None
        if not isinstance(entries, dict):
            self._warn("is no table")
            return {}
        return entries

    def put(self, key: str, entry: Mapping[str, Any]) -> None:
        """Add an entry as the newest, or replace it.

        Other processes' entries stay, but for those that are written in the same moment.
        """
        path = self.path
        if path is None:
            return
        entries = self.entries()
        entries.pop(key, None)
        entries[key] = dict(entry)
        kept = dict(list(entries.items())[-self._most :])
        text = json.dumps({"entries": kept}, indent=1, ensure_ascii=False)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, text + "\n")
        except OSError as error:
            self._warn(f"cannot be written ({error})")

    def _warn(self, why: str) -> None:
        if not self._warned:
            _LOG.warning(
                "%s %s: %s; TRIFORCE_TREE_CACHE names another folder", self.path, why, self._consequence
            )
        self._warned = True

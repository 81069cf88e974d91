"""Reads JSON files of unknown origin within limits of size and nesting, and keeps tables in JSON files."""

import hashlib
import json
import logging
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from triforce_tree.runtime.files.writing import replace_file

MOST_BYTES = 64 << 20
MOST_DEPTH = 32
_LOG = logging.getLogger(__name__)


def read_json(path: Path) -> Any:
    """Returns the contents of a JSON file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is no JSON in UTF-8, larger than ``MOST_BYTES``, or nested deeper than
            ``MOST_DEPTH``.
    """
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"it has {path.stat().st_size} bytes, at most {MOST_BYTES} are read")
    return parse_json(path.read_bytes())


@lru_cache(maxsize=4)
def _unchanged_json(path: Path, *status: int) -> Any:
    """Returns the contents of a JSON file, which is read again when its ``status`` has changed."""
    return read_json(path)


def parse_json(data: bytes) -> Any:
    """Parses JSON in UTF-8.

    Raises:
        ValueError: the data are no JSON in UTF-8, or nested deeper than ``MOST_DEPTH``.
    """
    try:
        contents = json.loads(data)
    except RecursionError:
        contents, deep = None, True
    else:
        deep = json_depth(contents, MOST_DEPTH) > MOST_DEPTH
    if deep:
        raise ValueError(f"it is nested deeper than {MOST_DEPTH} levels")
    return contents


def json_depth(contents: Any, most: int) -> int:
    """Returns the number of nested levels, at most ``most + 1``."""
    level, depth = [contents], -1
    while level and depth <= most:
        level = [
            child
            for value in level
            if isinstance(value, dict | list)
            for child in (value.values() if isinstance(value, dict) else value)
        ]
        depth += 1
    return depth


class JsonTable:
    """A table of entries in a JSON file that several processes share. Each write replaces the whole file.

    A file that cannot be read or written causes one warning and no error.

    Args:
        path: the path of the file, which need not exist; None for a table without file.
        most: most entries; the oldest ones beyond this number are removed.
        consequence: the effect of an unusable file on the user, for the warning.
    """

    def __init__(self, path: Path | None, most: int, consequence: str) -> None:
        self.path, self._most, self._consequence = path, most, consequence
        self._warned = False

    @staticmethod
    def key(settings: Mapping[str, Any]) -> str:
        """Returns the key of an entry, which does not depend on the order of ``settings``."""
        return hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()[:24]

    def entries(self) -> dict[str, Any]:
        """Reads all entries from the file, by key."""
        if self.path is None:
            return {}
        try:
            status = self.path.stat()
            held = _unchanged_json(self.path, status.st_mtime_ns, status.st_size, status.st_ino)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            self._warn(f"cannot be read ({error})")
            return {}
        entries = held.get("entries") if isinstance(held, dict) else None
        if not isinstance(entries, dict):
            self._warn("is no table")
            return {}
        return dict(entries)

    def put(self, key: str, entry: Mapping[str, Any]) -> None:
        """Adds or replaces an entry, and makes it the newest.

        An entry that another process writes at the same moment may be lost.
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
                "%s %s: %s; set TRIFORCE_TREE_CACHE to another folder", self.path, why, self._consequence
            )
        self._warned = True

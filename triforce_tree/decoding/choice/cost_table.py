"""Keeps measured stage costs by settings in ``stage_costs.json``, in the user's cache folder."""

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from triforce_tree.policy.costs import StageCosts
from triforce_tree.policy.passes import STAGE_FIELDS, StageSeconds
from triforce_tree.runtime.files.json_files import JsonTable
from triforce_tree.runtime.files.writing import user_cache

MOST_ENTRIES = 1000
"""The most entries of the file; older ones are dropped."""


class CostTable:
    """A table of stage costs by settings, in a file that processes share.

    Args:
        path: of the file, which need not exist; None for a table in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._file = JsonTable(path, MOST_ENTRIES, "stage costs are measured again")
        # Costs that this process has written: the file may be missing, or not writable.
        self._written: dict[str, StageCosts] = {}

    def find(self, settings: Mapping[str, Any]) -> StageCosts | None:
        """Returns the costs measured under these settings; None if there are none."""
        key = JsonTable.key(settings)
        return _costs(self._file.entries().get(key)) or self._written.get(key)

    def add(self, settings: Mapping[str, Any], costs: StageCosts) -> StageCosts:
        """Adds costs, unless another process has added its own; returns those in the table."""
        return self.find(settings) or self.replace(settings, costs)

    def replace(self, settings: Mapping[str, Any], costs: StageCosts) -> StageCosts:
        """Writes costs in the place of those that the table holds under these settings; returns them."""
        columns = {name: [getattr(seconds, name) for seconds in costs.seconds] for name in STAGE_FIELDS}
        # JSON has no infinity, the seconds of a stage that does not exist.
        finite = {name: [None if value == math.inf else value for value in c] for name, c in columns.items()}
        key = JsonTable.key(settings)
        self._file.put(key, {"lengths": costs.lengths, "seconds": finite, "settings": dict(settings)})
        self._written[key] = costs
        return costs


def _costs(entry: Any) -> StageCosts | None:
    """Returns the costs of an entry of the file; None if it is damaged."""
    try:
        columns = [[math.inf if v is None else float(v) for v in entry["seconds"][n]] for n in STAGE_FIELDS]
        lengths = tuple(int(length) for length in entry["lengths"])
        return StageCosts(lengths, tuple(StageSeconds(*row) for row in zip(*columns, strict=True)))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def user_table() -> CostTable:
    """Returns the table in the user's cache folder, or one in memory without a home folder."""
    try:
        return _table_at(user_cache("stage_costs.json"))
    except RuntimeError:
        return _table_at(None)


@cache
def _table_at(path: Path | None) -> CostTable:
    return CostTable(path)

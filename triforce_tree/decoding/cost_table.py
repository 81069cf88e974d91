"""The table of stage costs on disk: ``stage_costs.json`` in the user's cache folder.

Each set of settings is measured once. With a given seed draft lengths follow from the table alone, so that
equal seeds give equal tokens on one machine as long as the file exists. A file that cannot be read or written
is no error: each process then measures the costs itself.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.stage_costs import StageCosts, measure, settings_of
from triforce_tree.runtime import distributed
from triforce_tree.runtime.json_files import read_json
from triforce_tree.runtime.user_folders import user_cache
from triforce_tree.verify.probs import DeviceProbs
from triforce_tree.verify.sampling import ProbsFromLogits

VERSION = 1
MOST_ENTRIES = 1000
"""Of the file; the oldest ones beyond are dropped."""
_LOG = logging.getLogger(__name__)


class CostTable:
    """Costs by settings, in this process and in a file that processes share.

    Args:
        path: of the file, which need not exist; None for a table in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._known: dict[str, StageCosts] = {}
        self._warned = False

    def find(self, settings: Mapping[str, Any]) -> StageCosts | None:
        """The costs measured under these settings; None if there are none."""
        key = _key(settings)
        if key not in self._known and (held := _costs(self._entries().get(key))) is not None:
            self._known[key] = held
        return self._known.get(key)

    def add(self, settings: Mapping[str, Any], costs: StageCosts) -> StageCosts:
        """Add ``costs``, unless another process has written its own in the meantime.

        Returns:
            what the table now holds.
        """
        key, entries = _key(settings), self._entries()
        held = _costs(entries.get(key))
        if held is None:
            held = costs
            entries.pop(key, None)
            entries[key] = {
                "lengths": costs.lengths,
                "draft_round": costs.draft_round,
                "verification": costs.verification,
                "plain": costs.plain,
                "settings": dict(settings),
            }
            self._write(dict(list(entries.items())[-MOST_ENTRIES:]))
        self._known[key] = held
        return held

    def _entries(self) -> dict[str, Any]:
        if self.path is None:
            return {}
        try:
            held = read_json(self.path)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            self._warn(f"cannot be read ({error})")
            return {}
        if not isinstance(held, dict) or held.get("version") != VERSION:
            self._warn(f"is no table of version {VERSION}")
            return {}
        entries = held.get("entries")
        return entries if isinstance(entries, dict) else {}

    def _write(self, entries: dict[str, Any]) -> None:
        """Replace the file atomically, so that no reader finds half of it."""
        path = self.path
        if path is None:
            return
        text = json.dumps({"version": VERSION, "entries": entries}, indent=1, ensure_ascii=False)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(text + "\n")
                Path(name).replace(path)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            self._warn(f"cannot be written ({error})")

    def _warn(self, why: str) -> None:
        if not self._warned:
            _LOG.warning(
                "%s %s: stage costs are measured by this process; TRIFORCE_TREE_CACHE names another folder",
                self.path,
                why,
            )
        self._warned = True


def user_table() -> CostTable:
    """The table in the user's cache folder; one object per path."""
    try:
        return _table_at(user_cache("stage_costs.json"))
    except RuntimeError:  # no home folder
        return _table_at(None)


def stage_costs(
    program: DecodingProgram, to_probs: ProbsFromLogits, table: CostTable | None = None
) -> StageCosts:
    """The costs of a program's prepared stages, from the table or measured now; rank 0's on all ranks.

    Where they are measured, sequences must be fed or rewound afterwards.

    Args:
        program: a ``DecodingProgram`` after ``prepare(to_probs)``.
        to_probs: logits to probabilities.
        table: by default the user's.
    """
    table = table or user_table()
    transferred: Callable[[int, bool], int] | None = None
    if program.offloaded is not None:
        transferred = program.transferred_bytes
    settings = settings_of(program, DeviceProbs.kind(to_probs), transferred)
    found = distributed.broadcast_object(table.find(settings))
    if found is None and not to_probs.context_free:
        # Processors that depend on the text must not see a made-up one: measured without them.
        found = stage_costs(program, _prepared(program, ProbsFromLogits(greedy=to_probs.greedy)), table)
        program.prepare(to_probs)
    if found is None:
        measured = measure(program, program.max_seq_len - 1, program.config.retrieval.refresh, transferred)
        found = distributed.broadcast_object(
            table.add(settings, measured) if distributed.is_first_rank() else measured
        )
    return found


def _prepared(program: DecodingProgram, to_probs: ProbsFromLogits) -> ProbsFromLogits:
    program.prepare(to_probs)
    return to_probs


@cache
def _table_at(path: Path | None) -> CostTable:
    return CostTable(path)


def _key(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()[:24]


def _costs(entry: Any) -> StageCosts | None:
    """The costs of an entry of the file; None if it is damaged."""
    if not isinstance(entry, dict):
        return None
    try:
        return StageCosts(
            tuple(int(length) for length in entry["lengths"]),
            float(entry["draft_round"]),
            tuple(float(seconds) for seconds in entry["verification"]),
            tuple(float(seconds) for seconds in entry["plain"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None

"""The table of stage costs on disk: ``stage_costs.json`` in the user's cache folder.

Each set of settings is measured once, and corrected where decoding shows that it is far off (``timings.py``).
With a given seed draft lengths follow from the table alone, so that equal seeds give equal tokens on one
machine as long as its entries last. A file that cannot be read or written is no error: each process then
measures the costs itself.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from triforce_tree.decoding.choice.passes import OF_SHAPE, STAGE_FIELDS, StageSeconds
from triforce_tree.decoding.choice.predicted_costs import guessed, predicted
from triforce_tree.decoding.choice.stage_costs import UNLIMITED, Allowance, StageCosts, measure, settings_of
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.stage_set import chain_nodes
from triforce_tree.runtime import distributed
from triforce_tree.runtime.files.json_files import JsonTable
from triforce_tree.runtime.files.user_folders import user_cache
from triforce_tree.verify.probs import DeviceProbs
from triforce_tree.verify.sampling import ProbsFromLogits

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
        self._file = JsonTable(path, MOST_ENTRIES, "stage costs are measured by this process")
        self._known: dict[str, StageCosts] = {}

    def find(self, settings: Mapping[str, Any]) -> StageCosts | None:
        """The costs measured under these settings; None if there are none."""
        key = JsonTable.key(settings)
        if key not in self._known and (held := _costs(self._file.entries().get(key))) is not None:
            self._keep(key, held)
        return self._known.get(key)

    def _keep(self, key: str, costs: StageCosts) -> None:
        """Keep as many in this process as in the file, the newest ones."""
        self._known.pop(key, None)
        self._known[key] = costs
        if len(self._known) > MOST_ENTRIES:
            del self._known[next(iter(self._known))]

    def add(self, settings: Mapping[str, Any], costs: StageCosts) -> StageCosts:
        """Add ``costs``, unless another process has written its own in the meantime.

        Returns:
            what the table now holds.
        """
        held = _costs(self._file.entries().get(JsonTable.key(settings)))
        if held is None:
            self.replace(settings, costs)
            return costs
        self._keep(JsonTable.key(settings), held)
        return held

    def replace(self, settings: Mapping[str, Any], costs: StageCosts) -> None:
        """Write ``costs`` in the place of what the table holds under these settings."""
        key = JsonTable.key(settings)
        entry = {
            "lengths": costs.lengths,
            "seconds": {name: _column(costs, name) for name in STAGE_FIELDS},
            "settings": dict(settings),
        }
        self._file.put(key, entry)
        self._keep(key, costs)


def user_table() -> CostTable:
    """The table in the user's cache folder; one object per path."""
    try:
        return _table_at(user_cache("stage_costs.json"))
    except RuntimeError:  # no home folder
        return _table_at(None)


def stage_costs(
    program: DecodingProgram,
    to_probs: ProbsFromLogits,
    table: CostTable | None = None,
    allowance: Allowance = UNLIMITED,
) -> StageCosts:
    """The costs of a program's prepared stages, from the table or measured now; rank 0's on all ranks.

    Where they are measured, sequences must be fed or rewound afterwards. Where the allowance is too short for
    that, they are guessed, without an entry in the table: the next request guesses the same ones.

    Args:
        program: a ``DecodingProgram`` after ``prepare(to_probs)``.
        to_probs: logits to probabilities.
        table: by default the user's.
        allowance: what measuring may cost.
    """
    table = table or user_table()
    transferred = _transferred(program)
    settings = settings_of(program, DeviceProbs.kind(to_probs), transferred)
    found = distributed.broadcast_object(table.find(settings))
    longest = program.max_seq_len - 1
    if found is None and transferred is None and not allowance.suffices:
        return distributed.broadcast_object(guessed(program, longest))
    if found is None and not to_probs.context_free:
        # Processors that depend on the text must not see a made-up one: measured without them.
        without = ProbsFromLogits(greedy=to_probs.greedy)
        found = stage_costs(program, _prepared(program, without), table, allowance)
        program.prepare(to_probs)
    if found is None:
        _LOG.info("measuring what each stage costs with these settings, once: %s", table.path)
        start = time.perf_counter()
        measured = measure(program, longest, program.config.retrieval.refresh, transferred, allowance)
        program.capture_seconds += time.perf_counter() - start
        # Those of earlier requests are relative to guessed costs.
        _forget_factors(program)
        found = distributed.broadcast_object(
            table.add(settings, measured) if distributed.is_first_rank() else measured
        )
    return found


def correct(
    program: DecodingProgram,
    to_probs: ProbsFromLogits,
    first: StageCosts,
    others: Sequence[StageCosts | None],
    table: CostTable | None = None,
) -> bool:
    """After a request: change what decoding has shown to be wrong in the table (``timings.py``).

    Args:
        first, others: the costs that the request used.
        program, to_probs, table: as for :func:`stage_costs`.

    Returns:
        whether anything was changed.
    """
    factors = program.selected.timings.factors(1 + len(others))
    # Processors that depend on the text take time that the table does not hold.
    if not factors or not to_probs.context_free:
        return False
    ran = set(filter(program.selected.timings.ran, factors))
    _forget_factors(program)
    if not distributed.is_first_rank():
        return True
    table = table or user_table()
    settings = settings_of(program, DeviceProbs.kind(to_probs), _transferred(program))
    common = {name: factor for name, factor in factors.items() if "/" not in name}
    if common:
        table.replace(settings, first.scaled(common))
    shared = {name: factor for name, factor in common.items() if name not in OF_SHAPE}
    for shape, costs in enumerate(others, 1):
        of_shape = settings | {"shape": shape}
        own = {name: factors[f"{name}/{shape}"] for name in OF_SHAPE if f"{name}/{shape}" in factors}
        # One that was predicted is predicted anew, unless its own stages ran.
        known = ((own or shared) and table.find(of_shape) is not None) or any(
            f"{n}/{shape}" in ran for n in own
        )
        if costs is not None and known:
            table.replace(of_shape, costs.scaled(shared | own))
    _LOG.info("corrected stage costs by the times of decoding: %s", factors)
    return True


def _forget_factors(program: DecodingProgram) -> None:
    """Forget what requests measured beside the costs that they had: others take their place."""
    program.selected.timings.clear()
    program.learnt.update({key: replace(own, cost_factors={}) for key, own in program.learnt.items()})


def _transferred(program: DecodingProgram) -> Callable[[int, bool], int] | None:
    return program.transferred_bytes if program.cache.backend.transfers else None


def _prepared(program: DecodingProgram, to_probs: ProbsFromLogits) -> ProbsFromLogits:
    program.prepare(to_probs)
    return to_probs


def other_costs(
    program: DecodingProgram, to_probs: ProbsFromLogits, first: StageCosts, table: CostTable | None = None
) -> list[StageCosts]:
    """The costs with trees of each shape but the first: those that decoding has corrected, or predicted ones.

    A request without these trees is not to wait for their stages.

    Args:
        first: with trees of the first shape.
        program, to_probs, table: as for :func:`stage_costs`.
    """
    table, found = table or user_table(), list[StageCosts]()
    common = settings_of(program, DeviceProbs.kind(to_probs), None) if len(program.shapes) > 1 else {}
    known = program.shapes[0]
    for number, shape in enumerate(program.shapes[1:], 1):
        costs = distributed.broadcast_object(table.find(common | {"shape": number}))
        found.append(costs or predicted(first, known, shape, chain_nodes(program), program.tail_tree))
    return found


@cache
def _table_at(path: Path | None) -> CostTable:
    return CostTable(path)


def _column(costs: StageCosts, name: str) -> list[float | None]:
    """A stage's seconds at each length; None where the program has no such stage."""
    values = [getattr(seconds, name) for seconds in costs.seconds]
    return [None if value == math.inf else value for value in values]


def _costs(entry: Any) -> StageCosts | None:
    """The costs of an entry of the file; None if it is damaged."""
    if not isinstance(entry, dict):
        return None
    try:
        columns = {name: list(entry["seconds"][name]) for name in STAGE_FIELDS}
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        seconds = (
            StageSeconds(**{name: float(value) for name, value in row.items() if value is not None})
            for row in rows
        )
        return StageCosts(tuple(int(length) for length in entry["lengths"]), tuple(seconds))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None

"""Measures the workloads, attention alone or decoding, and makes the rows of the results file."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch

from scripts.benchmarks.attention.problems import Ceilings, measure_ceilings
from scripts.benchmarks.workloads import attention, decoding
from scripts.benchmarks.workloads.shapes import Workload
from scripts.benchmarks.workloads.storage import Problem
from triforce_tree.bench.results import Record, Records, Series
from triforce_tree.branching.pages import page_slots
from triforce_tree.engine import Engine
from triforce_tree.kernels.attention.plan import Heads

ATTENTION, DECODING = "attention", "decoding"
PARTS = (ATTENTION, DECODING)


@dataclass(frozen=True)
class Run:
    """Lists what is measured.

    Attributes:
        engine: decodes; its target's heads and dtype are those of attention alone.
        workloads: in the order of the measurements.
        tokens: of a text that prompts and branches are cut from.
        new: tokens of each text of a workload that is decoded.
        part: one of ``PARTS``.
    """

    engine: Engine
    workloads: Sequence[Workload]
    tokens: Sequence[int]
    new: int
    part: str

    @property
    def heads(self) -> Heads:
        return self.engine.target.heads

    def keys(self) -> list[Record]:
        """Returns the keys of all records that the run measures."""
        return [
            {"kind": self.part, "workload": workload.name, "way": way}
            for workload in self.workloads
            for way in (attention.WAYS if self.part == ATTENTION else decoding.WAYS)
            if self.part == ATTENTION or workload.decoded
        ]


def measure(run: Run, series: Series) -> None:
    """Measures what the series lacks."""
    target = run.engine.target
    by_name = {workload.name: workload for workload in run.workloads}

    @lru_cache(1)  # The positions of a problem's paths take memory.
    def problem(name: str) -> Problem:
        return Problem(by_name[name], run.heads, page_slots(target), target.device, target.dtype)

    @cache
    def ceilings() -> Ceilings:
        return measure_ceilings(target.device, target.dtype)

    def one(key: Record) -> Record:
        workload, way = by_name[key["workload"]], key["way"]
        sizes = {"texts": workload.queries, "stored": workload.stored, "seen": workload.read_by_sequences}
        if key["kind"] == DECODING:
            return sizes | decoding.measure(run.engine, workload, way, run.tokens, run.new, series.stop)
        with torch.inference_mode():
            found = attention.measure(problem(workload.name), way, ceilings())
        return sizes | {"layers": len(target.kv_shapes), **found}

    series.fill(run.keys(), one)


def of_attention(records: Records) -> list[Record]:
    """Returns a row for each workload and way, compared with attention by sequences."""
    found = _of_kind(records, ATTENTION)
    us = {(r["workload"], r["way"]): r.get("us") for r in found}
    rows = []
    for r in found:
        own, other = r.get("us"), us.get((r["workload"], attention.BY_SEQUENCES))
        rows.append({
            **{name: r[name] for name in ("workload", "texts", "way")}, "us": own,
            "kv_megabytes": r["kv_bytes"] / 1e6, "to_sequences": other / own if own and other else None,
            "of_roof": r["roof_us"] / own if own else None, "reason": r.get("reason", ""),
        })  # fmt: skip
    return rows


def of_decoding(records: Records) -> list[Record]:
    """Returns a row for each workload and way."""
    found = _of_kind(records, DECODING)
    speed = {(r["workload"], r["way"]): _speed(r) for r in found}
    one = next((_speed(r) for r in found if r["texts"] == 1 and r["way"] == decoding.TREE), None)
    rows = []
    for r in found:
        own, batched = _speed(r), speed.get((r["workload"], decoding.BATCH))
        long = r["workload"].startswith("long/") and r["way"] == decoding.TREE
        rows.append({
            **{name: r[name] for name in ("workload", "texts", "way")}, "tokens_per_second": own,
            "ms_per_token": 1e3 * r["texts"] / own if own else None,
            "to_batch": own / batched if own and batched else None,
            "to_one_branch": own / one if own and one and long else None,
            "kv_gib": r["kv_bytes"] / 2**30 if "kv_bytes" in r else None, "reason": r.get("reason", ""),
        })  # fmt: skip
    return rows


def _speed(record: Record) -> float | None:
    return record["new_tokens"] / record["seconds"] if "seconds" in record else None


def _of_kind(records: Records, kind: str) -> list[Record]:
    return [r for r in records.all if r.get("kind") == kind]

"""All measurements of ``bench workloads``: attention alone, then decoding."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from scripts.benchmarks.attention.problems import Ceilings, measure_ceilings
from scripts.benchmarks.workloads import attention, decoding
from scripts.benchmarks.workloads.shapes import Workload
from scripts.benchmarks.workloads.storage import Problem
from triforce_tree.bench.results import Record, Series
from triforce_tree.engine import Engine
from triforce_tree.kernels.attention.plan import Heads

ATTENTION, DECODING = "attention", "decoding"
PARTS = (ATTENTION, DECODING)
_PAGES = {"cuda": 64, "cpu": 16}


@dataclass(frozen=True)
class Run:
    """What is measured.

    Attributes:
        engine: decodes; its target's heads and dtype are those of attention alone.
        workloads: in the order of the measurements.
        tokens: of a text that prompts and branches are cut from.
        new: tokens of each text of a workload that is decoded.
        parts: of ``PARTS``.
    """

    engine: Engine
    workloads: Sequence[Workload]
    tokens: Sequence[int]
    new: int
    parts: Sequence[str] = PARTS

    @property
    def heads(self) -> Heads:
        return self.engine.target.heads

    def keys(self) -> list[Record]:
        """Of all records."""
        return [
            {"kind": part, "workload": workload.name, "way": way}
            for part in self.parts
            for workload in self.workloads
            for way in (attention.WAYS if part == ATTENTION else decoding.WAYS)
            if part == ATTENTION or workload.decoded
        ]


def measure(run: Run, series: Series) -> None:
    """Measure what the series lacks."""
    target = run.engine.target
    by_name = {workload.name: workload for workload in run.workloads}
    held: dict[str, Any] = {}

    def problem(workload: Workload) -> Problem:
        # One at a time: the positions of its paths take memory.
        if held.get("workload") is not workload:
            page = _PAGES["cuda" if target.device.type == "cuda" else "cpu"]
            made = Problem(workload, run.heads, page, target.device, target.dtype)
            held.update(workload=workload, problem=made)
        found: Problem = held["problem"]
        return found

    def ceilings() -> Ceilings:
        if "ceilings" not in held:
            held["ceilings"] = measure_ceilings(target.device, target.dtype)
        found: Ceilings = held["ceilings"]
        return found

    def one(key: Record) -> Record:
        workload = by_name[key["workload"]]
        sizes = {"texts": workload.queries, "stored": workload.stored, "seen": workload.read_by_sequences}
        if key["kind"] == DECODING:
            return sizes | decoding.measure(
                run.engine, workload, key["way"], run.tokens, run.new, series.stop
            )
        with torch.inference_mode():
            found = attention.measure(problem(workload), key["way"], ceilings())
        return sizes | {"layers": len(target.kv_shapes), **found}

    series.fill(run.keys(), one)

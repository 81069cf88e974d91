"""Speed of the inflated pair on several cards, whose cache in host memory each card streams its part of.

    torchrun --nproc-per-node 2 -m scripts.benchmarks parallel --out docs/results   # four minutes
    torchrun --nproc-per-node 2 -m scripts.benchmarks parallel --tiny               # the same code, on a CPU

What ``offload`` measures on one card, by the same session, written into one file of its own. All ranks run
the same steps; rank 0 decides, prints a JSON line a step, and writes. The cap holds for each card.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from scripts.benchmarks.common.command import TINY_SHAPES, device_of, parser, results_folder
from scripts.benchmarks.common.deadline import Deadline
from scripts.benchmarks.common.results import CELL, OURS, Record, ResultsFile, having, rounded, settings_of
from scripts.benchmarks.offload.rows import PLAIN
from scripts.benchmarks.offload.rows import rows as rows_of_one
from scripts.benchmarks.offload.run import PARTS, headline
from scripts.benchmarks.offload.session import Plan, Session
from triforce_tree.planning.memory_plan import MemoryPlan
from triforce_tree.runtime import distributed

FILE = "offload_parallel_h200.json"
PLAN = replace(PARTS["7b"].full, prompts=1)
_START = time.perf_counter()


def say(text: str) -> None:
    if distributed.is_first_rank():
        print(json.dumps({"at": round(time.perf_counter() - _START, 1), "what": text}), flush=True)


class SharedDeadline(Deadline):
    """Rank 0's clock alone."""

    def steps(self, items: Sequence[Any], keep: float = 0.0) -> Iterator[Any]:
        own = super().steps(items, keep)
        while (item := distributed.broadcast_object(next(own, None))) is not None:
            yield item


class SharedFile(ResultsFile):
    """Measurements with every rank's own share of the bus beside rank 0's."""

    def add(self, sample: Record) -> None:
        super().add(sample | {"pcie_gbps_by_rank": distributed.all_gather_object(sample["pcie_gbps"])})


class SharedSession(Session):
    """A session whose ranks have the same plan and write the same tokens."""

    def __init__(self, plan: Plan, file: ResultsFile, device: torch.device, seed: int) -> None:
        # The links are measured at the same time: they may share a switch.
        distributed.all_reduce_min([0.0])
        super().__init__(plan, file, device, seed)
        file.mine["bus_gbps_by_rank"] = distributed.all_gather_object(self.bus["in"])
        self.bus = dict(zip(self.bus, distributed.all_reduce_min(list(self.bus.values())), strict=True))
        [self.read] = distributed.all_reduce_min([self.read])
        file.mine |= {"bus_gbps": self.bus, "read_gbps": self.read / 1e9}

    def say(self, text: str) -> None:
        say(text)

    def smaller(self, memory: MemoryPlan, why: str) -> MemoryPlan:
        raise torch.OutOfMemoryError(f"one of several cards ran out of memory, so all end: {why}")

    def ours(self, base: Record, tokens: list[int], memory: MemoryPlan) -> list[int]:
        text = super().ours(base, tokens, memory)
        distributed.check_alike("tokens", text)
        say(f"all ranks wrote the same {len(text)} tokens")
        return text


def rows(part: str, header: Record, samples: list[Record]) -> list[Record]:
    """Those of one card, with what each rank's link did."""
    found = []
    for row in rows_of_one(part, header, samples):
        mine = having(samples, method=OURS, **{k: row[k] for k in CELL})
        more = {"gpus": header["settings"]["gpus"], "bus_gbps_by_rank": header["bus_gbps_by_rank"]}
        more["pcie_gbps_by_rank"] = _by_rank(mine)
        more["baseline_pcie_gbps_by_rank"] = _by_rank(having(samples, method=PLAIN))
        found.append(row | more)
    return found


def _by_rank(samples: Sequence[Record]) -> list[float | None]:
    rates = zip(*(s["pcie_gbps_by_rank"] for s in samples), strict=True)
    return [rounded(statistics.median(rank)) for rank in rates]


def place_of(out: Path) -> Path:
    """The results file; of other ranks a copy, so that all know what is measured and one writes."""
    copy = out if distributed.is_first_rank() else Path(tempfile.mkdtemp())
    held = {path.name: path.read_text(encoding="utf-8") for path in out.glob(f"{Path(FILE).stem}.*")}
    for name, content in distributed.broadcast_object(held).items():
        if not distributed.is_first_rank():
            (copy / name).write_text(content, encoding="utf-8")
    return copy / FILE


def main(words: Sequence[str] | None = None) -> None:
    made = parser("benchmarks parallel", __doc__)
    add = made.add_argument
    add("--seconds", type=float, default=220, help="begin no prompt that would not end within this time")
    add("--cap", type=float, default=24.0, help="GiB of each card's memory")
    add("--prompts", type=int, default=PLAN.prompts, help="different prompts")
    add("--new-tokens", type=int, default=PLAN.new_tokens, help="tokens of each text")
    add("--fresh", action="store_true", help="drop what was measured before with as many cards")
    args = made.parse_args(words)
    device = device_of(made, args.tiny)
    deadline = SharedDeadline(args.seconds)
    group = distributed.join(device.type)
    device = group.device if group is not None else device
    gpus = group.size if group is not None else 1
    plan = replace(PLAN, caps=(args.cap,), prompts=args.prompts, new_tokens=args.new_tokens)
    if args.tiny:
        # Its heads can be shared by two and by four.
        plan = replace(plan.tiny(), shape=TINY_SHAPES["llama-2-13b"])
    settings = settings_of({**plan.as_dict(), "gpus": gpus}, args.seed, args.tiny)
    path = place_of(results_folder(args.out, args.tiny))
    file = SharedFile(path, f"7b on {gpus}", settings, rows, ["engine"], args.fresh)
    session = SharedSession(plan, file, device, args.seed)
    headline(session, deadline)
    file.write()
    session.bench.close()
    for row in file.rows if distributed.is_first_rank() else []:
        print(json.dumps({k: v for k, v in row.items() if k != "memory_plan"}))
    del session
    distributed.leave()

"""Speed of the inflated pair on several cards, whose cache in host memory each card streams its part of.

    torchrun --nproc-per-node 2 -m scripts.benchmarks parallel --out docs/results   # four minutes
    torchrun --nproc-per-node 2 -m scripts.benchmarks parallel --tiny               # the same code, on a CPU

What ``offload`` measures on one card, by the same session, written into one file of its own. All ranks run
the same steps; rank 0 decides, prints a JSON line a step, and writes. The cap holds for each card.
"""

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from scripts.benchmarks.common.command import TINY_SHAPES, device_of, parser, results_folder
from scripts.benchmarks.common.engine import Prompts, Run
from scripts.benchmarks.common.results import STREAMED, Record, ResultsFile, settings_of
from scripts.benchmarks.common.session import Deadline, measure_part, print_rows
from scripts.benchmarks.offload.run import PARTS, OffloadSession
from scripts.benchmarks.offload.run import rows as rows_of_one
from scripts.benchmarks.offload.tables import PARALLEL
from triforce_tree.runtime import distributed

_START = time.perf_counter()


class SharedDeadline(Deadline):
    """Rank 0's clock alone."""

    def steps(self, items: Sequence[Any]) -> Iterator[Any]:
        own = super().steps(items)
        while (item := distributed.broadcast_object(next(own, None))) is not None:
            yield item


class SharedFile(ResultsFile):
    """Measurements with every rank's own share of the bus beside rank 0's."""

    def add(self, sample: Record) -> None:
        super().add(sample | {"pcie_gbps_by_rank": distributed.all_gather_object(sample["pcie_gbps"])})


class SharedSession(OffloadSession):
    """A session whose ranks have the same plan and write the same tokens."""

    def machine(self) -> Record:
        # The links are measured at the same time: they may share a switch.
        distributed.all_reduce_min([0.0])
        found = super().machine()
        by_rank = distributed.all_gather_object(found["bus_gbps"]["in"])
        bus = distributed.all_reduce_min(list(found["bus_gbps"].values()))
        [read] = distributed.all_reduce_min([found["read_gbps"]])
        named = dict(zip(found["bus_gbps"], bus, strict=True))
        return {"bus_gbps": named, "read_gbps": read, "bus_gbps_by_rank": by_rank}

    def say(self, text: str) -> None:
        if distributed.is_first_rank():
            print(json.dumps({"at": round(time.perf_counter() - _START, 1), "what": text}), flush=True)

    def smaller(self, cap: float, why: str) -> None:
        raise torch.OutOfMemoryError(f"one of several cards ran out of memory, so all end: {why}")

    def ours(self, key: Record, prompts: Prompts, sources: list[str]) -> Run:
        run = super().ours(key, prompts, sources)
        distributed.check_equal("tokens", run.texts)
        self.say(f"all ranks wrote the same {len(run.texts[0])} tokens")
        return run


def rows(part: str, header: Record, samples: list[Record]) -> list[Record]:
    """Those of one card, with what each rank's link did."""
    more = {"gpus": header["settings"]["gpus"], "bus_gbps_by_rank": header["bus_gbps_by_rank"]}
    found = []
    for row in rows_of_one(part, header, samples):
        streamed = row["baselines"].get(STREAMED, {}).get("pcie_gbps_by_rank")
        found.append(row | more | {"baseline_pcie_gbps_by_rank": streamed})
    return found


def path_of(out: Path) -> Path:
    """The results file; of other ranks a copy, so that all know what is measured and one writes."""
    copy = out if distributed.is_first_rank() else Path(tempfile.mkdtemp())
    held = {path.name: path.read_text(encoding="utf-8") for path in out.glob(f"{Path(PARALLEL).stem}.*")}
    for name, content in distributed.broadcast_object(held).items():
        if not distributed.is_first_rank():
            (copy / name).write_text(content, encoding="utf-8")
    return copy / PARALLEL


def main(words: Sequence[str] | None = None) -> None:
    full = replace(PARTS["7b"], prompts=1)
    made = parser("benchmarks parallel", __doc__)
    add = made.add_argument
    add("--seconds", type=float, default=220, help="begin no prompt that would not end within this time")
    add("--cap", type=float, default=24.0, help="GiB of each card's memory")
    add("--prompts", type=int, default=full.prompts, help="different prompts")
    add("--new-tokens", type=int, default=full.new_tokens, help="tokens of each text")
    add("--fresh", action="store_true", help="drop what was measured before with as many cards")
    args = made.parse_args(words)
    device = device_of(made, args.tiny)
    deadline = SharedDeadline(args.seconds)
    group = distributed.join(device.type)
    device = group.device if group is not None else device
    gpus = group.size if group is not None else 1
    plan = replace(full, caps=(args.cap,), prompts=args.prompts, new_tokens=args.new_tokens)
    if args.tiny:
        # Its heads can be shared by two and by four.
        plan = replace(plan.tiny(), shape=TINY_SHAPES["llama-2-13b"])
    settings = settings_of({**plan.as_dict(), "gpus": gpus}, args.seed, args.tiny)
    path = path_of(results_folder(args.out, args.tiny))
    file = SharedFile(path, f"7b on {gpus}", settings, rows, ["engine"], args.fresh)
    measure_part(plan, file, deadline, lambda: SharedSession(plan, file, device, args.seed))
    if distributed.is_first_rank():
        print_rows(file)
    distributed.leave()

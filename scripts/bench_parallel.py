"""Speed of the inflated pair on several cards, whose cache in host memory each card streams its part of.

    torchrun --nproc-per-node 2 scripts/bench_parallel.py --out docs/results   # four minutes; again: goes on
    torchrun --nproc-per-node 2 scripts/bench_parallel.py --tiny               # the same code, on a CPU

What bench_offload.py measures on one card, by the same session, written into one file of its own. All ranks
run the same steps; rank 0 decides, prints a JSON line a step, and writes. The cap holds for each card.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import offload_results
import torch
from bench_command import TINY_SHAPES, prepare, results_folder, settings_of
from deadline import Deadline
from measurements import CELL, OURS, Book, Record, having, rounded
from offload_parts import PARTS, Plan, Session, headline
from parallel_tables import FILE

from triforce_tree import parallel
from triforce_tree.memory_plan import MemoryPlan

PLAN = replace(PARTS["7b"].full, prompts=1)
# Its heads can be shared by two and by four.
_TINY_SHAPE = TINY_SHAPES["llama-2-13b"]
_START = time.perf_counter()


def say(text: str) -> None:
    if parallel.first():
        at = round(time.perf_counter() - _START, 1)
        print(json.dumps({"at": at, "what": text}), flush=True)


class SharedDeadline(Deadline):
    """Rank 0's clock alone."""

    def steps(self, items: Sequence[Any], keep: float = 0.0) -> Iterator[Any]:
        own = super().steps(items, keep)
        while (item := parallel.told(next(own, None))) is not None:
            yield item


class SharedBook(Book):
    """Measurements with every rank's own share of the bus beside rank 0's."""

    def add(self, sample: Record) -> None:
        super().add(sample | {"pcie_gbps_by_rank": parallel.gathered(sample["pcie_gbps"])})


class SharedSession(Session):
    """A session whose ranks have the same plan and write the same tokens."""

    def __init__(self, plan: Plan, book: Book, device: torch.device, seed: int) -> None:
        # The links are measured at the same time: they may share a switch.
        parallel.least([0.0])
        super().__init__(plan, book, device, seed)
        book.mine["bus_gbps_by_rank"] = parallel.gathered(self.bus["in"])
        self.bus = dict(zip(self.bus, parallel.least(list(self.bus.values())), strict=True))
        [self.read] = parallel.least([self.read])
        book.mine |= {"bus_gbps": self.bus, "read_gbps": self.read / 1e9}

    def say(self, text: str) -> None:
        say(text)

    def smaller(self, memory: MemoryPlan, why: str) -> MemoryPlan:
        raise torch.OutOfMemoryError(f"one of several cards ran out of memory, so all end: {why}")

    def ours(self, base: Record, tokens: list[int], memory: MemoryPlan) -> list[int]:
        text = super().ours(base, tokens, memory)
        parallel.check_alike("tokens", text)
        say(f"all ranks wrote the same {len(text)} tokens")
        return text


def rows(part: str, content: Record) -> list[Record]:
    """Those of one card, with what each rank's link did."""
    found, samples = [], content["samples"]
    for row in offload_results.rows(part, content):
        mine = having(samples, method=OURS, **{k: row[k] for k in CELL})
        beside = having(samples, method=offload_results.PLAIN)
        more = {"pcie_gbps_by_rank": mine, "baseline_pcie_gbps_by_rank": beside}
        found.append(
            row
            | {"gpus": content["settings"]["gpus"], "bus_gbps_by_rank": content["bus_gbps_by_rank"]}
            | {name: _by_rank(samples) for name, samples in more.items()}
        )
    return found


def _by_rank(samples: Sequence[Record]) -> list[float | None]:
    rates = zip(*(s["pcie_gbps_by_rank"] for s in samples), strict=True)
    return [rounded(statistics.median(rank)) for rank in rates]


def place_of(out: Path) -> Path:
    """The results file; of other ranks a copy, so that all know what is measured and one writes."""
    held = out / FILE
    content = parallel.told(held.read_text(encoding="utf-8") if held.exists() else None)
    if parallel.first():
        return held
    copy = Path(tempfile.mkdtemp()) / FILE
    if content is not None:
        copy.write_text(content, encoding="utf-8")
    return copy


def main(words: Sequence[str] | None = None) -> None:
    made = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = made.add_argument
    add("--out", type=Path, help="folder of the results file; without it docs/results, or none with --tiny")
    add("--seconds", type=float, default=220, help="begin no prompt that would not end within this time")
    add("--cap", type=float, default=24.0, help="GiB of each card's memory")
    add("--prompts", type=int, default=PLAN.prompts, help="different prompts")
    add("--new-tokens", type=int, default=PLAN.new_tokens, help="tokens of each text")
    add("--fresh", action="store_true", help="drop what was measured before with as many cards")
    add("--seed", type=int, default=0, help="of all draws, and of the weights without effect")
    add("--tiny", action="store_true", help="tiny shapes and prompts, on any machine")
    args = made.parse_args(words)
    if not args.tiny and not torch.cuda.is_available():
        made.error("there is no GPU here; --tiny runs the same code with tiny models on the CPU")
    prepare()
    deadline = SharedDeadline(args.seconds)
    group = parallel.join("cpu" if args.tiny else "cuda")
    device = group.device if group is not None else torch.device("cpu" if args.tiny else "cuda")
    gpus = group.size if group is not None else 1
    plan = replace(PLAN, caps=(args.cap,), prompts=args.prompts, new_tokens=args.new_tokens)
    if args.tiny:
        plan = replace(plan.smoke(), shape=_TINY_SHAPE)
    settings = settings_of({**plan.as_dict(), "gpus": gpus}, args.seed, args.tiny)
    out = results_folder(args.out, args.tiny)
    book = SharedBook(place_of(out), f"7b on {gpus}", settings, rows, args.fresh)
    session = SharedSession(plan, book, device, args.seed)
    headline(session, deadline)
    book.write()
    session.bench.close()
    for row in book.all["rows"]:
        if parallel.first() and row["gpus"] == gpus:
            print(json.dumps({k: v for k, v in row.items() if k not in ("config", "memory_plan")}))
    del session
    parallel.leave()


if __name__ == "__main__":
    sys.exit(main())

"""Speed of the inflated pair with its cache in host memory, under a cap of device memory.

A part goes into docs/results/offload_h200.jsonl, one measurement after the other; what was made with other
settings or another engine is not continued. Models, prompts and clocks are those of ``on_chip``. The cap is
that of torch's allocator, and holds for weights, graphs and prefill as well. The baseline is autoregressive
decoding of this engine, whose cache is streamed too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from scripts.benchmarks.common.engine import Bench, Prompts, Run
from scripts.benchmarks.common.results import ATTENDED, STREAMED, Record, rounded, rows_of_samples
from scripts.benchmarks.common.session import Plan, Session, Step, measure_parts, parts_parser
from scripts.benchmarks.common.texts import SOURCES, Source
from scripts.benchmarks.common.timing import read_bandwidth
from scripts.benchmarks.offload.tables import FILE
from triforce_tree.config import HierarchyConfig
from triforce_tree.kv.offload.bandwidth import bandwidths
from triforce_tree.kv.offload.host_attention import host_attends
from triforce_tree.kv.offload.pinned import usable
from triforce_tree.models.model_copy import weight_bytes
from triforce_tree.planning import memory_plan
from triforce_tree.planning.machine import host_rate
from triforce_tree.planning.memory_layout import Workload
from triforce_tree.planning.memory_map import GIB, Machine, Sizes
from triforce_tree.planning.memory_plan import DoesNotFitError, MemoryPlan

_PACKAGES = tuple(p for source in SOURCES for p in source.packages if not source.code)
RTX_4090 = {"name": "RTX 4090", "bus_gbps": 25.0, "read_gbps": 1000.0}
# Of a memory plan.
_PLANNED = ("split", "device_gib", "host_gib", "pass_weights_gib")
_ONE_TEXT = (
    Source("docstrings of all packages", _PACKAGES),
    Source("source code of transformers", ("transformers",), code=True),
)


@dataclass(frozen=True)
class Offloaded(Plan):
    """Settings of one part; options that it leaves open are chosen by the memory plan.

    Attributes:
        caps: GiB of device memory, one after the other.
        resident: share of the cache that stays on the device; None for all that fits under the cap.
        one_text: prompts are cut from all sources together, since none is long enough.
        weights_on_host: the target's weights are streamed too.
    """

    prompts: int = 3
    temperatures: tuple[float, ...] = (0.0, 0.6)
    plain_tokens: int = 6
    caps: tuple[float, ...] = (24.0,)
    resident: float | None = None
    one_text: bool = False
    weights_on_host: bool = False

    def steps(self) -> Iterator[Step]:
        [(batch, context)] = self.cells
        for cap, number in product(self.caps, range(self.prompts)):
            yield self.step(number, batch, context, {"cap_gib": cap})

    def tiny(self, **more: Any) -> "Offloaded":
        small = {"cells": ((1, self.cells[0][1] // 256),), "caps": tuple(cap / 24 for cap in self.caps)}
        small |= {"prompts": min(2, self.prompts), "new_tokens": 24, "resident": 0.5}
        made = super().tiny(**small | more)
        return replace(made, options=made.options | {"chunk": 8})

    def as_dict(self) -> Record:
        more = {name: getattr(self, name) for name in ("resident", "new_tokens", "weights_on_host")}
        return super().as_dict() | more


class OffloadSession(Session):
    """One cap after the other."""

    # The cap under which a program is open, and its memory plan.
    opened: tuple[float, MemoryPlan] | None = None

    @property
    def sources(self) -> Sequence[Source]:
        return _ONE_TEXT if self.plan.one_text else SOURCES

    def machine(self) -> Record:
        bus, read = bandwidths(self.device)[0], read_bandwidth(self.device)
        self.say(f"bus {bus / 1e9:.1f} GB/s, read {read / 1e12:.2f} TB/s")
        return {"bus_gbps": {"in": bus / 1e9}, "read_gbps": read / 1e9}

    def new_bench(self) -> Bench:
        plan = self.plan
        cap = max(plan.caps) if self.device.type == "cuda" else None
        return Bench(plan.shape, plan.draft_shape, self.device, self.seed, cap, plan.weights_on_host)

    def plan_memory(self, cap: float) -> MemoryPlan:
        """Returns the plan for this cap, with the split that the part asks for."""
        plan, bench = self.plan, self.bench
        # The bus alone compares between machines; what a CPU adds is measured in parts of its own.
        options = {"levels": 3, "offload": True, "gpu_memory": int(cap * GIB), "host_attention": False}
        config = HierarchyConfig.from_options(**options | plan.options)
        host, header = usable()[0] + bench.weights_on_host, self.file.mine
        machine = Machine(int(cap * GIB), host, 1e9 * header["bus_gbps"]["in"], 1e9 * header["read_gbps"])
        if host_attends(bench.target, config.host_attention):
            rate = host_rate(bench.target.heads, bench.target.dtype, self.device)
            points = [(n, round(r / 1e9, 1)) for n, r in rate.points]
            self.say(f"the CPU with {torch.get_num_threads()} threads: {points} GB/s")
            machine = replace(machine, host_attention=rate)
        sizes = Sizes.of(bench.target, bench.draft, config)
        [(batch, context)] = plan.cells
        workload = Workload(batch, context, plan.new_tokens)
        made = memory_plan.plan(sizes, machine, config, plan.options, workload)
        if plan.resident is not None and made.offload is not None:
            whole = (context + plan.new_tokens) * sizes.layers * sizes.row
            made = made.with_resident(int(plan.resident * whole))
        return made

    def open(self, cap: float) -> None:
        """The program under a cap, unless it is open."""
        if self.opened is not None and self.opened[0] == cap:
            return
        [(batch, context)] = self.plan.cells
        size = batch, context + self.plan.new_tokens
        self.opened, memory = None, self.plan_memory(cap)
        assert memory.offload is not None
        self.bench.cap(cap)
        self.bench.open(memory.config, *size, self.plan.temperatures, memory.offload)
        host = self.bench.offloaded.host
        sizes = (host.resident_bytes / GIB, host.host_bytes / GIB, self.bench.peak_gib())
        said = "GiB resident {:.2f}, on the host {:.2f}, peak {:.2f}".format(*sizes)
        self.say(f"cap {cap:g} GiB: {memory.as_dict()['options']}, {said}")
        self.opened = cap, memory

    def measure(self, step: Step) -> None:
        """Measures every temperature; plain decoding along the greedy text, with and without the CPU."""
        try:
            self.open(step.setting["cap_gib"])
        except DoesNotFitError as error:
            self.note(f"{step.setting}: {error}")
            return
        prompts, sources = self.feed(step)
        for key in self.lacking(step):
            text = self.ours(key, prompts, sources).texts[0][: self.plan.plain_tokens]
            if key["temperature"] == 0:
                if self.bench.offloaded.share(1):
                    self.plain(key, prompts, [text], ATTENDED)
                with self.bench.streaming_alone():
                    self.plain(key, prompts, [text], STREAMED)

    def figures(self, prompts: Prompts, stages: dict[str, float], run: Run) -> Record:
        bench, header = self.bench, self.file.mine
        host, streamed = bench.offloaded.host, bench.pass_bytes
        read = weight_bytes(bench.target.model) + host.resident_bytes
        assert self.opened is not None
        planned = self.opened[1].as_dict()
        return {
            "stages": stages,
            "roof_ms": 1e3 * max(streamed / 1e9 / header["bus_gbps"]["in"], read / 1e9 / header["read_gbps"]),
            "streamed_gib": streamed / GIB,
            "resident_gib": host.resident_bytes / GIB,
            "host_gib": host.host_bytes / GIB,
            "weights_on_host_gib": bench.weights_on_host / GIB,
            "host_share": bench.offloaded.share(2),
            "peak_gpu_gib": bench.peak_gib(),
            "options": planned["options"],
            "memory_plan": {name: planned[name] for name in _PLANNED if name in planned},
        }


_LONG = ((1, 122_880),)
_WITH_THE_CPU = {"host_attention": True}
PARTS = {
    "7b": Offloaded("llama-2-7b", _LONG),
    "8b": Offloaded("llama-3.1-8b", _LONG),
    "8b-512k": Offloaded("llama-3.1-8b", ((1, 524_288),), prompts=1, one_text=True, new_tokens=128),
    # 24 GiB of weights and 75 of cache are what a host of 128 GiB can lock.
    "13b": Offloaded("llama-2-13b", ((1, 98_304),), prompts=1, weights_on_host=True),
    "resident": Offloaded("llama-2-7b", _LONG, caps=(80.0,), resident=0.75),
    "caps": Offloaded("llama-2-7b", _LONG, caps=(16.0, 48.0), prompts=1),
    "host-attention": Offloaded("llama-2-7b", _LONG, prompts=2, options=_WITH_THE_CPU),
    "host-attention-8b": Offloaded("llama-3.1-8b", _LONG, prompts=2, options=_WITH_THE_CPU),
}


def rows(part: str, header: Record, samples: list[Record]) -> list[Record]:
    """Returns medians over prompts, one row for every cell that our engine was measured in."""
    bus = {k: rounded(v) for k, v in header["bus_gbps"].items()}
    found = []
    for row in rows_of_samples(part, header, samples, (STREAMED,)):
        beside, cap = row["baselines"], row["setting"].get("cap_gib")
        more: Record = {"gpu_memory_cap_gib": cap, "bus_gbps": bus}
        if STREAMED in beside:
            more["baseline_pcie_gbps"] = beside[STREAMED]["pcie_gbps"]
        if (own := beside.get(ATTENDED)) and row["host_share"]:
            # The speed-up is that to streamed decoding; this one is to the faster of both.
            fastest = min(own["ms_per_token"], row["baseline_ms_per_token"] or own["ms_per_token"])
            more["attended_baseline_ms_per_token"] = own["ms_per_token"]
            more["attended_baseline_cpu_gbps"] = own["cpu_gbps"]
            more["speedup_to_fastest_baseline"] = rounded(fastest / row["ms_per_token"])
        # On another machine the CPU differs as well, and that was not measured.
        if row["baseline"] and not row["host_share"]:
            more["projection"] = projection(row, header["bus_gbps"]["in"], header["read_gbps"], RTX_4090)
        found.append(row | more)
    return found


def projection(row: Record, bus_gbps: float, read_gbps: float, card: Record) -> Record:
    """Times on another card, by the cost model of the measurements; a projection, not a measurement.

    Bytes that cross the bus take their time on that card's bus; all other time, be it bytes, arithmetic or
    launches, is stretched by the ratio of memory bandwidths.
    """
    slower = read_gbps / card["read_gbps"]
    megabytes = row["streamed_gib"] * 2**30 / 1e6
    here, there = megabytes / bus_gbps, megabytes / card["bus_gbps"]
    ours = (there + slower * max(0.0, row["pass_ms"] - here)) / row["tokens_per_pass"]
    plain = there + slower * max(0.0, row["baseline_ms_per_token"] - here)
    figures = {"ms_per_token": ours, "baseline_ms_per_token": plain, "speedup": plain / ours}
    return {"card": card["name"], **{k: rounded(v) for k, v in figures.items()}}


def main(words: Sequence[str] | None = None) -> None:
    made = parts_parser("benchmarks offload", __doc__, PARTS)
    measure_parts(made, words, PARTS, OffloadSession, rows, FILE)

"""Speed of the inflated pair with its cache in host memory, under a limit of device memory.

A part goes into docs/results/offload_h200.jsonl. Each measurement is on disk as soon as it is made, so that a
run which was cut short goes on when it is called again. Measurements with other settings or of another commit
are not continued. Prompts are real texts (``sources/registry.py``). The models are the embedded target and
draft, inflated to the sizes of real models. Only decoding is timed, and no text ends early. The limit is that
of torch's allocator, and holds for weights, graphs and prefill as well. The baseline is autoregressive
decoding of this engine, whose cache is streamed too.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path

import torch

from scripts.benchmarks.common.command import (
    TINY_DRAFT,
    TINY_OPTIONS,
    TINY_SHAPES,
    device_of,
    parser,
    results_folder,
)
from scripts.benchmarks.common.long_texts import long_prompts
from scripts.benchmarks.common.results import (
    OURS,
    RESULTS,
    Record,
    ResultsFile,
    inflated_vocabulary,
    settings_of,
)
from scripts.benchmarks.common.timing import read_bandwidth
from scripts.benchmarks.offload.bench import Bench, Run
from scripts.benchmarks.offload.rows import ATTENDED, STREAMED, rows
from scripts.benchmarks.offload.tables import FILE
from scripts.benchmarks.sources.registry import SOURCES, Texts
from triforce_tree.bench.results import repeated_share
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
from triforce_tree.runtime.executor import free_memory

# Of a memory plan.
_PLANNED = ("split", "device_gib", "host_gib", "pass_weights_gib")
# Passes in which the stages are timed one by one.
_PROFILED = 6


@dataclass(frozen=True)
class Plan:
    """Settings of one part. Options that it leaves open are chosen by the memory plan.

    Attributes:
        shape, draft_shape: what the pair is inflated to.
        context: tokens of a prompt.
        prompts: how many.
        new_tokens: of each text; ``plain_tokens`` those of autoregressive decoding.
        options: of the hierarchy.
        limits: GiB of device memory, one after the other.
        resident: share of the cache that stays on the device; None for all that fits under the limit.
        weights_on_host: the target's weights are streamed too.
    """

    shape: str
    context: int = 122_880
    draft_shape: str = "llama-68m"
    prompts: int = 3
    temperatures: tuple[float, ...] = (0.0, 0.6)
    new_tokens: int = 256
    plain_tokens: int = 6
    options: Record = field(default_factory=dict)
    limits: tuple[float, ...] = (24.0,)
    resident: float | None = None
    weights_on_host: bool = False

    def tiny(self) -> "Plan":
        """Returns a plan for tiny models, which takes seconds on a CPU."""
        return replace(
            self, shape=TINY_SHAPES[self.shape], draft_shape=TINY_DRAFT, context=self.context // 256,
            prompts=min(2, self.prompts), new_tokens=24, plain_tokens=4, resident=0.5,
            limits=tuple(limit / 24 for limit in self.limits),
            options=self.options | TINY_OPTIONS | {"chunk": 8},
        )  # fmt: skip

    def as_dict(self) -> Record:
        """Returns the settings that all measurements of the part share."""
        names = ("shape", "draft_shape", "options", "resident", "new_tokens", "weights_on_host")
        return {name: asdict(self)[name] for name in names} | {"vocabulary": inflated_vocabulary(self.shape)}

    def steps(self) -> Iterator[tuple[float, int, list[Record]]]:
        """Yields a limit, the number of a prompt, and the keys of what is measured of both."""
        for limit, number in product(self.limits, range(self.prompts)):
            key = {
                "method": OURS, "prompt": f"prompt {number + 1}", "start": self.context, "batch": 1,
                "context": self.context, "new_tokens": self.new_tokens, "setting": {"cap_gib": limit},
            }  # fmt: skip
            yield limit, number, [key | {"temperature": t} for t in self.temperatures]


class Session:
    """A bench, and the results file that its measurements go into.

    Args:
        plan: of the part.
        file: what is measured already, and where measurements go.
        texts: what prompts are cut from; short ones follow others.
        device, seed: see ``Bench``.
    """

    def __init__(self, plan: Plan, file: ResultsFile, texts: Texts, device: torch.device, seed: int) -> None:
        self._start = time.perf_counter()
        self.plan, self.file, self.device, self.seed = plan, file, device, seed
        # The limit under which a program is open, and its memory plan.
        self._opened: tuple[float, MemoryPlan] | None = None
        file.mine |= self.machine()
        free_memory()
        self.say(f"{plan.shape}: inflating, with {inflated_vocabulary(plan.shape):,} entries of vocabulary")
        limit = max(plan.limits) if device.type == "cuda" else None
        self.bench = Bench(plan.shape, plan.draft_shape, device, seed, limit, plan.weights_on_host)
        names = [source.name for source in SOURCES if source.copies is None and texts.holds(source)]
        prompts = long_prompts(texts, names[: plan.prompts], [plan.context])[plan.context]
        self._prompts = list(prompts.items())

    def machine(self) -> Record:
        """Measures the machine, and returns figures for the part's header."""
        bus, read = bandwidths(self.device)[0], read_bandwidth(self.device)
        self.say(f"bus {bus / 1e9:.1f} GB/s, read {read / 1e12:.2f} TB/s")
        return {"bus_gbps": {"in": bus / 1e9}, "read_gbps": read / 1e9}

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self._start:6.1f} s] {text}", file=sys.stderr, flush=True)

    def _plan_memory(self, limit: float) -> MemoryPlan:
        """Returns the memory plan for this limit, with the split that the part asks for."""
        plan, bench = self.plan, self.bench
        # The bus alone compares between machines; what a CPU adds is measured in parts of its own.
        options = {"levels": 3, "offload": True, "gpu_memory": int(limit * GIB), "host_attention": False}
        config = HierarchyConfig.from_options(**options | plan.options)
        host, header = usable()[0] + bench.weights_on_host, self.file.mine
        machine = Machine(int(limit * GIB), host, 1e9 * header["bus_gbps"]["in"], 1e9 * header["read_gbps"])
        if host_attends(bench.target, config.host_attention):
            rate = host_rate(bench.target.heads, bench.target.dtype, self.device)
            points = [(n, round(r / 1e9, 1)) for n, r in rate.points]
            self.say(f"the CPU with {torch.get_num_threads()} threads: {points} GB/s")
            machine = replace(machine, host_attention=rate)
        sizes = Sizes.of(bench.target, bench.draft, config)
        workload = Workload(1, plan.context, plan.new_tokens)
        made = memory_plan.plan(sizes, machine, config, plan.options, workload)
        if plan.resident is not None and made.offload is not None:
            whole = (plan.context + plan.new_tokens) * sizes.layers * sizes.row
            made = made.with_resident(int(plan.resident * whole))
        return made

    def _open(self, limit: float) -> None:
        """Opens a program under a limit, unless it is open."""
        if self._opened is not None and self._opened[0] == limit:
            return
        self._opened, memory = None, self._plan_memory(limit)
        assert memory.offload is not None
        self.bench.limit(limit)
        size = self.plan.context + self.plan.new_tokens
        self.bench.open(memory.config, size, self.plan.temperatures, memory.offload)
        host = self.bench.cache.host
        sizes = (host.resident_bytes / GIB, host.host_bytes / GIB, self.bench.peak_gib())
        said = "GiB resident {:.2f}, on the host {:.2f}, peak {:.2f}".format(*sizes)
        self.say(f"limit {limit:g} GiB: {memory.as_dict()['options']}, {said}")
        self._opened = limit, memory

    def measure(self, limit: float, number: int, keys: Sequence[Record]) -> None:
        """Measures what the file lacks: every temperature, and plain decoding along the greedy text."""
        try:
            self._open(limit)
        except DoesNotFitError as error:
            note = f"{keys[0]['setting']}: {error}"
            self.say(note)
            self.file.note(note[:500])
            return
        name, prompt = self._prompts[number]
        if self.bench.feed(prompt):
            self.say(f"prefill {self.bench.prefill_seconds:.2f} s, {name}")
        for key in (key for key in keys if self.file.find(**key) is None):
            text = self.ours(key, prompt, name).text[: self.plan.plain_tokens]
            if key["temperature"] == 0:
                if self.bench.cache.share(1):
                    self._plain(key, prompt, text, ATTENDED)
                with self.bench.streaming_alone():
                    self._plain(key, prompt, text, STREAMED)

    def ours(self, key: Record, prompt: list[int], source: str) -> Run:
        """Measures our engine, and the times of its stages."""
        bench, temperature, new = self.bench, key["temperature"], key["new_tokens"]
        run = bench.decode(temperature, prompt, new)
        passes = max(1, min(_PROFILED, new // (bench.program.max_draft_tokens + 1)))
        stages = bench.stage_ms(temperature, prompt, max(1, round(run.rounds)), passes)
        sample = key | run.as_dict() | {"sources": [source], "prefill_seconds": bench.prefill_seconds}
        sample["repeated_8grams"] = repeated_share(run.text)
        self.add(sample | self._figures(stages))
        return run

    def _figures(self, stages: dict[str, float]) -> Record:
        bench, header = self.bench, self.file.mine
        host, streamed = bench.cache.host, bench.pass_bytes
        read = weight_bytes(bench.target.model) + host.resident_bytes
        assert self._opened is not None
        planned = self._opened[1].as_dict()
        return {
            "stages": stages,
            "roof_ms": 1e3 * max(streamed / 1e9 / header["bus_gbps"]["in"], read / 1e9 / header["read_gbps"]),
            "streamed_gib": streamed / GIB,
            "resident_gib": host.resident_bytes / GIB,
            "host_gib": host.host_bytes / GIB,
            "weights_on_host_gib": bench.weights_on_host / GIB,
            "host_share": bench.cache.share(2),
            "peak_gpu_gib": bench.peak_gib(),
            "options": planned["options"],
            "memory_plan": {name: planned[name] for name in _PLANNED if name in planned},
        }

    def _plain(self, key: Record, prompt: list[int], text: list[int], method: str) -> None:
        """Measures plain decoding along a text in the same program."""
        run, exact = self.bench.replay(prompt, text)
        figures = {name: run.as_dict()[name] for name in ("ms_per_token", "pcie_gbps", "cpu_gbps")}
        more = {"method": method, "new_tokens": len(text), "sources": [], "exact": exact}
        self.add(key | figures | more)

    def add(self, sample: Record) -> None:
        """Adds a measurement to the file."""
        self.file.add(sample)
        names = ("temperature", "setting", "method", "ms_per_token", "tokens_per_pass", "exact")
        said = [f"{name} {sample[name]}" for name in names if sample.get(name) is not None]
        self.say(f"{sample['prompt']}, {', '.join(said)}")


def measure_part(plan: Plan, file: ResultsFile, new_session: Callable[[], Session]) -> None:
    """Measures what the file lacks of a part; without any models where that is nothing."""
    lacking = [step for step in plan.steps() if any(file.find(**key) is None for key in step[2])]
    if not lacking:
        return
    own = new_session()
    try:
        for step in lacking:
            own.measure(*step)
    finally:
        own.file.write()
        own.bench.close()
        # Nothing else holds the models: the next part's would not fit beside them.
        del own.bench
        free_memory()


def print_rows(file: ResultsFile) -> None:
    for row in file.rows:
        print(json.dumps({name: value for name, value in row.items() if name != "memory_plan"}))


_WITH_THE_CPU = {"host_attention": True}
PARTS = {
    "7b": Plan("llama-2-7b"),
    "8b": Plan("llama-3.1-8b"),
    "8b-512k": Plan("llama-3.1-8b", 524_288, prompts=1, new_tokens=128),
    # 24 GiB of weights and 75 of cache are what a host of 128 GiB can lock.
    "13b": Plan("llama-2-13b", 98_304, prompts=1, weights_on_host=True),
    "resident": Plan("llama-2-7b", limits=(80.0,), resident=0.75),
    "caps": Plan("llama-2-7b", limits=(16.0, 48.0), prompts=1),
    "host-attention": Plan("llama-2-7b", prompts=2, options=_WITH_THE_CPU),
    "host-attention-8b": Plan("llama-3.1-8b", prompts=2, options=_WITH_THE_CPU),
}


def options(words: Sequence[str] | None) -> argparse.Namespace:
    made = parser("benchmarks offload", __doc__)
    add = made.add_argument
    add("--part", choices=[*PARTS, "all"], nargs="+", required=True, help="what to measure")
    add("--prompts", type=int, help="how many; by default as the part has it")
    add("--temperatures", type=float, nargs="+", help="0 is greedy; likewise")
    add("--texts", type=Path, help="file that `texts` wrote; by default what is installed")
    args = made.parse_args(words)
    args.device = device_of(made, args.tiny)
    return args


def main(words: Sequence[str] | None = None) -> None:
    args = options(words)
    path, texts = results_folder(args.out, args.tiny) / FILE, Texts(args.texts)
    begin = None if args.tiny else RESULTS / FILE
    for part in PARTS if "all" in args.part else args.part:
        plan = PARTS[part].tiny() if args.tiny else PARTS[part]
        plan = replace(plan, prompts=args.prompts or plan.prompts)
        plan = replace(plan, temperatures=tuple(args.temperatures or plan.temperatures))
        settings = settings_of(plan.as_dict(), args.seed, args.tiny)
        file = ResultsFile(path, part, settings, rows, begin)
        measure_part(plan, file, lambda p=plan, f=file: Session(p, f, texts, args.device, args.seed))
        print_rows(file)

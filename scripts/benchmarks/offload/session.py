"""What is measured with an offloaded cache: one prompt after the other under a cap of device memory."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from scripts.benchmarks.common.command import TINY_DRAFT, TINY_OPTIONS, TINY_SHAPES, dtype_of
from scripts.benchmarks.common.engine import weight_bytes
from scripts.benchmarks.common.results import OURS, ResultsFile
from scripts.benchmarks.common.texts import SOURCES, Library, Source
from scripts.benchmarks.common.timing import read_bandwidth
from scripts.benchmarks.offload.engine import OffloadBench, bus_gbps, peak_gib
from scripts.benchmarks.offload.rows import ATTENDED, PLAIN
from triforce_tree.config import HierarchyConfig
from triforce_tree.eval.results import repeated_share
from triforce_tree.kv.offload.host_attention import host_attends
from triforce_tree.kv.offload.pinned import usable
from triforce_tree.planning import memory_plan
from triforce_tree.planning.machine import host_rate
from triforce_tree.planning.memory_map import GIB, Machine, Sizes
from triforce_tree.planning.memory_plan import MemoryPlan
from triforce_tree.runtime.executor import free_memory

# Tokens of a text that are decoded before anything is timed: kernels are compiled and tuned.
_WARM_UP = 8


@dataclass(frozen=True)
class Plan:
    """Settings of one part.

    Attributes:
        shape, draft_shape: what the pair is inflated to.
        context: tokens of a prompt.
        caps: GiB of device memory, one after the other.
        resident: share of the cache that stays on the device; None for all that fits under the cap.
        plain_tokens: of the streamed baseline, behind each prompt.
        options: of the hierarchy; all others are chosen by the plan of the memory.
        one_text: prompts are cut from all sources together, since none is long enough.
        on_chip: time the same prompts' prefill with the cache on the device, and nothing else.
        weights_on_host: the target's weights are streamed too.
    """

    shape: str
    context: int
    caps: tuple[float, ...] = (24.0,)
    draft_shape: str = "llama-68m"
    resident: float | None = None
    prompts: int = 3
    temperatures: tuple[float, ...] = (0.0, 0.6)
    new_tokens: int = 256
    plain_tokens: int = 6
    options: dict[str, Any] = field(default_factory=dict)
    one_text: bool = False
    on_chip: bool = False
    weights_on_host: bool = False

    def tiny(self) -> "Plan":
        """The same in seconds on a CPU."""
        return replace(
            self, shape=TINY_SHAPES[self.shape], draft_shape=TINY_DRAFT,
            context=self.context // 256, caps=tuple(cap / 24 for cap in self.caps),
            prompts=min(2, self.prompts), new_tokens=24, plain_tokens=4, resident=0.5,
            options=self.options | TINY_OPTIONS | {"chunk": 8},
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """What must agree for measurements to stand side by side."""
        names = ("shape", "draft_shape", "options", "resident", "new_tokens", "weights_on_host")
        return {name: getattr(self, name) for name in names}


class Session:
    """A pair and the results file that its measurements go into.

    Args:
        plan: of the part.
        file: what is measured already.
        device, seed: see ``OffloadBench``.
    """

    def __init__(self, plan: Plan, file: ResultsFile, device: torch.device, seed: int) -> None:
        self._start = time.perf_counter()
        self.plan, self.file, self.device = plan, file, device
        self.bus, self.read = bus_gbps(device), read_bandwidth(device)
        free_memory()
        file.mine |= {"bus_gbps": self.bus, "read_gbps": self.read / 1e9}
        self.say(f"bus {self.bus}, read {self.read / 1e12:.2f} TB/s; {plan.shape}: inflating ...")
        cap = None if plan.on_chip or device.type != "cuda" else max(plan.caps)
        shapes = plan.shape, plan.draft_shape
        self.bench = OffloadBench(*shapes, device, dtype_of(device), cap, seed, plan.weights_on_host)
        sources: Sequence[Source] = SOURCES
        if plan.one_text:
            packages = tuple(p for s in SOURCES for p in s.packages if not s.code)
            spare = Source("source code of transformers", ("transformers",), code=True)
            sources = [Source("docstrings of all packages", packages), spare]
        self.library = Library(self.bench.tokenizer, plan.context, sources=sources)
        self.say("ready")

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self._start:6.1f} s] {text}", file=sys.stderr, flush=True)

    def memory(self, cap: float) -> MemoryPlan:
        """The plan for this cap, with the split that the part asks for."""
        plan, bench = self.plan, self.bench
        # What the bus alone gives stands for any machine; what a CPU adds is measured in parts of its own.
        options = {"levels": 3, "offload": True, "gpu_memory": int(cap * GIB), "host_attention": False}
        config = HierarchyConfig.from_options(**options | plan.options)
        host = usable()[0] + bench.weights_on_host
        machine = Machine(int(cap * GIB), host, 1e9 * self.bus["in"], self.read)
        if host_attends(bench.target, config.host_attention):
            rate = host_rate(bench.target.heads, bench.target.dtype, self.device)
            points = [(n, round(r / 1e9, 1)) for n, r in rate.points]
            self.say(f"the CPU with {torch.get_num_threads()} threads: {points} GB/s")
            machine = replace(machine, host_attention=rate)
        sizes = Sizes.of(bench.target, bench.draft, config)
        made = memory_plan.plan(sizes, machine, config, plan.options, 1, plan.context, plan.new_tokens)
        if plan.resident is not None and made.offload is not None:
            whole = (plan.context + plan.new_tokens) * sizes.layers * sizes.row
            made = made.with_resident(int(plan.resident * whole))
        return made

    def open(self, cap: float, memory: MemoryPlan) -> MemoryPlan:
        """The program under a cap; a smaller plan where the memory does not do."""
        self.bench.cap(cap)
        while True:
            assert memory.offload is not None
            try:
                max_seq_len = self.plan.context + self.plan.new_tokens
                self.bench.open(memory.config, max_seq_len, memory.offload, self.plan.temperatures)
                host = self.bench.offloaded.host
                self.say(
                    f"cap {cap:g} GiB: {memory.as_dict()['options']}, resident "
                    f"{host.resident_bytes / GIB:.2f} GiB, host {host.host_bytes / GIB:.2f} GiB, peak "
                    f"{peak_gib(self.device):.2f} GiB, {self.bench.seconds}"
                )
                return memory
            except torch.OutOfMemoryError as error:
                message = str(error)
            memory = self.smaller(memory, message)

    def smaller(self, memory: MemoryPlan, why: str) -> MemoryPlan:
        self.bench.close()
        less = memory.smaller()
        if less is None:
            raise torch.OutOfMemoryError(why)
        self.say(f"out of memory ({why.splitlines()[0][:150]}): {less[1]}")
        self.file.note(f"out of memory: {less[1]}")
        return less[0]

    def measure(self, cap: float, memory: MemoryPlan, number: int) -> MemoryPlan:
        """One prompt at every temperature that it lacks, with whatever memory that leaves."""
        prompt = self.library.prompt(number, self.plan.context)
        while True:
            try:
                self.bench.feed(prompt.tokens)
                took = self.bench.seconds["prefill"]
                self.say(f"prefill {took:.2f} s, peak {peak_gib(self.device):.2f} GiB")
                for base in self.lacking(cap, number):
                    base["sources"] = [prompt.name]
                    text = self.ours(base, prompt.tokens, memory)
                    if base["temperature"] == 0:
                        self.plains(base, prompt.tokens, text)
                return memory
            except torch.OutOfMemoryError as error:
                message = str(error)
            memory = self.open(cap, self.smaller(memory, message))

    def lacking(self, cap: float, number: int) -> list[dict[str, Any]]:
        """Cells of a prompt that are not measured yet."""
        bases = [self.sample(OURS, number, t, cap) for t in self.plan.temperatures]
        keys = ("method", "prompt", "context", "temperature", "setting")
        return [base for base in bases if self.file.find(**{k: base[k] for k in keys}) is None]

    def sample(self, method: str, number: int, temperature: float, cap: float) -> dict[str, Any]:
        return {
            "method": method, "prompt": f"prompt {number + 1}", "sources": [], "batch": 1,
            "context": self.plan.context, "new_tokens": self.plan.new_tokens, "temperature": temperature,
            "setting": {"cap_gib": cap},
        }  # fmt: skip

    def ours(self, base: dict[str, Any], tokens: list[int], memory: MemoryPlan) -> list[int]:
        """Our engine behind one prompt, written down."""
        bench, temperature = self.bench, base["temperature"]
        bench.decode(temperature, tokens, _WARM_UP)
        run = bench.decode(temperature, tokens, self.plan.new_tokens)
        figures = run.as_dict()
        host = bench.offloaded.host
        streamed = bench.pass_bytes
        stages = bench.stage_ms(temperature, tokens, max(1, round(run.rounds)))
        exchanged = stages.pop("exchanged chunks a head", 0.0)
        near = weight_bytes(bench.target.model) + host.resident_bytes
        level_ms = figures.pop("pass_ms")
        figures.pop("tokens")
        self.file.add(
            base | figures | {
                "pass_ms": 1e3 * run.seconds / run.passes,
                "level_ms": level_ms,
                "stages": stages,
                "exchanged_chunks_a_head": exchanged,
                "roof_ms": 1e3 * max(streamed / 1e9 / self.bus["in"], near / self.read),
                "streamed_gib": streamed / GIB,
                "resident_gib": host.resident_bytes / GIB,
                "host_gib": host.host_bytes / GIB,
                "weights_on_host_gib": bench.weights_on_host / GIB,
                "host_share": bench.offloaded.share(2),
                "peak_gpu_gib": peak_gib(self.device),
                "prefill_seconds": bench.seconds["prefill"],
                "repeated_8grams": repeated_share(run.tokens),
                "memory_plan": memory.as_dict(),
            }
        )  # fmt: skip
        self.say(
            f"{base['prompt']} T={temperature:g}: {run.ms_per_token:.1f} ms a token, "
            f"{figures['tokens_per_pass']:.1f} a pass, {run.rounds:.1f} rounds, {figures['acceptance']}, "
            f"{level_ms}"
        )
        return run.tokens

    def plains(self, base: dict[str, Any], tokens: list[int], text: Sequence[int]) -> None:
        """Plain decoding whose cache is all streamed, and where the CPU attends, with its share too."""
        if self.bench.offloaded.share(1):
            self.plain(base | {"method": ATTENDED}, tokens, text)
        with self.bench.streaming_alone():
            self.plain(base | {"method": PLAIN}, tokens, text)

    def plain(self, base: dict[str, Any], tokens: list[int], text: Sequence[int]) -> None:
        """Plain decoding along our greedy text."""
        self.bench.decode(0.0, tokens, 2, rounds=0)
        run, partings = self.bench.plain(tokens, text[: self.plan.plain_tokens])
        exact = {"compared": len(text[: self.plan.plain_tokens]), "partings": len(partings)}
        figures = {k: run.as_dict()[k] for k in ("ms_per_token", "pcie_gbps", "cpu_gbps")}
        self.file.add(base | figures | {"new_tokens": self.plan.plain_tokens, "exact": exact})
        self.say(f"{base['prompt']}, {base['method']}: {figures}, {exact}")

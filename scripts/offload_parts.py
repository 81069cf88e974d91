"""What scripts/bench_offload.py measures: shapes, lengths and caps of each part, and its loop."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from bench_command import TINY_DRAFT, TINY_OPTIONS, TINY_SHAPES
from deadline import Deadline
from measurements import OURS, Book
from offload_measure import Bench, bus_gbps, peak_gib
from offload_results import ATTENDED, FED, ON_CHIP, PLAIN
from prompt_library import SOURCES, Library, Source
from roofs import read_bandwidth, weight_bytes

from triforce_tree import memory_plan
from triforce_tree.bench.results import repeated_share
from triforce_tree.config import HierarchyConfig
from triforce_tree.cycle.host_attention import host_attends
from triforce_tree.cycle.pinned import usable
from triforce_tree.graphs import free_memory
from triforce_tree.machine import host_rate
from triforce_tree.memory_map import GIB, Machine, Sizes
from triforce_tree.memory_plan import MemoryPlan

# Tokens of a text whose rows are fed before anything is timed: kernels are compiled and tuned.
_WARM_UP = 8
_WITH_THE_CPU = {"host_attention": True}


@dataclass(frozen=True)
class Plan:
    """Settings of one part.

    Attributes:
        shape, draft_shape: what the pair is inflated to.
        context: tokens of a prompt.
        caps: GiB of device memory, one after the other.
        resident: share of the rows that stays on the device; None for all that fits under the cap.
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

    def smoke(self) -> "Plan":
        """The same in seconds on a CPU."""
        return replace(
            self, shape=TINY_SHAPES[self.shape], draft_shape=TINY_DRAFT,
            context=self.context // 256, caps=tuple(cap / 24 for cap in self.caps),
            prompts=min(2, self.prompts), new_tokens=24, plain_tokens=4, resident=0.5,
            options=self.options | TINY_OPTIONS | {"chunk": 8},
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """What must agree for measurements to stand side by side."""
        return {
            "shape": self.shape, "draft_shape": self.draft_shape, "options": self.options,
            "resident": self.resident, "new_tokens": self.new_tokens,
            # Left out where it is not so: what was measured before there was such a setting counts on.
            **({"weights_on_host": True} if self.weights_on_host else {}),
        }  # fmt: skip


class Session:
    """A pair and the book that its measurements go into.

    Args:
        plan: of the part.
        book: what is measured already.
        device, seed: see ``Bench``.
    """

    def __init__(self, plan: Plan, book: Book, device: torch.device, seed: int) -> None:
        self._start = time.perf_counter()
        self.plan, self.book, self.device = plan, book, device
        self.bus, self.read = bus_gbps(device), read_bandwidth(device)
        free_memory()
        book.mine |= {"bus_gbps": self.bus, "read_gbps": self.read / 1e9}
        self.say(f"bus {self.bus}, read {self.read / 1e12:.2f} TB/s; {plan.shape}: inflating ...")
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        cap = None if plan.on_chip or device.type != "cuda" else max(plan.caps)
        self.bench = Bench(plan.shape, plan.draft_shape, device, dtype, cap, seed, plan.weights_on_host)
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
        """The cycle under a cap; a smaller plan where the memory does not do."""
        self.bench.cap(cap)
        while True:
            assert memory.offload is not None
            try:
                room = self.plan.context + self.plan.new_tokens
                self.bench.open(memory.config, room, memory.offload, self.plan.temperatures)
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
        self.book.note(f"out of memory: {less[1]}")
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
        return [base for base in bases if self.book.find(**{k: base[k] for k in keys}) is None]

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
        self.book.add(
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
                "allocate_seconds": bench.seconds["allocate"],
                "repeated_8grams": repeated_share(run.tokens),
                "config": {k: str(v) if k == "tree" else v for k, v in memory.config.as_options().items()},
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
        """Plain decoding whose rows are all streamed, and where the CPU attends, with its share too."""
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
        self.book.add(base | figures | {"new_tokens": self.plan.plain_tokens, "exact": exact})
        self.say(f"{base['prompt']}, {base['method']}: {figures}, {exact}")


def headline(session: Session, deadline: Deadline) -> None:
    """Every temperature beside streamed plain decoding, on one prompt after the other."""
    plan = session.plan
    for cap in plan.caps:
        memory: MemoryPlan | None = None
        for number in deadline.steps(range(plan.prompts)):
            if not session.lacking(cap, number):
                continue
            try:
                memory = session.open(cap, session.memory(cap)) if memory is None else memory
            except memory_plan.DoesNotFitError as error:
                session.say(str(error))
                session.book.note(f"cap {cap:g} GiB: {error}")
                break
            memory = session.measure(cap, memory, number)


def prefills(session: Session, deadline: Deadline) -> None:
    """The same prompts' prefill with the cache on the device, then offloaded."""
    plan, bench = session.plan, session.bench
    [cap] = plan.caps
    config = session.memory(cap).config
    shorter = max(plan.context // 16, 2 * config.retrieval.budget + 64)
    for method in (ON_CHIP, FED):
        for number in deadline.steps(range(plan.prompts)):
            base = session.sample(method, number, 0.0, cap)
            if session.book.find(method=method, prompt=base["prompt"]) is not None:
                continue
            prompt = session.library.prompt(number, plan.context)
            room = plan.context + plan.new_tokens
            if method == ON_CHIP and not bench.is_open:
                bench.open(config, room, None, ())
            elif method == FED and (not bench.is_open or bench.cycle.offloaded is None):
                session.open(cap, session.memory(cap))
            bench.feed(prompt.tokens[:shorter])
            bench.feed(prompt.tokens)
            seconds = bench.seconds["prefill"]
            session.say(f"{method}, {base['prompt']}: {seconds:.2f} s")
            session.book.add(base | {"sources": [prompt.name], "prefill_seconds": seconds})


@dataclass(frozen=True)
class Part:
    """One part: its settings at full size, and the loop."""

    full: Plan
    loop: Callable[[Session, Deadline], None] = headline


_LONG = 122_880
PARTS: dict[str, Part] = {
    "7b": Part(Plan("llama-2-7b", _LONG)),
    "8b": Part(Plan("llama-3.1-8b", _LONG)),
    "8b-512k": Part(Plan("llama-3.1-8b", 524_288, prompts=1, one_text=True, new_tokens=128)),
    # 24 GiB of weights and 75 of rows are what a host of 128 GiB can lock.
    "13b": Part(Plan("llama-2-13b", 98_304, prompts=1, weights_on_host=True)),
    "resident": Part(Plan("llama-2-7b", _LONG, caps=(80.0,), resident=0.75)),
    "caps": Part(Plan("llama-2-7b", _LONG, caps=(16.0, 48.0), prompts=1)),
    "host-attention": Part(Plan("llama-2-7b", _LONG, prompts=2, options=_WITH_THE_CPU)),
    "host-attention-8b": Part(Plan("llama-3.1-8b", _LONG, prompts=2, options=_WITH_THE_CPU)),
    "prefill": Part(Plan("llama-2-7b", _LONG, prompts=2, on_chip=True), prefills),
}

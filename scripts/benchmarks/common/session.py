"""Runs a benchmark of decoding: a part's plan lists steps, and a session measures those that its file lacks.

A benchmark declares plans, rows and what it measures beside the common figures. Every measurement is on disk
as soon as it is made: a run that was cut short goes on from there when it is called again.
"""

import argparse
import json
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

import torch

from scripts.benchmarks.common.command import (
    TINY_DRAFT,
    TINY_OPTIONS,
    TINY_SHAPES,
    device_of,
    parser,
    results_folder,
)
from scripts.benchmarks.common.compare import replay
from scripts.benchmarks.common.engine import Bench, Prompts, Run
from scripts.benchmarks.common.results import (
    OURS,
    PLAIN,
    RESULTS,
    Record,
    ResultsFile,
    Rows,
    inflated_vocabulary,
    settings_of,
)
from scripts.benchmarks.common.texts import SOURCES, Library, Source
from triforce_tree.bench.results import repeated_share
from triforce_tree.runtime.executor import free_memory

# Passes in which the stages are timed one by one.
_PROFILED = 6


@dataclass(frozen=True)
class Step:
    """A prompt, or a set of them, in the cache of one program, and the keys of what is measured there.

    Attributes:
        number: of the prompt or set.
        context: tokens of each prompt that are fed.
        setting: what differs from the plan.
        keys: of measurements; ``start`` is how many tokens of the prompts they use.
    """

    number: int
    batch: int
    context: int
    setting: Record
    keys: tuple[Record, ...]


@dataclass(frozen=True)
class Plan(ABC):
    """Settings of one part.

    Attributes:
        shape, draft_shape: what the pair is inflated to.
        cells: (batch, context) pairs.
        prompts: how many; sets of prompts where the batch is larger.
        new_tokens: of each text; ``plain_tokens`` those of autoregressive decoding.
        options: of the hierarchy.
    """

    shape: str
    cells: tuple[tuple[int, int], ...]
    draft_shape: str = "llama-68m"
    prompts: int = 5
    temperatures: tuple[float, ...] = (0.0, 0.6, 1.0)
    new_tokens: int = 256
    plain_tokens: int = 64
    options: Record = field(default_factory=dict)

    def tiny(self, **more: Any) -> Self:
        """Returns a plan for tiny models, which takes seconds on a CPU."""
        smaller = {"shape": TINY_SHAPES[self.shape], "draft_shape": TINY_DRAFT, "plain_tokens": 4}
        return replace(self, **{**smaller, "options": self.options | TINY_OPTIONS, **more})

    def as_dict(self) -> Record:
        """Returns the settings that all measurements of one part share."""
        named = {name: asdict(self)[name] for name in ("shape", "draft_shape", "options")}
        return named | {"vocabulary": inflated_vocabulary(self.shape)}

    def step(self, number: int, batch: int, context: int, setting: Record, *keys: Record) -> Step:
        """Returns a step whose keys differ from the usual one by ``keys``, else by the temperature."""
        usual = {
            "method": OURS, "prompt": f"prompt {number + 1}", "start": context, "batch": batch,
            "context": context, "new_tokens": self.new_tokens, "temperature": 0.0, "setting": setting,
        }  # fmt: skip
        changes = keys or tuple({"temperature": t} for t in self.temperatures)
        return Step(number, batch, context, setting, tuple(usual | change for change in changes))

    @abstractmethod
    def steps(self) -> Iterable[Step]:
        """Returns everything that the part measures."""


class Session(ABC):
    """A bench, and the results file that its measurements go into.

    Args:
        plan: of the part.
        file: what is measured already, and where measurements go.
        device, seed: see ``Bench``.
    """

    sources: Sequence[Source] = SOURCES

    def __init__(self, plan: Any, file: ResultsFile, device: torch.device, seed: int) -> None:
        self._start = time.perf_counter()
        self.plan, self.file, self.device, self.seed = plan, file, device, seed
        file.mine |= self.machine()
        free_memory()
        entries = inflated_vocabulary(plan.shape)
        self.say(f"{plan.shape}: inflating, with a vocabulary of {entries:,} entries ...")
        self.bench: Bench = self.new_bench()
        self.library = Library(self.bench.tokenizer, max(n for _, n in plan.cells), self.sources)

    @abstractmethod
    def machine(self) -> Record:
        """Measures the machine, and returns figures for the part's header."""

    def new_bench(self) -> Bench:
        return Bench(self.plan.shape, self.plan.draft_shape, self.device, self.seed)

    @abstractmethod
    def figures(self, prompts: Prompts, stages: dict[str, float], run: Run) -> Record:
        """Returns the figures that the benchmark adds to a measurement of our engine."""

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self._start:6.1f} s] {text}", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """Reports something that could not be measured as planned, here and in the file."""
        self.say(text)
        self.file.note(text[:500])

    def lacking(self, step: Step) -> list[Record]:
        """Returns the keys of the step's measurements that the file lacks."""
        return [key for key in step.keys if self.file.find(**key) is None]

    @abstractmethod
    def measure(self, step: Step) -> None:
        """Makes the measurements that the file lacks of a step."""

    def feed(self, step: Step, tokens: int | None = None) -> tuple[list[list[int]], list[str]]:
        """Prefills the first ``tokens`` of each prompt; returns the prompts and their sources."""
        left_out = len(self.library.left_out)
        numbers = range(step.number * step.batch, (step.number + 1) * step.batch)
        prompts = [self.library.prompt(number, step.context) for number in numbers]
        for text in self.library.left_out[left_out:]:
            self.say(f"left out, too short: {text}")
        fed = [prompt.tokens[:tokens] for prompt in prompts]
        if self.bench.feed(fed):
            where = f"{step.batch} x {len(fed[0])} tokens, {prompts[0].name}"
            self.say(f"prefill {self.bench.prefill_seconds:.2f} s, {where}")
        return fed, [prompt.name for prompt in prompts]

    def ours(self, key: Record, prompts: Prompts, sources: list[str]) -> Run:
        """Measures our engine, and the times of its stages."""
        bench, temperature, new = self.bench, key["temperature"], key["new_tokens"]
        run = bench.decode(temperature, prompts, new)
        passes = max(1, min(_PROFILED, new // (bench.program.max_draft_tokens + 1)))
        stages = bench.stage_ms(temperature, prompts, max(1, round(run.rounds)), passes)
        sample = key | run.as_dict() | {"sources": sources, "prefill_seconds": bench.prefill_seconds}
        sample["repeated_8grams"] = statistics.fmean(map(repeated_share, run.texts))
        self.add(sample | self.figures(prompts, stages, run), run)
        return run

    def add(self, sample: Record, run: Run) -> None:
        """Adds a measurement of this run to the file."""
        self.file.add(sample)
        names = ("start", "temperature", "setting", "method", "ms_per_token", "tokens_per_pass", "exact")
        said = [f"{name} {sample[name]}" for name in names if sample.get(name) is not None]
        self.say(f"{sample['prompt']}, {', '.join(said)}")

    def plain(self, key: Record, prompts: Prompts, texts: Prompts | None, method: str = PLAIN) -> None:
        """Measures plain decoding in the same program: along ``texts``, or a few tokens of its own."""
        exact: Record = {}
        if texts is not None:
            run, exact["exact"] = replay(self.bench, prompts, texts)
        else:
            run = self.bench.decode(key["temperature"], prompts, self.plan.plain_tokens, rounds=0)
        new = max(map(len, texts)) if texts is not None else self.plan.plain_tokens
        figures = {name: run.as_dict()[name] for name in ("ms_per_token", "pcie_gbps", "cpu_gbps")}
        self.add(key | figures | exact | {"method": method, "new_tokens": new, "sources": []}, run)


def parts_parser(name: str, doc: str | None, parts: Iterable[str]) -> argparse.ArgumentParser:
    """Returns the parser of a benchmark whose results file has parts, which can be measured one by one."""
    made = parser(name, doc)
    add = made.add_argument
    add("--part", choices=[*parts, "all"], nargs="+", required=True, help="what to measure")
    add("--prompts", type=int, help="prompts, or sets of them in a batch; by default as the part has it")
    add("--temperatures", type=float, nargs="+", help="0 is greedy; likewise")
    return made


def measure_parts(
    made: argparse.ArgumentParser,
    words: Sequence[str] | None,
    parts: Mapping[str, Plan],
    session: type[Session],
    rows: Rows,
    name: str,
) -> None:
    """Measures what the parts lack in the results file ``name``, and prints the rows."""
    args = made.parse_args(words)
    device = device_of(made, args.tiny)
    path = results_folder(args.out, args.tiny) / name
    begin = None if args.tiny else RESULTS / name
    for part in parts if "all" in args.part else args.part:
        plan = parts[part].tiny() if args.tiny else parts[part]
        plan = replace(plan, prompts=args.prompts or plan.prompts)
        plan = replace(plan, temperatures=tuple(args.temperatures or plan.temperatures))
        settings = settings_of(plan.as_dict(), args.seed, args.tiny)
        file = ResultsFile(path, part, settings, rows, begin)
        measure_part(plan, file, lambda p=plan, f=file: session(p, f, device, args.seed))
        print_rows(file)


def measure_part(plan: Plan, file: ResultsFile, new_session: Callable[[], Session]) -> None:
    """Measures what the part lacks; without any models where that is nothing."""
    steps = [step for step in plan.steps() if any(file.find(**key) is None for key in step.keys)]
    if not steps:
        return
    own = new_session()
    try:
        for step in steps:
            own.measure(step)
    finally:
        own.file.write()
        own.bench.close()
        # Nothing else holds the models: the next part's would not fit beside them.
        del own.bench
        free_memory()


def print_rows(file: ResultsFile) -> None:
    for row in file.rows:
        print(json.dumps({name: value for name, value in row.items() if name != "memory_plan"}))

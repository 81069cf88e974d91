"""Measures the inflated models on one GPU, one part of docs/results/on_chip_h200.jsonl at a time.

Prompts are real texts (``common/texts.py``). The models are the bundled target and draft, inflated to the
size of real models. All temperatures, autoregressive decoding and transformers' static cache decode after the
same prefill, in the same process, with graphs that were captured before. Only decoding is timed, and no text
ends early. A file with other settings or from another engine is not continued.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Self

import torch

from scripts.benchmarks.common.engine import Prompts, Run
from scripts.benchmarks.common.results import PLAIN, STATIC, Record, rows_of_samples
from scripts.benchmarks.common.session import Plan, Session, Step, measure_parts, parts_parser
from scripts.benchmarks.common.timing import read_bandwidth
from scripts.benchmarks.on_chip.roofs import roofs_ms
from scripts.benchmarks.on_chip.tables import FILE
from scripts.benchmarks.on_chip.transformers_static import static_decoding
from triforce_tree.bench.results import repeated_share
from triforce_tree.config import HierarchyConfig

LLAMA_2_7B, LLAMA_3_1_8B = "llama-2-7b", "llama-3.1-8b"
DEFAULTS: Record = {
    "levels": 3, "gamma": 20, "tree": "best-first:10,9,7,5", "budget": 8192, "chunk": 32, "recent": 256,
    "refresh": 1, "runner_ups": False, "retrieval_weight_bits": 8, "rounds": None,
}  # fmt: skip


def headline(plan: "OnChip") -> Iterator[Step]:
    """Yields a step with all temperatures for every prompt, then transformers on the first prompt."""
    for batch, context in plan.cells:
        for number in range(plan.prompts):
            yield plan.step(number, batch, context, {})
        if plan.static_tokens:
            yield plan.step(0, batch, context, {}, {"method": STATIC, "new_tokens": plan.static_tokens})


def lengths(plan: "OnChip") -> Iterator[Step]:
    """Yields steps for contexts that begin one text; the budget is at most a quarter of the context."""
    groups: dict[int, list[int]] = {}
    for _, context in sorted(plan.cells, reverse=True):
        quarter = 1 << ((context // 4).bit_length() - 1)
        groups.setdefault(min(plan.options["budget"], quarter), []).append(context)
    for budget, contexts in groups.items():
        change = {} if budget == plan.options["budget"] else {"budget": budget}
        places = [(n, t) for n in contexts for t in plan.temperatures]
        keys = [{"start": n, "context": n, "temperature": t} for n, t in places]
        for number in range(plan.prompts):
            yield plan.step(number, 1, max(contexts), change, *keys)


@dataclass(frozen=True)
class OnChip(Plan):
    """Settings of one part of the benchmark.

    Attributes:
        kind: yields the steps of the part.
        outputs: numbers of new tokens at which the time of one long decoding is recorded.
        static_tokens: new tokens with transformers' static cache; 0 leaves it out.
    """

    options: Record = field(default_factory=lambda: dict(DEFAULTS))
    kind: Callable[["OnChip"], Iterator[Step]] = headline
    outputs: tuple[int, ...] = ()
    static_tokens: int = 0

    def steps(self) -> Iterable[Step]:
        return self.kind(self)

    def beside_plain(self, key: Record) -> bool:
        """Returns whether plain decoding is also measured."""
        return True

    def tiny(self, **more: Any) -> Self:
        smaller = tuple((min(batch, 3), max(384, context // 256)) for batch, context in self.cells)
        return super().tiny(
            cells=tuple(dict.fromkeys(smaller))[-2:],
            new_tokens=24 if self.outputs else 12,
            temperatures=self.temperatures[:2],
            prompts=2 if self.prompts > 3 else 1,
            outputs=(12, 24) if self.outputs else (),
            static_tokens=min(4, self.static_tokens),
            **more,
        )


LONG = ((1, 122_880),)
_LENGTHS = tuple((1, n) for n in (4096, 8192, 16_384, 32_768, 65_536, 122_880))
# Four query heads of the 8B model share a KV head, so 16 nodes fill a tile of 64 query rows.
_8B = DEFAULTS | {"gamma": 15, "tree": "best-first:4,4,4,3"}
# The nodes and budgets of all sequences of a batch add up.
_BATCH = DEFAULTS | {"gamma": 15, "tree": "chain:4", "budget": 2048, "refresh": 0}
_TWO = (0.0, 0.6)
PARTS = {
    "7b": OnChip(LLAMA_2_7B, LONG, static_tokens=64),
    "8b": OnChip(LLAMA_3_1_8B, LONG, static_tokens=16, options=_8B),
    # Transformers has no static cache with keys and values in 8 bits.
    "8b-kv8": OnChip(LLAMA_3_1_8B, LONG, options=_8B | {"kv_bits": 8}),
    "batch": OnChip(
        LLAMA_2_7B, ((6, 19_456), (2, 57_344), (10, 12_288)), temperatures=_TWO, prompts=2,
        plain_tokens=32, options=_BATCH,
    ),
    "lengths": OnChip(LLAMA_2_7B, _LENGTHS, kind=lengths, temperatures=_TWO, prompts=2, plain_tokens=16),
    "outputs": OnChip(
        LLAMA_2_7B, LONG, temperatures=_TWO, prompts=3, new_tokens=2048, outputs=(256, 512, 1024, 2048)
    ),
}  # fmt: skip


class OnChipSession(Session):
    """A session that runs one decoding program after another, with the KV cache on the device."""

    def machine(self) -> Record:
        return {"read_bandwidth": read_bandwidth(self.device)}

    def measure(self, step: Step) -> None:
        plan = self.plan
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        config = HierarchyConfig.from_options(**(plan.options | step.setting))
        try:
            self.bench.open(config, step.batch, step.context + plan.new_tokens, plan.temperatures)
            prompts, sources = self.feed(step)
            for key in self.lacking(step):
                tokens = [prompt[: key["start"]] for prompt in prompts]
                shorter = self.bench.shortened(tokens, key["new_tokens"])
                with shorter if key["start"] < step.context else nullcontext():
                    self._cell(key, tokens, sources)
        except (ValueError, RuntimeError) as error:
            if not step.setting:
                raise
            self.note(f"{step.setting}: {error}")

    def _cell(self, key: Record, prompts: Prompts, sources: list[str]) -> None:
        plan = self.plan
        if key["method"] == STATIC:
            self._static(key, prompts, sources)
            return
        run = self.ours(key, prompts, sources)
        if plan.beside_plain(key):
            compared = plan.kind is headline and not plan.outputs and key["temperature"] == 0
            self.plain(key, prompts, run.texts if compared else None)

    def figures(self, prompts: Prompts, stages: dict[str, float], run: Run) -> Record:
        program, rounds = self.bench.program, max(1, round(run.rounds))
        new = int(run.stamps[-1][1])
        bandwidth = self.file.mine["read_bandwidth"]
        roofs = roofs_ms(program, [len(prompt) + new // 2 for prompt in prompts], bandwidth)
        refresh = program.config.retrieval.refresh
        refreshed = -(-rounds // refresh) if refresh else 1
        runs = {"draft": run.rounds, "retrieval_refresh": float(refreshed), "target": 1.0}
        runs["retrieval"] = run.rounds - refreshed
        on_gpu = self.device.type == "cuda"
        return {
            "roof_ms": roofs["plain"],
            "stages": {n: {"ms": ms, "roof_ms": roofs[n], "runs": runs[n]} for n, ms in stages.items()},
            "capture_seconds": program.capture_seconds,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
        }

    def add(self, sample: Record, run: Run) -> None:
        """Adds a measurement; one long decoding gives a measurement at each length."""
        if sample["method"] == PLAIN or not self.plan.outputs:
            super().add(sample, run)
            return
        for new in self.plan.outputs:
            seconds, had = next(s for s in run.stamps if s[1] >= min(new, run.stamps[-1][1]))
            repeated = statistics.fmean(repeated_share(text[:new]) for text in run.texts)
            read = {"new_tokens": new, "ms_per_token": 1e3 * seconds / had, "repeated_8grams": repeated}
            super().add(sample | read, run)

    def _static(self, key: Record, prompts: Prompts, sources: list[str]) -> None:
        """Measures transformers with a static cache in our memory; a failure is only noted."""
        bench, new, compiled = self.bench, key["new_tokens"], self.device.type == "cuda"
        # It runs first, because torch.compile's graphs clear cuBLAS workspaces that our captured stages may
        # use.
        plain = bench.decode(0.0, prompts, new, rounds=0)
        try:
            found = static_decoding(bench.target, bench.program.store, prompts, new, compiled)
        except Exception as error:  # it is transformers' code, and our figures do not depend on it
            self.note(f"{STATIC}: {type(error).__name__}: {error}")
            return
        both = zip(chain(*found.pop("tokens")), chain(*plain.texts), strict=True)
        found["same_tokens"] = statistics.fmean(a == b for a, b in both)
        super().add(key | found | {"sources": sources}, plain)


def rows(part: str, header: Record, samples: list[Record]) -> list[Record]:
    """Returns rows that compare with the faster of two baselines."""
    return rows_of_samples(part, header, samples, (PLAIN, STATIC))


def main(words: Sequence[str] | None = None) -> None:
    made = parts_parser("benchmarks on_chip", __doc__, PARTS)
    measure_parts(made, words, PARTS, OnChipSession, rows, FILE)

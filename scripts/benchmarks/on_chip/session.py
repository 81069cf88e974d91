"""Measurements of one part: what is run for each prompt, and what a measurement holds."""

import hashlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from scripts.benchmarks.common.command import dtype_of
from scripts.benchmarks.common.engine import Bench, Run, roofs_ms
from scripts.benchmarks.common.results import OURS, ResultsFile
from scripts.benchmarks.common.texts import Library
from scripts.benchmarks.common.timing import read_bandwidth
from scripts.benchmarks.on_chip.rows import PLAIN, STATIC
from scripts.benchmarks.on_chip.transformers_static import static_decoding
from triforce_tree.config import HierarchyConfig
from triforce_tree.eval.results import repeated_share

# Passes in which the stages are timed one by one.
_PROFILED = 6


@dataclass(frozen=True)
class Batch:
    """Prompts that stand in the full cache, and how their measurements are named."""

    name: str
    sources: list[str]
    context: int
    tokens: list[list[int]]


class Session:
    """A bench and the results file it writes into.

    Args:
        shape, draft_shape: of the pair.
        options: of the hierarchy, before any change.
        file: what is measured already, and where measurements go.
        device, seed: see ``Bench``.
        context: tokens of the longest prompt.
    """

    def __init__(
        self,
        shape: str,
        draft_shape: str,
        options: dict[str, Any],
        file: ResultsFile,
        device: torch.device,
        seed: int,
        context: int,
    ) -> None:
        self._start = time.perf_counter()
        self.file, self.options, self.device = file, options, device
        self.bandwidth = read_bandwidth(device)
        file.mine["read_bandwidth"] = self.bandwidth
        self._say(f"{shape}: read bandwidth {self.bandwidth / 1e12:.3f} TB/s, inflating ...")
        self.bench = Bench(shape, draft_shape, device, dtype_of(device), seed)
        self._library = Library(self.bench.tokenizer, context)
        self._say("ready")

    def _say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self._start:6.1f} s] {text}", file=sys.stderr, flush=True)

    def open(
        self, change: dict[str, Any], batch: int, max_seq_len: int, temperatures: Sequence[float]
    ) -> None:
        """The program for one setting."""
        start = time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.bench.open(
            HierarchyConfig.from_options(**(self.options | change)), batch, max_seq_len, temperatures
        )
        took = time.perf_counter() - start
        if took > 0.1:
            self._say(f"{change or 'default'}, batch {batch}, room {max_seq_len}: captured in {took:.1f} s")

    def feed(self, number: int, batch: int, context: int) -> Batch:
        """Prompt ``number``, or set of prompts, into the full cache."""
        before = len(self._library.left_out)
        prompts = [self._library.prompt(number * batch + b, context) for b in range(batch)]
        for text in self._library.left_out[before:]:
            self._say(f"left out, too short: {text}")
        tokens = [p.tokens for p in prompts]
        if self.bench.feed(tokens):
            took = self.bench.prefill_seconds
            self._say(f"{_name(number)}, {batch} x {context}: read in {took:.1f} s; {prompts[0].name}")
        return Batch(_name(number), [p.name for p in prompts], context, tokens)

    @contextmanager
    def shortened(self, batch: Batch, start: int, new: int, own_context: bool = False) -> Iterator[Batch]:
        """The first ``start`` tokens of the prompts, which are in the cache already.

        Args:
            own_context: count as a context of its own, not as another prompt of the same context.
        """
        tokens = [t[:start] for t in batch.tokens]
        name = batch.name if own_context else _named(batch.name, start, batch.context)
        context = start if own_context else batch.context
        with self.bench.standing(tokens, new):
            yield replace(batch, name=name, tokens=tokens, context=context)

    def wanted(
        self,
        number: int,
        batch: int,
        context: int,
        temperature: float,
        change: dict[str, Any] | None = None,
        start: int | None = None,
        **more: int,
    ) -> bool:
        """Whether our engine has still to be measured here."""
        prompt = _named(_name(number), start or context, context)
        place = {"batch": batch, "context": context, "temperature": temperature, "setting": change or {}}
        return self.file.find(method=OURS, prompt=prompt, **place, **more) is None

    def ours(
        self, texts: Batch, new: int, temperature: float, change: dict[str, Any], read_at: Sequence[int] = ()
    ) -> Run:
        """Our engine, and the time of its stages."""
        run = self.bench.decode(temperature, texts.tokens, new)
        program = self.bench.program
        rounds = max(1, round(run.rounds))
        passes = max(1, min(_PROFILED, new // (program.max_draft_tokens + 1)))
        stages = self.bench.stage_ms(temperature, texts.tokens, rounds, passes)
        roofs = roofs_ms(program, [len(t) + new // 2 for t in texts.tokens], self.bandwidth)
        runs = {"draft": run.rounds, "retrieval_refresh": 1.0, "retrieval": run.rounds - 1, "target": 1.0}
        if program.config.retrieval.refresh:
            chosen = -(-rounds // program.config.retrieval.refresh)
            runs |= {"retrieval_refresh": float(chosen), "retrieval": run.rounds - chosen}
        levels = run.levels
        sample = {
            **self._cell(texts, temperature, change),
            "method": OURS,
            "roof_ms": roofs["plain"],
            "tokens_per_pass": levels[-1].mean_accepted_length,
            "rounds_per_pass": run.rounds,
            "pass_ms": 1e3 * run.stamps[-1][0] / len(run.stamps),
            "acceptance": {v.name: v.acceptance_rate for v in levels if v.acceptance_rate is not None},
            "mean_accepted_length": {v.name: v.mean_accepted_length for v in levels[1:] if v.forwards},
            "stages": {n: {"ms": ms, "roof_ms": roofs[n], "runs": runs[n]} for n, ms in stages.items()},
            "prefill_seconds": self.bench.prefill_seconds,
            "capture_seconds": program.capture_seconds,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else 0.0,
        }
        for tokens in read_at or [new]:
            seconds, had = next(s for s in run.stamps if s[1] >= min(tokens, run.stamps[-1][1]))
            written = {
                "new_tokens": tokens,
                "ms_per_token": 1e3 * seconds / had,
                "repeated_8grams": statistics.fmean(repeated_share(t[:tokens]) for t in run.texts),
                "tokens_sha256": hashlib.sha256(repr([t[:tokens] for t in run.texts]).encode()).hexdigest(),
            }
            self.file.add(sample | written)
        self._say(
            f"{texts.name} T={temperature:g} {change or ''}: {run.ms_per_token:.3f} ms a token, "
            f"{levels[-1].mean_accepted_length:.2f} a pass, {run.rounds:.2f} rounds, "
            + ", ".join(f"{name} {ms:.2f} ms" for name, ms in stages.items())
        )
        return run

    def plain(self, texts: Batch, new: int, temperature: float, ours: Run | None) -> None:
        """Plain decoding in the same program: along the tokens of ``ours``, or a few of its own."""
        sample = {**self._cell(texts, temperature, {}), "method": PLAIN}
        if ours is None:
            ms = self.bench.decode(temperature, texts.tokens, new, rounds=0).ms_per_token
            self.file.add(sample | {"new_tokens": new, "ms_per_token": ms})
            self._say(f"{texts.name} T={temperature:g} plain: {ms:.3f} ms a token")
            return
        ms, found = self.bench.replay(texts.tokens, ours.texts)
        length, exact = max(map(len, ours.texts)), found.as_dict()
        self.file.add(sample | {"new_tokens": length, "ms_per_token": ms, "exact": exact})
        self._say(f"{texts.name} T={temperature:g} plain: {ms:.3f} ms a token; {exact}")

    def static(self, texts: Batch, new: int) -> None:
        """transformers' static cache over our memory; a failure is noted and ends nothing."""
        sample = {**self._cell(texts, 0.0, {}), "method": STATIC, "new_tokens": new}
        compiled = self.device.type == "cuda"
        try:
            found = static_decoding(
                self.bench.target, self.bench.program.store, texts.tokens, new, compiled=compiled
            )
        except Exception as error:  # foreign code on a borrowed cache: whatever it is, our figures stand
            self.failed(f"{STATIC}: {type(error).__name__}: {error}")
            return
        plain = self.bench.decode(0.0, texts.tokens, new, rounds=0).texts
        pairs = [z for a, b in zip(found.pop("tokens"), plain, strict=True) for z in zip(a, b, strict=True)]
        found["same_tokens"] = sum(a == b for a, b in pairs) / len(pairs)
        self.file.add(sample | found)
        self._say(f"{STATIC}: {found}")

    def failed(self, text: str) -> None:
        """Something could not be measured: said here and in the file."""
        self._say(text)
        self.file.note(text[:500])

    @staticmethod
    def _cell(texts: Batch, temperature: float, change: dict[str, Any]) -> dict[str, Any]:
        place = {"prompt": texts.name, "sources": texts.sources, "batch": len(texts.tokens)}
        return place | {"context": texts.context, "temperature": temperature, "setting": change}


def _name(number: int) -> str:
    return f"prompt {number + 1}"


def _named(name: str, start: int, context: int) -> str:
    return name if start == context else f"{name}, first {start} tokens"

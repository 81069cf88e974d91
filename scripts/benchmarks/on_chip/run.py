"""Speed of the inflated pair on one GPU: docs/results/on_chip_h200.json, one part at a time.

Prompts are real texts (``common/texts.py``), models the embedded pair inflated to real size. Each prompt is
read once; all temperatures, plain decoding and transformers' static cache then decode behind it, in the same
process, from captured graphs that were made before. Times are of decoding alone, texts have no early end. A
call measures what the part lacks until its time is over, and writes after each prompt; a file that was made
with other settings or another engine is not continued.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from scripts.benchmarks.common.command import (
    TINY_DRAFT,
    TINY_OPTIONS,
    TINY_SHAPES,
    device_of,
    parts_parser,
    results_folder,
)
from scripts.benchmarks.common.deadline import Deadline
from scripts.benchmarks.common.results import RESULTS, ResultsFile, settings_of
from scripts.benchmarks.on_chip.rows import FILE, STATIC, rows
from scripts.benchmarks.on_chip.session import Session

LLAMA_2_7B, LLAMA_3_1_8B = "llama-2-7b", "llama-3.1-8b"
DEFAULTS: dict[str, Any] = {
    "levels": 3, "gamma": 20, "tree": "best-first:10,9,7,5", "budget": 8192, "chunk": 32, "recent": 256,
    "refresh": 1, "runner_ups": False, "retrieval_weight_bits": 8, "rounds": None,
}  # fmt: skip
_TREES = ("best-first:4,4,4,3", "best-first:8,6,4", "sequoia:16x4", "chain:4", "chain:6")
_CHANGES: dict[str, tuple[Any, ...]] = {
    "rounds": (2, 3, 4, 5, 6, 8), "refresh": (0, 2), "gamma": (8, 12, 16, 28), "tree": _TREES,
    "retrieval_weight_bits": (16, 4), "budget": (1024, 2048, 4096), "chunk": (8, 16, 64),
    "runner_ups": (True,), "levels": (2,),
}  # fmt: skip
ABLATIONS: tuple[dict[str, Any], ...] = (
    {}, *({name: value} for name, values in _CHANGES.items() for value in values)
)  # fmt: skip
# Seconds to keep for compiling and timing transformers' static cache.
_STATIC_SECONDS = 120.0
# Tokens between the places of one text that ablations start from.
_APART = 2048


@dataclass(frozen=True)
class Plan:
    """Settings of one part.

    Attributes:
        shape, draft_shape: what the pair is inflated to.
        cells: (batch, context) pairs.
        new_tokens: of each text; ``plain_tokens`` those of plain decoding where nothing is compared.
        temperatures, prompts: how many of what; prompts are sets of prompts where the batch is larger.
        options: of the hierarchy.
        ablations: changes of them, one at a time.
        outputs: lengths at which the time of one long decoding is read off.
        static_tokens: of transformers' static cache; 0 leaves it out.
    """

    shape: str
    cells: tuple[tuple[int, int], ...]
    draft_shape: str = "llama-68m"
    new_tokens: int = 256
    plain_tokens: int = 64
    temperatures: tuple[float, ...] = (0.0, 0.6, 1.0)
    prompts: int = 5
    options: dict[str, Any] = field(default_factory=lambda: dict(DEFAULTS))
    ablations: tuple[dict[str, Any], ...] = ()
    outputs: tuple[int, ...] = ()
    static_tokens: int = 0

    def changed(self, args: argparse.Namespace) -> "Plan":
        """With what a user asks for; None leaves a setting as it is."""
        ablations = tuple(a for a in self.ablations if args.only is None or not a or set(a) & set(args.only))
        return replace(
            self,
            options=self.options | dict(args.set),
            prompts=args.prompts or self.prompts,
            new_tokens=args.new_tokens or self.new_tokens,
            temperatures=tuple(args.temperatures or self.temperatures),
            ablations=ablations,
            static_tokens=0 if args.no_static else self.static_tokens,
        )

    def tiny(self) -> "Plan":
        """In seconds on a CPU; of the ablations the first of each setting that fits short prompts."""
        smaller = tuple((min(batch, 3), max(384, context // 256)) for batch, context in self.cells)
        first = {next(iter(change), ""): change for change in reversed(self.ablations)}
        first.pop("budget", None)
        return replace(
            self,
            shape=TINY_SHAPES[self.shape],
            draft_shape=TINY_DRAFT,
            cells=tuple(dict.fromkeys(smaller))[-2:],
            new_tokens=24 if self.outputs else 12,
            plain_tokens=4,
            temperatures=self.temperatures[:2],
            prompts=2 if self.prompts > 3 else 1,
            options=self.options | TINY_OPTIONS,
            ablations=tuple(reversed(first.values())),
            outputs=(12, 24) if self.outputs else (),
            static_tokens=min(4, self.static_tokens),
        )

    def as_dict(self) -> dict[str, Any]:
        """What must agree for measurements to stand side by side."""
        return {"shape": self.shape, "draft_shape": self.draft_shape, "options": self.options}


def headline(session: Session, plan: Plan, deadline: Deadline) -> None:
    """Every temperature beside plain decoding and transformers, on one prompt after the other."""
    for batch, context in plan.cells:
        found = session.file.find(method=STATIC, batch=batch, context=context)
        static = bool(plan.static_tokens) and found is None
        opened = False
        for number in deadline.steps(range(plan.prompts), _STATIC_SECONDS * static):
            wanted = [t for t in plan.temperatures if session.wanted(number, batch, context, t)]
            if not wanted:
                continue
            if not opened:
                session.open({}, batch, context + plan.new_tokens, plan.temperatures)
                opened = True
            texts = session.feed(number, batch, context)
            for temperature in wanted:
                ours = session.ours(texts, plan.new_tokens, temperature, {})
                session.plain(texts, plan.plain_tokens, temperature, ours if temperature == 0 else None)
        if static and deadline.left() > 0.75 * _STATIC_SECONDS:
            if not opened:
                session.open({}, batch, context + plan.new_tokens, plan.temperatures[:1])
            session.static(session.feed(0, batch, context), plan.static_tokens)


def ablations(session: Session, plan: Plan, deadline: Deadline) -> None:
    """One setting after the other, from several places of the same text."""
    [(batch, context)] = plan.cells
    temperature = plan.temperatures[0]
    max_seq_len = context + plan.new_tokens
    for change in deadline.steps(plan.ablations):
        starts = [context - min(_APART, context // 16) * i for i in range(plan.prompts)]
        starts = [s for s in starts if session.wanted(0, batch, context, temperature, change, s)]
        if not starts:
            continue
        try:
            session.open(change, batch, max_seq_len, [temperature])
            texts = session.feed(0, batch, context)
            for start in starts:
                with session.shortened(texts, start, plan.new_tokens) as shorter:
                    session.ours(shorter, plan.new_tokens, temperature, change)
                    if not change:
                        session.plain(shorter, plan.plain_tokens, temperature, None)
        except (ValueError, RuntimeError) as error:
            session.failed(f"{change}: {error}")


def lengths(session: Session, plan: Plan, deadline: Deadline) -> None:
    """Contexts that are beginnings of one text; the budget is at most a quarter of them."""
    groups: dict[int, list[int]] = {}
    for _, context in sorted(plan.cells, reverse=True):
        quarter = 1 << ((context // 4).bit_length() - 1)
        groups.setdefault(min(plan.options["budget"], quarter), []).append(context)
    for budget, number in deadline.steps([(budget, n) for budget in groups for n in range(plan.prompts)]):
        change = {} if budget == plan.options["budget"] else {"budget": budget}
        places = [(context, t) for context in groups[budget] for t in plan.temperatures]
        wanted = [(context, t) for context, t in places if session.wanted(number, 1, context, t, change)]
        if not wanted:
            continue
        longest = max(groups[budget])
        session.open(change, 1, longest + plan.new_tokens, plan.temperatures)
        texts = session.feed(number, 1, longest)
        for context, temperature in wanted:
            with session.shortened(texts, context, plan.new_tokens, own_context=True) as shorter:
                session.ours(shorter, plan.new_tokens, temperature, change)
                session.plain(shorter, plan.plain_tokens, temperature, None)


def outputs(session: Session, plan: Plan, deadline: Deadline) -> None:
    """One long decoding, whose time is read off at several lengths."""
    [(batch, context)] = plan.cells
    longest = max(plan.outputs)
    for number in deadline.steps(range(plan.prompts)):
        wanted = [
            t for t in plan.temperatures if session.wanted(number, batch, context, t, new_tokens=longest)
        ]
        if not wanted:
            continue
        session.open({}, batch, context + longest, plan.temperatures)
        texts = session.feed(number, batch, context)
        for temperature in wanted:
            session.ours(texts, longest, temperature, {}, read_at=plan.outputs)
            session.plain(texts, plan.plain_tokens, temperature, None)


@dataclass(frozen=True)
class Part:
    """One part: its settings at full size, and the loop."""

    full: Plan
    loop: Callable[[Session, Plan, Deadline], None]


_LONG = ((1, 122_880),)
_LENGTHS = tuple((1, n) for n in (4096, 8192, 16_384, 32_768, 65_536, 122_880))
_ABLATION: dict[str, Any] = {
    "cells": _LONG, "temperatures": (0.0,), "prompts": 4, "plain_tokens": 32, "ablations": ABLATIONS
}  # fmt: skip
# Four query heads of the 8B share a KV head, so 16 nodes fill one tile of 64.
_8B = DEFAULTS | {"gamma": 15, "tree": "best-first:4,4,4,3"}
# Nodes of all texts add up, and so do their budgets.
_BATCH = DEFAULTS | {"gamma": 15, "tree": "chain:4", "budget": 2048, "refresh": 0}
PARTS: dict[str, Part] = {
    "7b": Part(Plan(LLAMA_2_7B, _LONG, static_tokens=64), headline),
    "8b": Part(Plan(LLAMA_3_1_8B, _LONG, static_tokens=16, options=_8B), headline),
    "batch": Part(
        Plan(
            LLAMA_2_7B, ((6, 19_456), (2, 57_344), (10, 12_288)), temperatures=(0.0, 0.6), prompts=2,
            plain_tokens=32, options=_BATCH,
        ),
        headline,
    ),
    "ablations-7b": Part(Plan(LLAMA_2_7B, **_ABLATION), ablations),
    "ablations-8b": Part(Plan(LLAMA_3_1_8B, **_ABLATION), ablations),
    "lengths": Part(
        Plan(LLAMA_2_7B, _LENGTHS, temperatures=(0.0, 0.6), prompts=2, plain_tokens=16), lengths
    ),
    "outputs": Part(
        Plan(LLAMA_2_7B, _LONG, temperatures=(0.0, 0.6), prompts=3, outputs=(256, 512, 1024, 2048)), outputs
    ),
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    made = parts_parser("benchmarks on_chip", __doc__, list(PARTS), seconds=540)
    made.add_argument("--new-tokens", type=int, help="tokens of each text")
    made.add_argument("--only", nargs="*", help="of the ablations these settings alone")
    made.add_argument(
        "--no-static", "--no-rival", action="store_true", help="leave out transformers' static cache"
    )
    return made


def plans(args: argparse.Namespace) -> Iterator[tuple[str, Plan]]:
    for name in PARTS if "all" in args.part else args.part:
        full = PARTS[name].full
        yield name, (full.tiny() if args.tiny else full).changed(args)


def main(words: Sequence[str] | None = None) -> None:
    made = parser()
    args = made.parse_args(words)
    device = device_of(made, args.tiny)
    path = results_folder(args.out, args.tiny) / FILE
    end = time.perf_counter() + args.seconds
    done = {}
    for name, plan in plans(args):
        settings = settings_of(plan.as_dict(), args.seed, args.tiny)
        begin = None if args.tiny else RESULTS / FILE
        file = ResultsFile(path, name, settings, rows, ["engine"], args.fresh, begin)
        deadline = Deadline(end - time.perf_counter())
        longest = max(context for _, context in plan.cells)
        session = Session(plan.shape, plan.draft_shape, plan.options, file, device, args.seed, longest)
        PARTS[name].loop(session, plan, deadline)
        file.write()
        session.bench.close()
        shown = ("batch", "context", "temperature", "setting", "ms_per_token", "speedup")
        done[name] = [{k: row[k] for k in shown} for row in file.rows]
    print(json.dumps(done))

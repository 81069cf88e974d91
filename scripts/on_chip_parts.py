"""What scripts/bench_on_chip.py measures: shapes, lengths and settings of each part, and its loop."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from bench_command import TINY_DRAFT, TINY_OPTIONS, TINY_SHAPES
from deadline import Deadline
from measurements import Book
from on_chip_results import STATIC
from on_chip_session import Session

LLAMA_2_7B, LLAMA_3_1_8B = "llama-2-7b", "llama-3.1-8b"
DEFAULTS: dict[str, Any] = {
    "levels": 3,
    "gamma": 20,
    "tree": "best-first:10,9,7,5",
    "budget": 8192,
    "chunk": 32,
    "recent": 256,
    "refresh": 1,
    "leaves": False,
    "middle_bits": 8,
    "rounds": None,
}
ABLATIONS: tuple[dict[str, Any], ...] = (
    {},
    *({"rounds": n} for n in (2, 3, 4, 5, 6, 8)),
    *({"refresh": n} for n in (0, 2)),
    *({"gamma": n} for n in (8, 12, 16, 28)),
    *(
        {"tree": tree}
        for tree in ("best-first:4,4,4,3", "best-first:8,6,4", "sequoia:16x4", "chain:4", "chain:6")
    ),
    *({"middle_bits": n} for n in (16, 4)),
    *({"budget": n} for n in (1024, 2048, 4096)),
    *({"chunk": n} for n in (8, 16, 64)),
    {"leaves": True},
    {"levels": 2},
)
# Seconds to keep for compiling and timing transformers' static cache.
_RIVAL_SECONDS = 120.0
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
        rival_tokens: of transformers' static cache; 0 leaves it out.
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
    rival_tokens: int = 0

    def changed(
        self,
        options: dict[str, Any],
        prompts: int | None,
        new_tokens: int | None,
        temperatures: Sequence[float] | None,
        only: Sequence[str] | None,
    ) -> "Plan":
        """With what a user asks for; None leaves a setting as it is."""
        ablations = tuple(a for a in self.ablations if only is None or not a or set(a) & set(only))
        return replace(
            self,
            options=self.options | options,
            prompts=prompts or self.prompts,
            new_tokens=new_tokens or self.new_tokens,
            temperatures=tuple(temperatures) if temperatures else self.temperatures,
            ablations=ablations,
        )

    def smoke(self) -> "Plan":
        """The same in seconds on a CPU."""
        smaller = tuple((min(batch, 3), max(384, context // 256)) for batch, context in self.cells)
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
            ablations=tuple(_smoke_ablations(self.ablations)),
            outputs=(12, 24) if self.outputs else (),
            rival_tokens=min(4, self.rival_tokens),
        )

    def as_dict(self) -> dict[str, Any]:
        """What must agree for measurements to stand side by side."""
        return {"shape": self.shape, "draft_shape": self.draft_shape, "options": self.options}


def _smoke_ablations(ablations: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The first change of each setting, as far as it fits short prompts."""
    seen: set[str] = set()
    for change in ablations:
        name = next(iter(change), "")
        if name not in seen and name != "budget":
            seen.add(name)
            yield change


def headline(session: Session, plan: Plan, deadline: Deadline) -> None:
    """Every temperature beside plain decoding and transformers, on one prompt after the other."""
    for batch, context in plan.cells:
        rival = bool(plan.rival_tokens) and session.lacks(STATIC, batch, context)
        numbers = range(plan.prompts)
        opened = False
        for number in deadline.steps(numbers, _RIVAL_SECONDS * rival):
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
        if rival and deadline.left() > 0.75 * _RIVAL_SECONDS:
            if not opened:
                session.open({}, batch, context + plan.new_tokens, plan.temperatures[:1])
            session.rival(session.feed(0, batch, context), plan.rival_tokens)


def ablations(session: Session, plan: Plan, deadline: Deadline) -> None:
    """One setting after the other, from several places of the same rows."""
    [(batch, context)] = plan.cells
    temperature = plan.temperatures[0]
    room = context + plan.new_tokens
    for change in deadline.steps(plan.ablations):
        starts = [context - min(_APART, context // 16) * i for i in range(plan.prompts)]
        starts = [s for s in starts if session.wanted(0, batch, context, temperature, change, s)]
        if not starts:
            continue
        try:
            session.open(change, batch, room, [temperature])
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
        groups.setdefault(min(plan.options["budget"], _power_of_two(context // 4)), []).append(context)
    steps = [(budget, number) for budget in groups for number in range(plan.prompts)]
    for budget, number in deadline.steps(steps):
        change = {} if budget == plan.options["budget"] else {"budget": budget}
        wanted = [
            (context, t)
            for context in groups[budget]
            for t in plan.temperatures
            if session.wanted(number, 1, context, t, change)
        ]
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
            t for t in plan.temperatures if session.wanted(number, batch, context, t, {}, new_tokens=longest)
        ]
        if not wanted:
            continue
        session.open({}, batch, context + longest, plan.temperatures)
        texts = session.feed(number, batch, context)
        for temperature in wanted:
            session.ours(texts, longest, temperature, {}, read_at=plan.outputs)
            session.plain(texts, plan.plain_tokens, temperature, None)


def _power_of_two(most: int) -> int:
    return 1 << (most.bit_length() - 1)


@dataclass(frozen=True)
class Part:
    """One part: its settings at full size, and the loop."""

    full: Plan
    loop: Callable[[Session, Plan, Deadline], None]

    def plan(self, smoke: bool) -> Plan:
        return self.full.smoke() if smoke else self.full

    def measure(
        self, plan: Plan, book: Book, device: torch.device, seed: int, seconds: float, rival: bool
    ) -> None:
        deadline = Deadline(seconds)
        session = Session(plan.shape, plan.draft_shape, plan.options, book, device, seed)
        session.read_texts(max(context for _, context in plan.cells))
        self.loop(session, plan if rival else replace(plan, rival_tokens=0), deadline)
        book.write()
        session.close()


_LONG = ((1, 122_880),)
_ABLATION: dict[str, Any] = {
    "cells": _LONG, "temperatures": (0.0,), "prompts": 4, "plain_tokens": 32, "ablations": ABLATIONS
}  # fmt: skip
PARTS: dict[str, Part] = {
    "7b": Part(Plan(LLAMA_2_7B, _LONG, rival_tokens=64), headline),
    # Four query heads share a KV head, so 16 rows fill one tile of 64.
    "8b": Part(
        Plan(
            LLAMA_3_1_8B, _LONG, rival_tokens=16,
            options=DEFAULTS | {"gamma": 15, "tree": "best-first:4,4,4,3"},
        ),
        headline,
    ),
    "batch": Part(
        Plan(
            LLAMA_2_7B, ((6, 19_456), (2, 57_344), (10, 12_288)), temperatures=(0.0, 0.6), prompts=2,
            plain_tokens=32,
            # Rows of all texts add up, and so do their budgets.
            options=DEFAULTS | {"gamma": 15, "tree": "chain:4", "budget": 2048, "refresh": 0},
        ),
        headline,
    ),
    "ablations-7b": Part(Plan(LLAMA_2_7B, **_ABLATION), ablations),
    "ablations-8b": Part(Plan(LLAMA_3_1_8B, **_ABLATION), ablations),
    "lengths": Part(
        Plan(
            LLAMA_2_7B,
            tuple((1, n) for n in (4096, 8192, 16_384, 32_768, 65_536, 122_880)),
            temperatures=(0.0, 0.6), prompts=2, plain_tokens=16,
        ),
        lengths,
    ),
    "outputs": Part(
        Plan(LLAMA_2_7B, _LONG, temperatures=(0.0, 0.6), prompts=3, outputs=(256, 512, 1024, 2048)), outputs
    ),
}  # fmt: skip

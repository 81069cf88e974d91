"""Calls that end early, at any point, leave nothing wrong behind: later texts are those of a fresh engine."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from api_cases import CHUNKED, CHUNKED_DRAFTED, Collect
from families import perturbed, prompt_of, tiny
from program_cases import reference
from torch import Tensor, nn
from transformers import LogitsProcessor, StoppingCriteria

import triforce_tree
from triforce_tree import Engine
from triforce_tree.generation.batch.joining import Fits, Joined
from triforce_tree.generation.output import GenerateOutput
from triforce_tree.kv.shared.pooled import PooledStore

NEW = 6


class Left(Exception):
    """What a callback raises."""


class Faults:
    """Raises at the n-th of the places that it is asked at."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.left, self.error, self.raised = at, error, False

    def __call__(self, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            self.raised = True
            raise self.error


class Wire(nn.Module):
    """An activation that asks for a fault, as an out-of-memory error or Ctrl-C comes in a forward."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation
        self.fault: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.fault()
        return self.activation(x)


class Streamer(Collect):
    def __init__(self, fault: Callable[..., None], scores: bool) -> None:
        super().__init__()
        self._fault = fault
        if scores:
            self.put_scores = fault

    def put(self, value: Tensor) -> None:
        self._fault()
        super().put(value)

    def end(self) -> None:
        self._fault()
        super().end()


class Coming:
    """Prompts that join; asks for a fault at one of its methods."""

    tokens = None

    def __init__(self, prompts: list[list[int]], rows: int, fault: Callable[[str], None]) -> None:
        self.waiting, self.rows, self.fault = list(prompts), rows, fault
        self.outputs: dict[int, GenerateOutput] = {}

    def wanted(self, fits: Fits) -> int:
        self.fault("wanted")
        return self.rows if self.waiting and fits(self.waiting[0], NEW) else 0

    def next(self, fits: Fits) -> Joined | None:
        self.fault("next")
        if not self.waiting or not fits(self.waiting[0], NEW):
            return None
        return Joined(self.waiting.pop(0), NEW)

    def ended(self, number: int, output: GenerateOutput) -> None:
        self.fault("ended")
        self.outputs[number] = output


class Criterion(StoppingCriteria):
    def __init__(self, fault: Callable[..., None]) -> None:
        self._fault = fault

    def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self._fault()
        return torch.zeros(len(ids), dtype=torch.bool)


class Processor(LogitsProcessor):
    def __init__(self, fault: Callable[..., None]) -> None:
        self._fault = fault

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self._fault()
        return scores


def wired() -> tuple[Any, Wire]:
    target = tiny("llama-gqa")
    wire = Wire(target.model.layers[1].mlp.act_fn)
    target.model.layers[1].mlp.act_fn = wire
    return target, wire


TEXT = prompt_of(200)
# They branch within and between chunks of 16 tokens.
PROMPTS = [
    TEXT[:100], TEXT[:70] + TEXT[90:120], TEXT[:70] + TEXT[120:141], TEXT[:33], TEXT[::-1][:90],
    TEXT[::-1][:50] + TEXT[:40], [7], TEXT[:48], TEXT[:49], TEXT[:17] + TEXT[50:100],
]  # fmt: skip
PLACES = ["progress", "put", "scores", "end", "criterion", "processor", "wanted", "next", "ended", "forward"]
ERRORS = [Left("a client left"), KeyboardInterrupt(), torch.OutOfMemoryError("short")]
KINDS = {
    "plain": lambda target: triforce_tree.load(target, levels=1, **CHUNKED),
    "two levels": lambda target: triforce_tree.load(
        target, perturbed(target, 0.05), levels=2, rounds=1, **CHUNKED_DRAFTED
    ),
    "three levels": lambda target: triforce_tree.load(
        target, perturbed(target, 0.05), levels=3, rounds=2, **CHUNKED_DRAFTED
    ),
    "suffix matching": lambda target: triforce_tree.load(target, levels=2, rounds=1, lookup=3, **CHUNKED),
    "earlier texts": lambda target: triforce_tree.load(target, levels=1, prefix_cache="1MiB", **CHUNKED),
}


def call(engine: Engine, wire: Wire, draw: random.Random, place: str, fault: Any) -> list[tuple[list[int], list[int]]]:
    """A call with a fault at one of the places; returns prompts and texts of what has ended."""
    at = {where: fault if where == place else (lambda *_: None) for where in PLACES}
    prompts = draw.choices(PROMPTS, k=draw.randrange(1, 4))
    joins = place in ("wanted", "next", "ended") or draw.random() < 0.6
    later = draw.choices(PROMPTS, k=draw.randrange(4)) if joins else []
    coming = Coming(later, draw.randrange(1, 5), lambda where: at[where]())
    options: dict[str, Any] = {}
    if place in ("put", "end", "scores"):
        which = draw.randrange(len(prompts))
        options["streamer"] = [
            Streamer(fault if n == which else lambda *_: None, place == "scores") for n in range(len(prompts))
        ]
        options["logprobs"] = place == "scores"
    if place == "criterion":
        options["stopping_criteria"] = [Criterion(fault)]
    if place == "processor":
        options["logits_processor"] = [Processor(fault)]
    wire.fault = at["forward"]
    if joins:
        options["joining"] = coming
    try:
        out = engine.generate(
            prompts, max_new_tokens=NEW, do_sample=False, progress=at["progress"],
            max_batch=draw.choice([None, 1, 2, 3, 4]) if not joins else draw.choice([2, 3, 4]), **options,
        )  # fmt: skip
    finally:
        wire.fault = lambda: None
    found = [(p, row[-NEW:].tolist()) for p, row in zip(prompts, out.sequences, strict=True)]
    for number, output in coming.outputs.items():
        if number >= len(prompts):
            found.append((output.sequences[0, :-NEW].tolist(), output.sequences[0, -NEW:].tolist()))
    return found


def check_slots(engine: Engine, target: Any) -> None:
    """What the cache claims to hold is what the model computes, nothing overlaps, and nobody uses it."""
    program = engine.hierarchy.last_program
    if program is None:
        return
    store, cached = program.store, program.cache.cached
    texts = [tokens[:whole] for tokens, whole in zip(cached.held, cached.whole, strict=True)]
    if isinstance(store, PooledStore):
        pool, taken = store.pool, set()
        spans = [(block.place, block.end) for block in pool.blocks()]
        for start, stop in spans:
            assert 0 <= start < stop <= store.slots
            assert taken.isdisjoint(range(start, stop))
            taken.update(range(start, stop))
        for block in pool.blocks():
            assert block.written
            assert not block.users
            if not block.children:
                tokens, now = [], block
                places = []
                while now is not None:
                    tokens = [*now.tokens, *tokens]
                    places = [*range(now.place, now.end), *places]
                    now = now.parent
                check_text(store.whole, 0, tokens, places, target)
        assert all(not pool.size(row) for row in range(store.batch))
        return
    for b, text in enumerate(texts):
        runs = store.runs(b, 0, len(text)) if hasattr(store, "runs") else None
        places = [p for r in runs for p in range(r.place, r.place + r.stop - r.start)] if runs else [*range(len(text))]
        groups, row = (store.whole, 0) if runs is not None else (store.groups, b)
        if text:
            check_text(groups, row, text, places, target)


def check_text(groups: Any, b: int, tokens: list[int], places: list[int], target: Any) -> None:
    with torch.no_grad():
        kept = target(torch.tensor([tokens]), use_cache=True).past_key_values
    for group in groups:
        for index, layer in enumerate(group.layers):
            own = kept.layers[layer]
            torch.testing.assert_close(group.k[index, b][:, places], own.keys[0], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(group.v[index, b][:, places], own.values[0], atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_later_texts_are_those_of_a_fresh_engine(kind: str, seed: int) -> None:
    draw = random.Random(seed)
    target, wire = wired()
    plain = tiny("llama-gqa")
    engine = KINDS[kind](target)
    raised = 0
    for step in range(12):
        place, error = draw.choice(PLACES), draw.choice(ERRORS)
        fault = Faults(draw.randrange(1, draw.choice([4, 20, 60])), error)
        what = f"{seed=} {step=} {place} {error!r} {fault.left}"
        print(what)
        try:
            found = call(engine, wire, draw, place, fault)
        except BaseException as problem:
            assert problem is error or fault.raised, what
            if problem is not error: raise
            raised += 1
        else:
            assert found == [(p, reference(plain, p, NEW)) for p, _ in found], what
        check_slots(engine, plain)
        found = call(engine, wire, draw, "", None)
        assert found == [(p, reference(plain, p, NEW)) for p, _ in found], what
        check_slots(engine, plain)
    assert raised > 2

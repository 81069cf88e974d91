"""Calls that end early, at any point, leave nothing behind: later texts are those of a fresh engine."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import triforce_tree
from tests.support.models.api_cases import CHUNKED, CHUNKED_DRAFTED
from tests.support.models.ended_early import (
    PLACES,
    Fault,
    LeftError,
    Wire,
    faulty_options,
    nothing,
    some_error,
    wired,
)
from tests.support.models.families import perturbed, prompt_of, tiny
from tests.support.models.program_cases import reference
from triforce_tree import Engine
from triforce_tree.config import load_arguments
from triforce_tree.kv.pool.backend import PooledBackend
from triforce_tree.kv.pool.blocks import Block, PrefixPool
from triforce_tree.kv.pool.pages import slots_in
from triforce_tree.requests.joining import Fits, Joined
from triforce_tree.requests.output import GenerateOutput

NEW = 6
TEXT = prompt_of(200)
# They branch within and between chunks of 16 tokens.
PROMPTS = [
    TEXT[:100], TEXT[:70] + TEXT[90:120], TEXT[:70] + TEXT[120:141], TEXT[:33], TEXT[::-1][:90],
    TEXT[::-1][:50] + TEXT[:40], [7], TEXT[:48], TEXT[:49], TEXT[:17] + TEXT[50:100],
]  # fmt: skip
HOOKS = ["wanted", "next", "ended"]


class Coming:
    """Prompts that join up to ``rows`` rows; one of its methods asks for a fault."""

    tokens = None

    def __init__(self, prompts: list[list[int]], rows: int, place: str, fault: Callable[..., None]) -> None:
        self.waiting, self.rows, self._place, self._fault = list(prompts), rows, place, fault
        self.outputs: dict[int, GenerateOutput] = {}

    def _at(self, place: str) -> None:
        if place == self._place:
            self._fault()

    def wanted(self, fits: Fits) -> int:
        self._at("wanted")
        return self.rows if self.waiting and fits(self.waiting[0], NEW) else 0

    def next(self, fits: Fits) -> Joined | None:
        self._at("next")
        if not self.waiting or not fits(self.waiting[0], NEW):
            return None
        return Joined(self.waiting.pop(0), NEW)

    def ended(self, number: int, output: GenerateOutput) -> None:
        self._at("ended")
        self.outputs[number] = output


def drafted(**options: Any) -> Callable[[PreTrainedModel], Engine]:
    return lambda target: triforce_tree.load(
        target, perturbed(target, 0.05), **load_arguments({**CHUNKED_DRAFTED, **options})
    )


def plain(**options: Any) -> Callable[[PreTrainedModel], Engine]:
    return lambda target: triforce_tree.load(target, **load_arguments({**CHUNKED, "levels": 1, **options}))


# The model's family, and the engine.
KINDS: dict[str, tuple[str, Callable[[PreTrainedModel], Engine]]] = {
    "plain": ("llama-gqa", plain()),
    "three levels": ("llama-gqa", drafted(levels=3, rounds=2)),
    "two levels": ("llama-gqa", drafted(levels=2, rounds=1)),
    "passes chosen": ("llama-gqa", drafted()),
    "suffix matching": ("llama-gqa", plain(levels=2, rounds=1)),
    "earlier texts": ("llama-gqa", drafted(levels=2, rounds=1, prefix_cache="1MiB")),
    "windows": ("mistral-window", drafted(levels=2, rounds=1)),
    "offloaded": ("llama-gqa", drafted(levels=2, rounds=1, offload=True)),
}


def texts_of(
    engine: Engine, wire: Wire, draw: random.Random, place: str = "", fault: Callable[..., None] = nothing
) -> list[tuple[list[int], list[int]]]:
    """The prompts and texts of a call of random prompts, some of which join, with a fault at one place."""
    prompts = draw.choices(PROMPTS, k=draw.randrange(1, 4))
    options = faulty_options(place, fault, wire, len(prompts))
    coming = None
    if place in HOOKS or draw.random() < 0.6:
        coming = Coming(draw.choices(PROMPTS, k=draw.randrange(4)), draw.randrange(1, 5), place, fault)
        options |= {"joining": coming, "max_batch": draw.randrange(2, 5)}
    out = engine.generate(
        prompts, max_new_tokens=NEW, do_sample=False, **{"max_batch": draw.choice([None, 1, 2, 3]), **options}
    )
    rows = list(out.sequences)
    if coming is not None:
        rows += [output.sequences[0] for number, output in coming.outputs.items() if number >= len(prompts)]
    # Rows of a batch are padded on the left, and no token of a prompt is the padding's.
    texts = [row.tolist() for row in rows]
    return [(text[:-NEW], text[-NEW:]) for text in texts[len(prompts) :]] + [
        (prompt, text[-NEW:]) for prompt, text in zip(prompts, texts, strict=False)
    ]


def check_held(engine: Engine, model: PreTrainedModel) -> None:
    """Checks that the cache holds what it says, in slots of its own, and that no sequence is in use."""
    program = engine.last_program
    if program is None:
        return
    store, cached, backend = program.store, program.cache.cached, program.cache.backend
    if not isinstance(backend, PooledBackend):
        if any(group.ring for group in store.groups):
            return
        for b, tokens in enumerate(cached.held):
            text = tokens[: cached.whole[b]]
            check_slots(store.groups, b, text, list(range(len(text))), model)
        return
    taken: set[int] = set()

    def slots_of(block: Block) -> list[int]:
        return slots_in(block.pages, 0, len(block.tokens), store.page).tolist()

    for block in backend.pool.blocks():
        slots = slots_of(block)
        assert block.written
        assert not block.users
        assert max(slots) < store.total_slots
        assert taken.isdisjoint(slots)
        taken.update(slots)
        text, places, now = list[int](), list[int](), block
        while now.parent is not None:
            text, places = [*now.tokens, *text], [*slots_of(now), *places]
            now = now.parent
        if not block.children:
            check_slots(store.whole, 0, text, places, model)
    assert backend.pool.taken == len(taken)


def check_slots(groups: Any, b: int, text: list[int], slots: list[int], model: PreTrainedModel) -> None:
    if not text:
        return
    with torch.no_grad():
        layers = model(torch.tensor([text]), use_cache=True).past_key_values.layers
    for group in groups:
        for index, layer in enumerate(group.layers):
            for own, theirs in ((group.k, layers[layer].keys), (group.v, layers[layer].values)):
                torch.testing.assert_close(own[index, b][:, slots], theirs[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", [2, 3])
def test_who_leaves_while_a_prompt_is_read_keeps_no_row(rows: int) -> None:
    """The next batch has another number of rows, and begins with the same chunks."""
    engine, fault = KINDS["plain"][1](tiny("llama-gqa")), Fault(2, LeftError())

    def joining() -> Coming:
        return Coming([], 3, "", nothing)

    with pytest.raises(LeftError):
        engine.generate([TEXT[:100]], progress=fault, joining=joining(), max_batch=3, max_new_tokens=NEW)
    prompts = [TEXT[:100], TEXT[:90], TEXT[:33]][:rows]
    out = engine.generate(prompts, joining=joining(), max_batch=3, max_new_tokens=NEW, do_sample=False)
    expected = [reference(tiny("llama-gqa"), prompt, NEW) for prompt in prompts]
    assert [row[-NEW:].tolist() for row in out.sequences] == expected


def test_chunks_of_others_are_kept_when_somebody_leaves() -> None:
    engine = KINDS["plain"][1](tiny("llama-gqa"))
    options = {"joining": Coming([], 2, "", nothing), "max_batch": 2, "max_new_tokens": NEW}
    engine.generate([TEXT[:70]], **options)
    with pytest.raises(LeftError):
        engine.generate([TEXT[::-1][:90]], progress=Fault(2, LeftError()), **options)
    assert engine.generate([TEXT[:70]], **options).reused_tokens == 64


def test_messages_and_logs_have_no_tokens() -> None:
    """A pool stores users' texts, which are private."""
    pool = PrefixPool(64, 4, 2, 2)
    pool.admit(0, [4711] * 9, 1)
    assert "4711" not in f"{pool!r} {pool.path(0)!r} {list(pool.blocks())!r}"


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("kind", KINDS)
def test_later_texts_are_those_of_a_fresh_engine(kind: str) -> None:
    """This holds whatever raised before, for other batch sizes and prompts that begin alike."""
    seed = random.randrange(2**32)
    draw, (family, make) = random.Random(seed), KINDS[kind]
    target, wire = wired(family)
    engine, model, raised = make(target), tiny(family), 0
    for step in range(6):
        place, error = draw.choice([*PLACES, *HOOKS]), some_error(draw)
        fault = Fault(draw.randrange(1, draw.choice([4, 12, 40])) if step else 1, error)
        what = f"{seed=} {step=} {place} {error!r} at {fault.left}"
        try:
            found = texts_of(engine, wire, draw, place, fault)
        except (LeftError, KeyboardInterrupt, torch.OutOfMemoryError) as problem:
            if problem is not error:
                raise
            raised, found = raised + 1, []
        check_held(engine, model)
        found += texts_of(engine, wire, draw)
        check_held(engine, model)
        assert found == [(prompt, reference(model, prompt, NEW)) for prompt, _ in found], what
    assert raised, seed

"""Prompts that join a batch and begin like what is stored share it: computed once, and texts as alone."""

from collections.abc import Sequence as Sequences
from typing import Any

import pytest

import triforce_tree
from tests.support.models.api_cases import CHUNK, CHUNKED, SHARING, TARGET
from tests.support.models.families import prompt_of
from tests.support.models.joining import Coming
from tests.support.models.program_cases import reference
from triforce_tree import Engine
from triforce_tree.config import load_arguments
from triforce_tree.decoding.loop import best_index
from triforce_tree.decoding.sequence import Ending, Sequence
from triforce_tree.kv.pool.store import PooledStore
from triforce_tree.requests.joining import Fits, Joined

NEW = 10
SYSTEM = prompt_of(35)
FIRST, SECOND = SYSTEM + prompt_of(90)[40:], SYSTEM + prompt_of(120)[::-1][:45]
# Whole chunks of the first document, and of what both begin with.
DOCUMENT, COMMON = 80, 32
# How chunks are scored makes no difference to joining.
KINDS = [kind for kind in SHARING if kind != "with variances"]


def asked(document: list[int], number: int, tokens: int = 9) -> list[int]:
    return document + prompt_of(200)[60 + tokens * number :][: tokens - number]


# Lengths differ, the second one goes on for a while like the third.
PROMPTS = [
    asked(FIRST, 0), asked(FIRST, 1, 30), asked(FIRST, 1, 40), prompt_of(25)[::-1], asked(SECOND, 2),
    asked(FIRST, 3), asked(SECOND, 4), [5], asked(FIRST, 5),
]  # fmt: skip

# Documents that take each other's places, and whose chunks are all stored when one comes again.
AGAIN = [document[: DOCUMENT + 1] for document in (FIRST, SECOND, prompt_of(300)[::-1], prompt_of(300)[100:])]


def coming_of(
    prompts: Sequences[list[int]], rows: int, tokens: int | None = None,
    seeds: Sequences[int | None] | None = None, new: Sequences[int] | None = None,
) -> Coming:  # fmt: skip
    count = len(prompts)
    each = zip(prompts, new or [NEW] * count, seeds or [None] * count, strict=True)
    return Coming([Joined(prompt, limit, seed=seed) for prompt, limit, seed in each], rows, tokens)


def store_of(engine: Engine) -> PooledStore:
    program = engine.last_program
    assert program is not None
    assert isinstance(program.store, PooledStore)
    return program.store


def decoded(engine: Engine, coming: Coming, first: int = 1, **options: Any) -> list[list[int]]:
    """Texts in the order of their beginning; ``first`` prompts begin together."""
    prompts = [list(coming.waiting.pop(0).prompt) for _ in range(first)]
    given = {"max_new_tokens": NEW, "do_sample": False, "max_batch": coming.rows, **options}
    engine.generate(prompts, joining=coming, **given)
    return coming.texts


def texts(prompts: Sequences[list[int]]) -> list[list[int]]:
    return [reference(TARGET, prompt, NEW) for prompt in prompts]


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize(("kind", "rows"), [("plain", 2), *((kind, 3) for kind in KINDS)])
def test_texts_are_those_of_each_alone(kind: str, rows: int, fed: list[int]) -> None:
    """Each chunk is computed once, whoever comes first; and again over what the batch has left."""
    engine = SHARING[kind]()
    expected = texts(PROMPTS)
    if kind == "8 bits":
        other = SHARING[kind]()
        expected = [decoded(other, coming_of([prompt], 2))[0] for prompt in PROMPTS]
    fed.clear()
    assert decoded(engine, coming_of(PROMPTS, rows)) == expected
    store = store_of(engine)
    assert store.batch == rows
    if kind not in ("EAGLE", "block"):  # They need the states of the newest positions.
        chunks = {tuple(p[:stop]) for p in PROMPTS for stop in range(CHUNK, len(p), CHUNK)}
        assert sum(fed) == sum((len(p) - 1) % CHUNK for p in PROMPTS) + CHUNK * len(chunks)
    coming = coming_of(PROMPTS[::-1], rows)
    assert decoded(engine, coming) == expected[::-1]
    assert coming.outputs[0].reused_tokens == DOCUMENT


class Late(Coming):
    """Prompts that join one by one, each when the batch has asked for it six times."""

    asked = 0

    def next(self, fits: Fits) -> Joined | None:
        self.asked += 1
        return super().next(fits) if self.asked % 6 == 0 else None


def test_a_prefix_is_shared_for_a_while() -> None:
    """On a CPU, forwards repeat the noted calls of a forward, but not while sequences share a prefix."""
    engine = triforce_tree.load(levels=1, dtype="float32", advanced={"prefill_chunk": CHUNK})
    prompts, new = [asked(FIRST, 0), asked(FIRST, 1), asked(FIRST, 2)], [60, 8, 8]
    alone = [
        engine.generate([prompt], max_new_tokens=limit, do_sample=False).sequences[0, -limit:].tolist()
        for prompt, limit in zip(prompts, new, strict=True)
    ]
    coming = Late([Joined(prompt, limit) for prompt, limit in zip(prompts, new, strict=True)], 2)
    assert decoded(engine, coming, max_new_tokens=new[0]) == alone


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize(("prompts", "rows"), [(PROMPTS, 3), (2 * AGAIN, 2)], ids=["new", "again"])
def test_level_1_retrieves_as_over_copies(
    monkeypatch: pytest.MonkeyPatch, prompts: list[list[int]], rows: int
) -> None:
    """Texts would not show it: level 2 verifies them."""

    def counts() -> list[tuple[int, int, int]]:
        coming = coming_of(prompts, rows, new=[15] * len(prompts))
        decoded(SHARING["three levels"](), coming, rows, max_new_tokens=15)
        levels = [coming.outputs[number].levels[-1] for number in range(len(prompts))]
        return [(level.forwards, level.accepted, level.proposed) for level in levels]

    once = counts()
    monkeypatch.setattr("triforce_tree.requests.batch_pool.unit_of", lambda *_: None)
    assert once == counts()


@pytest.mark.parametrize("kind", ["plain", "three levels"])
def test_a_seed_decides_the_text_of_a_sequence_that_joins(kind: str) -> None:
    engine, options = SHARING[kind](), {"do_sample": True, "temperature": 0.9}
    seeds = [*range(3, 3 + len(PROMPTS))]
    together = decoded(engine, coming_of(PROMPTS, 3, seeds=seeds), seed=seeds[:1], **options)
    alone = [
        engine.generate([prompt], max_new_tokens=NEW, seed=[seed], **options).sequences[0, -NEW:].tolist()
        for prompt, seed in zip(PROMPTS, seeds, strict=True)
    ]
    assert together == alone


def test_what_rows_share_is_counted_once(fed: list[int]) -> None:
    """Eight questions about one document are decoded together in the slots of less than two copies of it."""
    document = prompt_of(1500)
    prompts = [document + prompt_of(40)[n : n + 5] for n in range(8)]
    engine = triforce_tree.load(TARGET, levels=1, **load_arguments(CHUNKED))
    coming = coming_of(prompts, 8, tokens=1600, new=[4] * 8)
    assert decoded(engine, coming, max_new_tokens=4) == [reference(TARGET, prompt, 4) for prompt in prompts]
    store = store_of(engine)
    assert coming.refused == 0
    assert store.total_slots < 2 * 1500 + 8 * store.scratch
    assert sum(fed) < 1500 + 8 * 2 * CHUNK


@pytest.mark.slow
def test_prompts_that_do_not_fit_wait() -> None:
    """Two documents of their own at a time; a short prompt with many new tokens needs room as well."""
    prompts = [[*prompt_of(400)[n * 13 :], n] for n in range(5)] + [prompt_of(20)[::-1]]
    engine = triforce_tree.load(TARGET, levels=1, **load_arguments(CHUNKED))
    coming = coming_of(prompts, 3, tokens=430, new=[3, 3, 3, 3, 3, 160])
    assert decoded(engine, coming, max_new_tokens=3) == [
        reference(TARGET, prompt, n) for prompt, n in zip(prompts, [3, 3, 3, 3, 3, 160], strict=True)
    ]
    assert coming.refused


def test_a_row_beside_its_like_is_chosen() -> None:
    """Rows that share a document follow each other, so that it is read once."""
    rows = [
        Sequence(asked(FIRST, 0), Ending(1)),
        None,
        Sequence(asked(SECOND, 0), Ending(1)),
        None,
        None,
        None,
    ]
    free = [1, 3, 4, 5]
    assert best_index(rows, free, asked(FIRST, 1)) == 1
    assert best_index(rows, free, asked(SECOND, 1)) in (1, 3)
    # Not beside others that a later prompt may begin like.
    assert best_index(rows, free, prompt_of(30)[::-1]) in (4, 5)


def test_nothing_moves_that_a_graph_would_hold() -> None:
    """Views, plans and slots stay in place while prompts leave and join, and pages change their owners."""
    engine, seen = SHARING["three levels"](), set()

    class Looking(Coming):
        def next(self, fits: Fits) -> Joined | None:
            program = engine.last_program
            store, views = program.store, [program.retrieval]
            tensors = [store.prefix, store.writable, store.pages, store.memory, *(g.k for g in store.groups)]
            tensors += [t for view in views for r in view.retrieved for t in (r.table, r.means)]
            for plan in (part for each in store._plans for part in (each.own, each.shared)):
                tensors += [plan.lengths, plan.segments, plan.owner_start, plan.owners, plan.mask]
            seen.add(tuple(tensor.data_ptr() for tensor in tensors))
            return super().next(fits)

    long = [*PROMPTS[:3], *PROMPTS[4:7], PROMPTS[8]]
    assert decoded(engine, Looking([Joined(prompt, NEW) for prompt in long], 3), 3) == texts(long)
    assert len(seen) == 1


def test_a_prompt_that_joins_without_room_is_refused() -> None:
    class Careless(Coming):
        def next(self, fits: Fits) -> Joined | None:
            return self.waiting.pop(0) if self.waiting else None

    prompts = [[*prompt_of(900)[n:], n] for n in range(3)]
    engine = triforce_tree.load(TARGET, levels=1, **load_arguments(CHUNKED))
    with pytest.raises(ValueError, match=r"more than are left of the .* of its batch; let it join later"):
        decoded(engine, Careless([Joined(prompt, NEW) for prompt in prompts], 3, tokens=950))
    assert decoded(engine, coming_of(prompts, 3, tokens=950)) == texts(prompts)


def test_later_batches_use_what_was_made_for_earlier_ones() -> None:
    """Other numbers of new tokens need no other buffers, which on a GPU would be captured anew."""
    engine, prompts = SHARING["plain"](), [asked(FIRST, n) for n in range(3)]
    made = set()
    for new in (10, 30, 3):
        coming = coming_of(prompts, 3, tokens=400, new=[new] * 3)
        found = decoded(engine, coming, 3, max_new_tokens=new)
        assert found == [reference(TARGET, prompt, new) for prompt in prompts]
        made.add(id(engine.last_program))
    assert len(made) == 1


@pytest.mark.parametrize("tokens", [None, 150])
def test_too_short_to_share_stores_copies(tokens: int | None) -> None:
    """Their tokens are counted for each then: of 150 one document leaves few."""
    engine = triforce_tree.load(TARGET, levels=1, **load_arguments({**CHUNKED, "prefill_chunk": 2048}))
    coming = coming_of(PROMPTS, 3, tokens)
    assert decoded(engine, coming) == texts(PROMPTS)
    assert not isinstance(engine.last_program.store, PooledStore)
    assert bool(coming.refused) == (tokens is not None)


@pytest.mark.parametrize("slots", [10**9, 4000, 1200])
def test_memory_decides_how_much_room_there_is(monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
    """Down to what a prompt of any length, and rows that share it, need."""
    engine, asked_for = SHARING["plain"](), []

    def fitting(*how: Any) -> int:
        wanted, pool = how[3], how[7]
        asked_for.append(pool)
        return wanted if 0 < pool <= slots else 1

    monkeypatch.setattr("triforce_tree.requests.batch_pool.fitting_batch", fitting)
    assert decoded(engine, coming_of(PROMPTS, 4)) == texts(PROMPTS)
    made = engine.last_program.store
    assert isinstance(made, PooledStore)
    assert made.total_slots <= max(slots, min(pool for pool in asked_for if pool) + 64)
    assert made.batch == (4 if slots > 2000 else 1)

"""Prefixes that some prompts of a batch share, on several levels: stored once, and each text is as alone."""

from typing import Any

import pytest
import torch

from tests.support.models.api_cases import CHUNK, SHARING, TARGET
from tests.support.models.families import prompt_of
from tests.support.models.program_cases import reference
from triforce_tree import Engine
from triforce_tree.generation.batch import prefixes
from triforce_tree.kv.shared.given import TreeStore
from triforce_tree.kv.shared.tree import DEPTH, PrefixTree, common_prefixes
from triforce_tree.verify.draws import sequence_seed

NEW = 8
SYSTEM = prompt_of(35)
FIRST, SECOND = prompt_of(90)[40:], prompt_of(120)[::-1][:45]


def questions(document: list[int], count: int, tokens: int = 9) -> list[list[int]]:
    return [document + prompt_of(200)[60 + tokens * n :][: tokens - n] for n in range(count)]


# Prompts, tokens of each one's prefixes, and slots of all prefixes.
GROUPS: dict[str, tuple[list[list[int]], list[int], int]] = {
    # System prompt (32), the first document up to 84, the second up to 80.
    "two documents behind a header": (
        [*questions(SYSTEM + FIRST, 3), *questions(SYSTEM + SECOND, 2)], [84, 84, 84, 80, 80], 32 + 52 + 48,
    ),
    "two documents": ([*questions(FIRST, 2), *questions(SECOND, 3)], [48, 48, 44, 44, 44], 48 + 44),
    "one of its own": ([*questions(FIRST, 3), prompt_of(60)[::-1]], [48, 48, 48, 56], 48 + 56),
    "one is short": ([*questions(FIRST, 3), prompt_of(6)[::-1]], [48, 48, 48, 0], 48),
    "mixed up": (
        [prompt for pair in zip(questions(FIRST, 3), questions(SECOND, 3), strict=True) for prompt in pair],
        [48, 44] * 3, 48 + 44,
    ),
}  # fmt: skip


def store_of(engine: Engine) -> TreeStore:
    program = engine.hierarchy.last_program
    assert program is not None
    assert isinstance(program.store, TreeStore)
    return program.store


def generated(engine: Engine, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    out = engine.generate(prompts, **{"max_new_tokens": NEW, "do_sample": False, **options})
    return [row[max(map(len, prompts)) :] for row in out.sequences.tolist()]


def texts(prompts: list[list[int]]) -> list[list[int]]:
    return [reference(TARGET, prompt, NEW) for prompt in prompts]


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize(
    ("groups", "kind"),
    [*((groups, "three levels") for groups in GROUPS), ("mixed up", "plain"),
     ("two documents behind a header", "plain"), ("two documents behind a header", "two levels")],
)  # fmt: skip
def test_texts_are_those_of_each_alone(groups: str, kind: str, fed: list[int]) -> None:
    """Every prefix is stored once, computed once, and found by the next batch."""
    prompts, ends, slots = GROUPS[groups]
    engine = SHARING[kind]()
    assert generated(engine, prompts) == texts(prompts)
    store = store_of(engine)
    assert sorted(store.prefix.tolist()) == sorted(ends)
    assert store.capacity == slots
    # Rows that share a prefix are neighbours: each is one segment.
    places = {run.place for path in store.paths for run in path}
    assert len(store.segments()) == len(places)
    assert sum(fed) == slots + sum(len(prompt) - 1 - end for prompt, end in zip(prompts, ends, strict=True))
    fed.clear()
    assert generated(engine, prompts) == texts(prompts)
    assert store_of(engine) is store
    assert sum(fed) <= len(prompts) * CHUNK


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("kind", ["plain", "three levels"])
@pytest.mark.parametrize("groups", ["two documents behind a header", "mixed up"])
def test_a_sequence_that_follows_uses_stored_prefixes(groups: str, kind: str) -> None:
    """Of three rows some go on while another gets a prompt about another document."""
    prompts, _, slots = GROUPS[groups]
    engine = SHARING[kind]()
    assert generated(engine, prompts, max_batch=3) == texts(prompts)
    store = store_of(engine)
    assert (store.capacity, store.batch) == (slots, 3)


@pytest.mark.usefixtures("poisoned_empty")
def test_documents_change_from_batch_to_batch() -> None:
    """What the slots held of other groups is not taken for theirs."""
    engine = SHARING["three levels"]()
    third = prompt_of(150)[60:]
    for documents in [(FIRST, SECOND), (SECOND, FIRST), (third[:50], SECOND), (FIRST, third[:45])]:
        prompts = [prompt for document in documents for prompt in questions(document, 2)]
        assert generated(engine, prompts) == texts(prompts)
        assert store_of(engine).prefix.min() >= 32


def test_draws_do_not_depend_on_the_order_of_rows() -> None:
    prompts, *_ = GROUPS["mixed up"]
    engine = SHARING["two levels"]()
    options = {"do_sample": True, "temperature": 0.9}
    together = generated(engine, prompts, seed=5, **options)
    assert store_of(engine).prefix.min() >= 32
    alone = [
        generated(engine, [prompt], seed=sequence_seed(5, n), **options)[0]
        for n, prompt in enumerate(prompts)
    ]
    assert together == alone


@pytest.mark.slow
def test_level_1_retrieves_as_over_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts would not show it: level 2 verifies them."""

    def counts() -> list[tuple[int, int]]:
        engine = SHARING["three levels"]()
        outs = [
            engine.generate(prompts, max_new_tokens=24, do_sample=False, max_batch=3)
            for prompts, *_ in (GROUPS["two documents behind a header"], GROUPS["mixed up"])
        ]
        return [(level.forwards, level.accepted) for out in outs for level in out.levels]

    once = counts()
    monkeypatch.setattr(prefixes, "prefixes_stored_once", lambda *_: PrefixTree())
    assert once == counts()


def test_a_prefix_shorter_than_the_unit_is_not_stored() -> None:
    prompts = [[*range(15), n, *range(40)] for n in range(4)]
    assert not common_prefixes(prompts, 16, 4)
    assert common_prefixes(prompts, 15, 4).size == (15, 15)


def test_copies_where_prefixes_spare_less_than_a_tenth() -> None:
    prompts = [[*range(64), *[n] * 640] for n in range(8)]
    assert not common_prefixes(prompts, 8, 8)
    assert common_prefixes([prompt[:400] for prompt in prompts], 8, 8).size == (64, 64)


def test_levels_are_limited() -> None:
    """Each prompt leaves the one before it a unit later."""
    prompts = [[*[1] * 24 * n, *[2 + n] * (200 - 24 * n)] for n in range(1, 9)]
    tree = common_prefixes(prompts, 24, 8)
    assert tree
    assert max(len(tree.path(prompt)) for prompt in prompts) <= DEPTH


def test_copies_where_prefixes_take_more_memory() -> None:
    """Four documents for two prompts each, of which two are decoded together."""
    prompts = [[n] * 64 + [n, other] for n in range(4) for other in range(2)]
    assert not common_prefixes(prompts, 16, 2)
    assert common_prefixes(prompts, 16, 8).size == (256, 64)


def test_random_trees_hold_what_their_prompts_begin_with() -> None:
    torch.manual_seed(0)
    for _ in range(30):
        prompts = [torch.randint(2, (n,)).tolist() for n in torch.randint(2, 40, (6,)).tolist()]
        tree = common_prefixes(prompts, 2, 6)
        slots: dict[int, tuple[int, int]] = {}
        for prompt in prompts:
            path, position = tree.path(prompt), 0
            for node in path:
                assert node.start == position
                assert node.tokens == prompt[position : node.stop]
                position = node.stop
                for at, token in enumerate(node.tokens):
                    # A slot has one token, and one position.
                    found = slots.setdefault(node.place + at, (node.start + at, token))
                    assert found == (node.start + at, token)
            assert len(prompt) - position <= max(map(len, prompts)) - tree.size.saved
        assert set(slots) == set(range(tree.size.slots))

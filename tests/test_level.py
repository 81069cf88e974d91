"""A level shown any context answers as the model does, whatever its tail held before."""

import random

import pytest
import torch
from tables import TableModel, TokenCache, level

from triforce_tree.level import Level
from triforce_tree.token_tree import Context, TokenTree


def test_prefill_commits_all_but_the_root_in_chunks() -> None:
    one, fed = level(5, seed=0), []
    one.prefill(Context([1, 2, 3, 4, 0]), fed.append)
    assert one.cache.committed == [1, 2, 3, 4]
    assert fed == [2, 2]
    one.prefill(Context([1, 2, 3, 4, 0, 3]))
    assert one.cache.committed == [1, 2, 3, 4, 0], "only what is missing"
    single = level(5, seed=0)
    single.prefill(Context([3]))
    assert single.cache.committed == []


def test_catching_up_costs_one_forward_and_gives_the_models_logits() -> None:
    one, table = level(5, seed=3), TableModel(5, seed=3)
    one.prefill(Context([1, 2]))
    logits, row = one.catch_up(Context([1, 2, 4, 4]))
    assert torch.equal(logits, table.logits([1, 2, 4, 4]))
    assert row == 2
    assert one.forwards == 1
    assert one.cache.length == 1, "nothing is committed by a forward"


def test_any_context_after_any_other() -> None:
    """Contexts that share a random part with what the tail holds, commits between."""
    one, table = level(4, seed=5), TableModel(4, seed=5)
    committed = [0]
    context = [0]
    for _ in range(300):
        keep = random.randint(len(committed), len(context))
        fresh = random.randint(int(keep == one.cache.length), 3)
        context = [*context[:keep], *(random.randrange(4) for _ in range(fresh))]
        if random.random() < 0.5:
            size = random.randint(1, 6)
            parents = [-1, *(random.randrange(node) for node in range(1, size))]
            tree = TokenTree([context[-1], *(random.randrange(4) for _ in range(size - 1))], parents)
            logits = one.forward_tree(Context(context), tree)
            for node in range(size):
                path = [*context, *(tree.tokens[i] for i in tree.path(node)[1:])]
                assert torch.equal(logits[node], table.logits(path))
            leaf = tree.path(random.randrange(size))
            context += [*(tree.tokens[i] for i in leaf[1:])]
        else:
            assert torch.equal(one.catch_up(Context(context))[0], table.logits(context))
        if random.random() < 0.3:
            one.commit(Context([*context, random.randrange(4)]))
            committed = list(context)
            assert one.cache.committed == committed[: one.cache.length]
            assert one.tail == 0


def test_rows_that_spell_the_context_are_not_fed_again() -> None:
    one = level(5, seed=0)
    one.prefill(Context([1]))
    one.forward_tree(Context([1]), TokenTree([1, 2, 3, 4], [-1, 0, 0, 2]))
    one.catch_up(Context([1, 3, 4]))
    assert one.tail == 3
    assert one.cache.tail == [1, 3, 4]
    one.commit(Context([1, 3, 4, 0]))
    assert one.cache.committed == [1, 3, 4]


def test_the_mask_grows_beyond_its_first_size() -> None:
    one, table = level(3, seed=1), TableModel(3, seed=1)
    tokens = [random.randrange(3) for _ in range(150)]
    one.prefill(Context(tokens[:1]))
    for end in range(1, 151):
        logits, _ = one.catch_up(Context(tokens[:end]))
    assert one.tail == 150
    assert torch.equal(logits, table.logits(tokens))


@pytest.mark.parametrize("prefill_chunk", [1, 3, 100])
def test_chunks_do_not_change_what_is_committed(prefill_chunk: int) -> None:
    one = Level(TableModel(4, seed=0), TokenCache(), prefill_chunk)
    one.prefill(Context([1, 2, 3, 0, 1, 2, 3]))
    assert one.cache.committed == [1, 2, 3, 0, 1, 2]

"""The retrieval cache holds sinks, recent rows and chosen chunks; all rows, where its budget covers them."""

import random

import pytest
import torch
from list_cache import DIM, HEADS, LAYERS, ListCache, Row, random_parents
from torch import Tensor

from triforce_tree.caches import FullCache, RetrievalCache
from triforce_tree.caches.base import Variant
from triforce_tree.caches.retrieval import ChunkMeans
from triforce_tree.config import RetrievalConfig


class Pair:
    """A full cache and a retrieval cache over it, driven as the hierarchy does."""

    def __init__(self, config: RetrievalConfig, heads: tuple[int, int], window: int | None = None) -> None:
        how = Variant(DIM**-0.5, window)
        full = FullCache(LAYERS)
        self.full = ListCache(full, heads, how)
        self.retrieval = ListCache(RetrievalCache(full, LAYERS, config), heads, how)

    def prefill(self, tokens: int) -> None:
        while tokens:
            part = min(tokens, 13)
            self.full.write(list(range(-1, part - 1)))
            self.full.commit()
            tokens -= part
        self.retrieval.cache.commit(0)

    def step(self, drafted: int, accepted: int) -> None:
        """The middle level drafts a chain, the full cache takes a part of it."""
        self.retrieval.write(list(range(-1, drafted - 1)))
        self.full.write(list(range(-1, drafted - 1)), like=self.retrieval.tail)
        self.full.keep(list(range(accepted)))
        self.full.commit()
        self.retrieval.keep([])
        self.retrieval.cache.commit(0)

    @property
    def length(self) -> int:
        return self.full.cache.length


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("refresh", [0, 1, 3])
@pytest.mark.parametrize("window", [None, 6])
def test_retrieval_is_the_full_cache_when_the_budget_covers_it(
    heads, refresh, window, poisoned_empty
) -> None:
    pair = Pair(RetrievalConfig(budget=400, chunk=4, recent=8, refresh=refresh), heads, window)
    pair.prefill(random.randint(1, 60))
    for _ in range(30):
        retrieval = pair.retrieval
        for _ in range(2):
            parents = random_parents(len(retrieval.tail), random.randint(1, 6))
            context = len(parents) if parents == [-1] else 0
            retrieval.check(retrieval.write(parents, context=context), pair.full.committed)
        retrieval.keep([])
        pair.step(drafted := random.randint(1, 6), random.randint(1, drafted))
        assert retrieval.cache.length == pair.length
    assert pair.length > 60


PLACES = 160  # the longest text of the tests below, where a row's value is its place, one-hot


def placed(places: range, kv_heads: int) -> list[Row]:
    """Rows with random keys whose values tell where they stand; -1 tells nothing."""
    eye = torch.cat([torch.eye(PLACES), torch.zeros(1, PLACES)])
    return [
        Row(
            [torch.randn(kv_heads, PLACES) for _ in range(LAYERS)],
            [eye[place].expand(kv_heads, -1)] * LAYERS,
        )
        for place in places
    ]


def visible(pair: Pair, index: int) -> Tensor:
    """bool ``[H_kv, length]``: the committed rows that a new row of a layer attends to.

    A query of zeros attends evenly, so its output marks every row that it sees by the same share.
    """
    heads, kv_heads = pair.full.heads
    retrieval = pair.retrieval
    zero = torch.zeros(1, heads, 1, PLACES)
    _, outputs = retrieval.write([-1], like=placed(range(-1, 0), kv_heads), query=zero)
    retrieval.keep([])
    out = outputs[index][:, 0]
    seen = out > 0
    share = 1 / (seen.sum(-1, keepdim=True) + 1)
    torch.testing.assert_close(out, seen * share, msg="no row twice, none but the text's")
    group = seen.unflatten(0, (kv_heads, heads // kv_heads))
    assert (group == group[:, :1]).all(), "one selection for a KV head's whole group"
    assert not seen[:, pair.length :].any()
    return group[:, 0, : pair.length]


def planted(places: tuple[int, ...], rows: list[Row]) -> Tensor:
    """Give KV head h keys in one direction at ``places[h]``; the query ``[D]`` that seeks it."""
    direction = torch.nn.functional.normalize(torch.randn(PLACES), dim=0)
    for head, place in enumerate(places):
        for row in rows[place : place + 4]:
            for index in range(LAYERS):
                row.k[index][head] = 40 * direction
    return 10 * direction


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("budget", "recent"), [(24, 8), (32, 20), (12, 8)])
def test_what_retrieval_holds(heads, budget, recent) -> None:
    """The first chunk, the recent window, all later rows; whole chunks besides."""
    chunk, kv_heads = 4, heads[1]
    pair = Pair(RetrievalConfig(budget, chunk, recent, refresh=0), heads)
    pair.full.write(list(range(-1, 76)), like=placed(range(77), kv_heads))
    pair.full.commit()
    pair.retrieval.cache.commit(0)
    chosen = set()
    while pair.length < PLACES - 8:
        for index in range(LAYERS):
            seen = visible(pair, index)
            assert seen[:, :chunk].all(), "the sinks"
            assert seen[:, pair.length - recent + chunk - 1 :].all(), "recent rows"
            assert (seen.sum(-1) <= budget + recent // 2 + chunk).all()
            assert (seen.sum(-1) > budget - 2 * chunk).all(), "the budget is used"
            old = (pair.length - recent - recent // 2 - chunk) // chunk * chunk
            older = seen[:, :old].unflatten(1, (-1, chunk))
            assert (older.all(-1) == older.any(-1)).all(), "whole chunks"
            chosen |= {tuple(row.nonzero().flatten().tolist()) for row in older.any(-1)}
        count = random.randint(1, 4)
        fresh = placed(range(pair.length, pair.length + count), kv_heads)
        pair.retrieval.write(list(range(-1, count - 1)), like=fresh)
        pair.full.write(list(range(-1, count - 1)), like=fresh)
        pair.full.commit()
        pair.retrieval.keep([])
        pair.retrieval.cache.commit(0)
    if budget - recent > chunk:
        assert len(chosen) > 5, "layers, heads and steps choose for themselves"


PLANTED = (40, 64)


def seeking_pair(refresh: int) -> tuple[Pair, Tensor]:
    """A text of 100 rows with a planted chunk for each KV head, and the query that seeks both."""
    pair = Pair(RetrievalConfig(budget=16, chunk=4, recent=8, refresh=refresh), (4, 2))
    rows = placed(range(100), 2)
    query = planted(PLANTED, rows).expand(1, 4, 1, PLACES)
    pair.full.write(list(range(-1, 98)), like=rows[:99], query=torch.zeros(1, 4, 99, PLACES))
    pair.full.commit()
    pair.full.write([-1], like=rows[99:], query=-query if refresh else query)
    pair.full.commit()
    pair.retrieval.cache.commit(0)
    return pair, query


def found(pair: Pair) -> list[bool]:
    """Whether every layer's KV head h holds the chunk at ``PLANTED[h]``."""
    seen = [visible(pair, index) for index in range(LAYERS)]
    return [bool(all(s[head, at : at + 4].all() for s in seen)) for head, at in enumerate(PLANTED)]


def test_retrieval_finds_the_chunk_that_the_target_looks_at() -> None:
    """What level 2's last query points to is held; each KV head finds its own."""
    pair, _ = seeking_pair(refresh=0)
    assert found(pair) == [True, True]


def test_retrieval_finds_the_chunk_that_the_context_looks_at() -> None:
    """With ``refresh`` the middle level's own queries choose, before they attend."""
    pair, query = seeking_pair(refresh=1)
    assert found(pair) == [False, False]
    pair.retrieval.write([-1], like=placed(range(-1, 0), 2), query=query, context=1)
    pair.retrieval.keep([])
    assert found(pair) == [True, True]


def test_proposals_do_not_choose() -> None:
    """A law that looked at the tokens it judges would not be the law they are accepted by."""
    pair, query = seeking_pair(refresh=1)
    queries = torch.cat([-query, query, query], 2)
    pair.retrieval.write([-1, 0, 0], like=placed(range(-1, 0), 2) * 3, query=queries, context=1)
    pair.retrieval.keep([])
    assert found(pair) == [False, False]


def test_a_retrieval_cache_waits_for_its_source() -> None:
    pair = Pair(RetrievalConfig(budget=16, chunk=4, recent=8), (4, 2))
    with pytest.raises(RuntimeError, match="source"):
        pair.retrieval.cache.prefill_step(5)


@pytest.mark.parametrize("chunk", [1, 4, 7])
def test_chunk_means_are_those_of_a_recomputation(chunk: int) -> None:
    means, k = ChunkMeans(chunk), torch.randn(1, 2, 90, DIM)
    for length in (chunk, chunk + 1, 3 * chunk + 2, 45, 46, 90):
        count = length // chunk
        expected = k[:, :, : count * chunk].unflatten(2, (count, chunk)).mean(3)
        torch.testing.assert_close(means.of(0, k[:, :, :length], count), expected)
        torch.testing.assert_close(means.of(1, -k[:, :, :length], count), -expected)

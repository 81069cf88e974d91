"""Full, streaming and retrieval caches against a plain list of rows, under random use.

The list model forgets nothing by accident: it is told which rows exist, and attention over them is
computed row by row in float64. Whatever a cache does with buffers, the outputs must be the same.
"""

import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from families import prompt_of, tiny
from torch import Tensor

from triforce_tree.caches import FullCache, RetrievalCache, Rows, StreamingCache
from triforce_tree.caches.base import KVCache, Variant
from triforce_tree.caches.retrieval import ChunkMeans
from triforce_tree.config import RetrievalConfig, StreamingConfig
from triforce_tree.hf_model import HFModel
from triforce_tree.level import Level
from triforce_tree.token_tree import Context

LAYERS, DIM = 2, 16
HEADS = [(4, 4), (4, 2), (6, 1)]


class HalfRope:
    """Rotary embedding as Llama writes it, with angles 1, 1/10, ..."""

    def rotate(self, layer, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotated(q, positions), rotated(k, positions)


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """``x`` ``[..., T, D]`` turned by ``positions`` ``[T]``."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10.0 ** -torch.arange(half)
    angles = torch.cat([angles, angles], -1)
    other = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * angles.cos() + other * angles.sin()


@dataclass
class Row:
    """One token's row in every layer: ``k[layer]``, ``v[layer]`` are ``[H_kv, D]``."""

    k: list[Tensor]
    v: list[Tensor]


@dataclass
class ListCache:
    """Rows in plain lists, written to a real cache at the same time."""

    cache: KVCache
    heads: tuple[int, int]
    how: Variant = field(default_factory=lambda: Variant(DIM**-0.5))
    committed: list[Row] = field(default_factory=list)
    tail: list[Row] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    def ancestors(self, row: int) -> list[int]:
        """Tail rows from the first one down to ``row``."""
        return [] if row < 0 else [*self.ancestors(self.parents[row]), row]

    def write(
        self,
        parents: list[int],
        like: list[Row] | None = None,
        query: Tensor | None = None,
        context: int = 0,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """New tail rows; (queries, outputs) of each layer, ``[H_q, T, D]``."""
        heads, kv_heads = self.heads
        count, start = len(parents), len(self.tail)
        self.parents += parents
        fresh = like or [
            Row(*([torch.randn(kv_heads, DIM) for _ in range(LAYERS)] for _ in "kv")) for _ in range(count)
        ]
        self.tail += fresh
        depths = torch.tensor([len(self.ancestors(row)) - 1 for row in range(len(self.tail))])
        mask = torch.zeros(count, len(self.tail), dtype=torch.bool)
        for row in range(count):
            mask[row, self.ancestors(start + row)] = True
        rows = Rows(depths[start:], mask, depths, context)
        queries, outputs = [], []
        for index in range(LAYERS):
            width = fresh[0].k[0].shape[-1]
            q = torch.randn(1, heads, count, width) if query is None else query
            k = torch.stack([row.k[index] for row in fresh], 1)[None]
            v = torch.stack([row.v[index] for row in fresh], 1)[None]
            layer = SimpleNamespace(layer_idx=index)
            outputs.append(self.cache.attend(layer, q.clone(), k, v, rows, self.how)[0])
            queries.append(q[0])
        self.cache.advance(count)
        return queries, outputs

    def keep(self, path: list[int]) -> None:
        self.cache.keep(path)
        self.tail = [self.tail[row] for row in path]
        self.parents = list(range(-1, len(path) - 1))

    def commit(self) -> None:
        """Everything that ``keep`` left."""
        self.cache.commit(len(self.tail))
        self.committed += self.tail
        self.tail, self.parents = [], []

    def expected(self, q: Tensor, index: int, row: int, seen: list[Row], turn=lambda x, places: x) -> Tensor:
        """Attention of a query ``[H_q, D]`` over committed ``seen`` and its tail ancestors."""
        rows = [*seen, *(self.tail[i] for i in self.ancestors(row))]
        places = torch.arange(len(rows))
        group = self.heads[0] // self.heads[1]
        k = turn(torch.stack([r.k[index] for r in rows], 1), places).double().repeat_interleave(group, 0)
        v = torch.stack([r.v[index] for r in rows], 1).double().repeat_interleave(group, 0)
        if self.how.window is not None:
            k, v = k[:, -self.how.window :], v[:, -self.how.window :]
        q = turn(q[:, None], places[-1:]).double()
        return ((q @ k.transpose(1, 2) * self.how.scale).softmax(-1) @ v)[:, 0].float()

    def check(self, written: tuple[list[Tensor], list[Tensor]], seen: list[Row], **kwargs) -> None:
        queries, outputs = written
        for index in range(LAYERS):
            start = len(self.tail) - queries[index].shape[1]
            for t in range(queries[index].shape[1]):
                wanted = self.expected(queries[index][:, t], index, start + t, seen, **kwargs)
                torch.testing.assert_close(outputs[index][:, t], wanted, atol=2e-5, rtol=1e-4)


def random_parents(tail: int, count: int) -> list[int]:
    """Each new row follows any row before it, or the committed end."""
    return [random.randint(-1, tail + row - 1) for row in range(count)]


def random_use(model: ListCache, steps: int, seen, **kwargs) -> None:
    """Writes, rollbacks and commits in random order; every output is checked."""
    for _ in range(steps):
        for _ in range(random.randint(1, 3)):
            parents = random_parents(len(model.tail), random.randint(1, 7))
            model.check(model.write(parents), seen(), **kwargs)
            if random.random() < 0.4:
                model.keep(model.ancestors(random.randint(-1, len(model.tail) - 1)))
        model.keep(model.ancestors(random.randint(-1, len(model.tail) - 1)))
        model.commit()
        assert model.cache.length == len(model.committed)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [None, 1, 5, 1000])
@pytest.mark.parametrize("capacity", [0, 7, 512])
def test_full_cache_is_a_list(heads, window, capacity, poisoned_empty) -> None:
    model = ListCache(FullCache(LAYERS, capacity), heads, Variant(DIM**-0.5, window))
    random_use(model, 25, lambda: model.committed)
    assert len(model.committed) > 20


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("sinks", "window"), [(0, 1), (2, 3), (4, 8), (4, 300)])
def test_streaming_cache_is_a_list_of_sinks_and_recent_rows(heads, sinks, window, poisoned_empty) -> None:
    """Positions count what is held: a key turns by its place in the cache, a query by its own."""
    cache = StreamingCache(LAYERS, StreamingConfig(sinks, window), HalfRope())
    model = ListCache(cache, heads)
    held: list[Row] = []

    def seen() -> list[Row]:
        nonlocal held
        held = [*held, *model.committed[seen.known :]]
        seen.known = len(model.committed)
        if len(held) > sinks + 2 * window:
            held = [*held[:sinks], *held[-window:]]
        assert cache.held == len(held)
        return held

    seen.known = 0
    random_use(model, 40, seen, turn=rotated)
    seen()
    assert len(model.committed) > 30
    if window < 100:
        assert len(held) < len(model.committed), "rows have left"


def test_queries_of_kept_rows_are_at_hand() -> None:
    """The full cache keeps the last forward's queries for those rows alone that were kept."""
    model = ListCache(FullCache(LAYERS), (4, 2))
    model.write([-1, 0])
    queries, _ = model.write([1, 1, 2, 3])
    model.keep([0, 1, 3, 5])
    for index in range(LAYERS):
        torch.testing.assert_close(model.cache.queries[index][0], queries[index][:, [1, 3]])


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


# --- with a model: one layer, so that a row depends on its own token alone ---


def test_a_streaming_model_sees_its_sinks_and_recent_rows_alone() -> None:
    """After many evictions the logits are those of a plain forward over the tokens still held."""
    sinks, window = 3, 6
    model = tiny("llama-gqa", num_hidden_layers=1)
    checked = HFModel(model)
    level = Level(checked, StreamingCache(1, StreamingConfig(sinks, window), checked.rope()), prefill_chunk=4)
    tokens = prompt_of(90)
    held = tokens[:9]
    with checked.active():
        level.prefill(Context(tokens[:10]))
        for end in range(10, 90, 4):
            logits, _ = level.catch_up(Context(tokens[:end]))
            assert level.cache.held == len(held)
            seen = [*held, *tokens[level.cache.length : end]]
            with torch.no_grad():
                model.set_attn_implementation("sdpa")
                expected = model(torch.tensor([seen])).logits[0, -1]
                model.set_attn_implementation("triforce_tree")
            torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)
            held += tokens[level.cache.length : end]
            level.commit(Context([*tokens[:end], 0]))
            if len(held) > sinks + 2 * window:
                held = [*held[:sinks], *held[-window:]]
    assert level.cache.length == 86


@pytest.mark.parametrize("length", [1, 2, 5, 16, 17, 100])
@pytest.mark.parametrize("prefill_chunk", [1, 3, 1000])
def test_streaming_prefill_passes_over_what_nobody_would_see(length: int, prefill_chunk: int) -> None:
    sinks, window = 3, 6
    model = tiny("llama", num_hidden_layers=1)
    checked = HFModel(model)
    level = Level(checked, StreamingCache(1, StreamingConfig(sinks, window), checked.rope()), prefill_chunk)
    tokens = prompt_of(length)
    fed: list[int] = []
    with checked.active():
        level.prefill(Context(tokens), fed.append)
        assert level.cache.length == sum(fed) == length - 1
        assert level.cache.held <= sinks + 2 * window
        logits, _ = level.catch_up(Context(tokens))
    recent = level.cache.held - min(sinks, length - 1)
    seen = [*tokens[: min(sinks, length - 1)], *tokens[length - 1 - recent :]]
    assert recent >= min(window, length - 1 - sinks)
    with torch.no_grad():
        torch.testing.assert_close(logits, model(torch.tensor([seen])).logits[0, -1], atol=2e-5, rtol=1e-4)

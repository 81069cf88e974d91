"""Trees under a sliding window, in ring buffers and in full stores, against a softmax by hand.

In plain torch, and with the kernels in Triton's interpreter. Slots that must not be read are NaN.
"""

from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.kernels.kernels_cases import poisoned_memory, tree_mask
from triforce_tree.kernels import step
from triforce_tree.kernels.attention import backend
from triforce_tree.kernels.attention.plan import AttentionParams, Heads, pack_mask
from triforce_tree.kernels.attention.prefill import causal_attention
from triforce_tree.kv import prefill
from triforce_tree.kv import store as store_module
from triforce_tree.kv.store import KVStore
from triforce_tree.kv.tree_attention_view import TreeAttentionView
from triforce_tree.models.attention import KVShape

CPU = torch.device("cpu")


@pytest.fixture(params=["torch", "kernels"])
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The implementation of attention and of KV writes."""
    if request.param == "kernels":
        pytest.importorskip("triton", reason="the kernels need Triton; install triton to run their tests")
        from triton import knobs

        if not knobs.runtime.interpret:
            pytest.skip("Triton was loaded without TRITON_INTERPRET=1")
        from triforce_tree.kernels.attention import launch
        from triforce_tree.kernels.step import kv_slots_kernels

        def run(self: launch.TritonAttention, *args: Any) -> Tensor:
            with poisoned_memory():
                return self.states(*args)[0]

        monkeypatch.setitem(backend._DEFAULTS, "cpu", "triton")
        monkeypatch.setattr(launch.TritonAttention, "run", run)
        monkeypatch.setattr(step, "append_kv", kv_slots_kernels.append_kv)
        monkeypatch.setattr(step, "move_kv", kv_slots_kernels.move_kv)
    return str(request.param)


def by_hand(
    q: Tensor, k: Tensor, v: Tensor, places: Tensor, own: Tensor, mask: Tensor, how: AttentionParams
) -> Tensor:
    """``[T, H_q, D_v]`` in fp64: queries ``[H_q, T, D]`` at positions ``own``, keys at ``places``."""
    (heads, queries, _), dim = q.shape, v.shape[-1]
    out = torch.zeros(queries, heads, dim, dtype=torch.float64)
    before = len(places) - mask.shape[1]
    assert how.window is not None
    for t in range(queries):
        seen = own[t] - places < how.window
        if how.chunked:
            seen = own[t] // how.window == places // how.window
        seen[before:] &= mask[t]
        for h in range(heads):
            keys, values = (x[h // (heads // k.shape[0]), seen].double() for x in (k, v))
            scores = keys @ q[h, t].double() * how.scale
            if how.softcap is not None:
                scores = how.softcap * (scores / how.softcap).tanh()
            if how.sinks is not None:
                scores = torch.cat([scores, how.sinks[h : h + 1].double()])
                values = torch.cat([values, values.new_zeros(1, dim)])
            out[t, h] = scores.softmax(0) @ values
    return out.to(q.dtype)


_RAGGED = "ragged sequences, before and after the ring wraps"
# Positions before the tail of each sequence; queries; window; scratch slots, None for a store without rings.
CASES: dict[str, tuple[list[int], int, int, int | None]] = {
    "one sequence, the ring wraps several times": ([1003], 7, 20, 20),
    _RAGGED: ([3, 61, 250, 19], 9, 20, 20),
    "wider than a tile": ([700, 300], 5, 150, 30),
    "smaller than the tree is deep": ([90, 2, 41], 12, 3, 24),
    "a window of one position": ([50], 6, 1, 12),
    "a tail over 64 bits": ([200, 30], 70, 31, 80),
    "a full store": ([120, 5, 33], 8, 17, None),
    "an empty sequence": ([0, 40], 10, 6, 20),
    "at the beginning and the end of a chunk": ([119, 120, 121], 5, 20, 20),
}


@pytest.mark.parametrize(
    ("case", "variant"),
    [
        *((case, kind) for case in CASES for kind in ("plain", "chunked")),
        (_RAGGED, "softcap"),
        (_RAGGED, "sinks"),
        (_RAGGED, "values"),
    ],
)
def test_each_query_sees_its_window(
    case: str, variant: str, ops: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, queries, window, scratch = CASES[case]
    value_dim = 10 if variant == "values" else 24
    monkeypatch.setattr(store_module, "RING_PAGE", 16)
    heads, batch = Heads(6, 2, 24, value_dim), len(lengths)
    softcap, sinks = 2.0 if variant == "softcap" else None, torch.randn(6) if variant == "sinks" else None
    how = AttentionParams(0.4, window, softcap, sinks, chunked := variant == "chunked")
    max_seq_len = max(lengths) + queries + 100
    store = KVStore(
        [KVShape(heads, window, chunked)], batch, max_seq_len, CPU, torch.float32, scratch=scratch
    )
    [group] = store.groups
    assert group.ring == (0 if scratch is None else -(-(window + scratch) // 16) * 16)
    mask = tree_mask(queries, queries, seed=queries)
    depths = mask.sum(1) - 1
    store.memory.fill_(torch.nan)
    kv = [
        [torch.randn(heads.kv, length + queries, dim) for dim in (heads.dim, heads.value_dim)]
        for length in lengths
    ]
    for b, length in enumerate(lengths):
        oldest = length // window * window if chunked else max(0, length - window + 1)
        for position in range(oldest, length):
            slot = position % group.ring if group.ring else position
            for slots, part in zip((group.k, group.v), kv[b], strict=True):
                slots[0, b, :, slot] = part[:, position]
    q = torch.randn(batch, heads.query, queries, heads.dim)
    new = [torch.stack([part[:, -queries:] for part in parts]) for parts in zip(*kv, strict=True)]
    view = TreeAttentionView(store, queries, depths=depths.tolist())
    view.begin(torch.tensor(lengths), pack_mask(mask).expand(batch, -1, -1))
    out = view(0, q, *new, how)
    for b, length in enumerate(lengths):
        own = length + depths
        places = torch.cat([torch.arange(length), own])
        expected = by_hand(q[b], *kv[b], places, own, mask, how)
        torch.testing.assert_close(out[b], expected, atol=2e-6, rtol=1e-5)


def test_an_accepted_path_is_moved_in_every_group(ops: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """KV of a tree is written and its accepted path moved: in full layers, and across the end of a ring."""
    monkeypatch.setattr(store_module, "RING_PAGE", 8)
    ringed = KVShape(Heads(2, 1, 16, 5), 5)
    shapes = [ringed, KVShape(Heads(4, 2, 8)), ringed]
    store = KVStore(shapes, 2, 90, CPU, torch.float32, scratch=10)
    assert [(g.layers, g.ring) for g in store.groups] == [((0, 2), 16), ((1,), 0)]
    store.memory.fill_(torch.nan)
    view = TreeAttentionView(store, 6, depths=[0, 1, 1, 2, 2, 3])
    starts = [14, 60]
    view.begin(torch.tensor(starts))
    new = []
    for layer, shape in enumerate(shapes):
        heads = shape.heads
        q, k = (torch.randn(2, h, 6, heads.dim) for h in (heads.query, heads.kv))
        v = torch.randn(2, heads.kv, 6, heads.value_dim)
        view(layer, q, k, v, AttentionParams(1.0, shape.window))
        new.append((k, v))
    path = torch.tensor([[0, 2, 4, 5], [0, 1, -1, -1]])
    view.move(path)
    for layer in range(3):
        for part, cached in enumerate(store.layers[layer].kv):
            ring = store.layers[layer].group.ring or 10**6
            for b, start in enumerate(starts):
                for i, node in enumerate(path[b].tolist()):
                    if node >= 0:
                        assert torch.equal(cached[b, :, (start + i) % ring], new[layer][part][b, :, node])


@pytest.mark.parametrize(
    ("chunk", "positions", "window"), [(50, 80, 5), (33, 60, 40), (1, 40, 6), (64, 64, 3)]
)
@pytest.mark.parametrize("sinks", [True, False])
def test_a_prefill_chunk_in_blocks_equals_one_in_full(
    chunk: int, positions: int, window: int, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "_BLOCK", 7)
    q, (k, v) = torch.randn(1, 4, chunk, 8), torch.randn(2, 1, 2, positions, 8)
    how = AttentionParams(0.3, window, None, torch.randn(4) if sinks else None)
    whole = causal_attention(q, k, v, scale=how.scale, window=window, sinks=how.sinks)
    torch.testing.assert_close(prefill.windowed_attention(q, k, v, how, positions - chunk), whole)


@pytest.mark.parametrize(
    ("count", "position", "window"), [(50, 30, 16), (33, 0, 40), (1, 40, 20), (1, 41, 20), (64, 8, 3)]
)
@pytest.mark.parametrize("sinks", [True, False])
def test_a_prefill_over_chunks_of_attention(count: int, position: int, window: int, sinks: bool) -> None:
    """Keys before the first query's chunk are not given, or NaN."""
    given = position + count
    q, (k, v) = torch.randn(1, 4, count, 8), torch.randn(2, 1, 2, given, 8)
    how = AttentionParams(0.3, window, None, torch.randn(4) if sinks else None, chunked=True)
    own, mask = torch.arange(position, given), torch.ones(count, count, dtype=torch.bool).tril()
    expected = by_hand(q[0], k[0], v[0], torch.arange(given), own, mask, how).transpose(0, 1)[None]
    first = position // window * window
    k[:, :, :first], v[:, :, :first] = torch.nan, torch.nan
    for start in (0, first):
        out = prefill.windowed_attention(q, k[:, :, start:], v[:, :, start:], how, position)
        torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


def test_layers_of_one_shape_share_their_tensors_and_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    store = KVStore([KVShape(Heads(4, 2, 8, 5))] * 3, 2, 100, CPU, torch.float32, scratch=20)
    sizes = [(3, 2, 2, 128, 8), (3, 2, 2, 128, 5)]
    assert [part.shape for part in store.kv] == sizes
    assert store.memory.numel() == sum(map(prod, sizes)), "no slot is padded"
    calls: list[list[tuple[int, ...]]] = []
    monkeypatch.setattr(
        step, "move_kv", lambda *kv_and_rest: calls.append([t.shape for t in kv_and_rest[:2]])
    )
    store.move(torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    assert calls == [sizes]


def test_a_layer_with_a_window_has_a_ring_of_its_size() -> None:
    heads = Heads(4, 2, 8)
    shapes = [KVShape(heads, 1024), KVShape(heads), KVShape(heads, 512), KVShape(heads, 200_000)]
    store = KVStore(shapes, 1, 131_072 + 200, torch.device("meta"), torch.bfloat16, scratch=200)
    assert [(g.layers, g.shape.window, g.slots) for g in store.groups] == [
        ((0,), 1024, 1280),
        ((1, 3), None, 131_328),
        ((2,), 512, 768),
    ]
    short = KVStore(shapes, 1, 1000, torch.device("meta"), torch.bfloat16, scratch=200)
    assert [(g.layers, g.shape.window, g.slots) for g in short.groups] == [
        ((0, 1, 3), None, 1024),
        ((2,), 512, 768),
    ]


def test_a_ring_holds_only_the_window_before_the_last_position() -> None:
    shapes = [KVShape(Heads(1, 1, 8), 20), KVShape(Heads(1, 1, 8))]
    store = KVStore(shapes, 2, 1000, CPU, torch.float32, scratch=100)
    assert store.groups[0].ring == 128
    store.fed(0, 300)
    store.fed(1, 50)
    assert store.holds([300, 50])
    store.grown([7, 0])
    assert store.holds([307, 50])
    # A pass after 300 tokens writes up to 100 further positions, which overwrite those before 272.
    assert store.holds([292, 42])
    assert not store.holds([291, 50])
    assert not store.holds([307, 41])
    assert not store.continues(0, 291)
    assert store.continues(1, 42)
    whole = KVStore(shapes, 2, 1000, CPU, torch.float32)
    whole.fed(0, 900)
    assert whole.holds([1, 1])


def test_windows_without_depths_raise() -> None:
    store = KVStore([KVShape(Heads(1, 1, 8), 20)], 1, 100, CPU, torch.float32)
    with pytest.raises(ValueError, match="window=20 needs the depths of all 5 tail tokens"):
        TreeAttentionView(store, 3, tail=5)


def test_another_window_than_the_store_was_made_for_raises() -> None:
    store = KVStore([KVShape(Heads(1, 1, 8), 20)], 1, 100, CPU, torch.float32)
    view = TreeAttentionView(store, 1)
    one = torch.zeros(1, 1, 1, 8)
    for window in (None, 21):
        with pytest.raises(RuntimeError, match=f"layer 0 attends within a window of {window} positions"):
            view(0, one, one, one, AttentionParams(1.0, window))

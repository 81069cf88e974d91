"""Attention with a plan on the CPU, against the reference on KV slots gathered one by one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.kernels.kernels_cases import tree_mask
from triforce_tree.kernels.attention import reference
from triforce_tree.kernels.attention.backend import backend
from triforce_tree.kernels.attention.plan import KV, AttentionParams, FirstVisible, Heads, Plan, plan_trees

PAGE = 4


def attend(q: Tensor, kv: KV, plan: Plan, first: FirstVisible | None = None, **variant: Any) -> Tensor:
    """Attends by the CPU's backend, with a scale of 0.4."""
    made = backend("cpu").trees(plan, q.dtype)
    made.begin()
    return made.run(q, kv, AttentionParams(0.4, **variant), first)


def expected(
    q: Tensor, kv: list[tuple[Tensor, Tensor]], masks: list[Tensor], scale: float, **variant: object
) -> Tensor:
    """The reference, one sequence at a time, on contiguous K and V ``[H_kv, S, D]`` of each."""
    parts, first = [], 0
    for (k, v), mask in zip(kv, masks, strict=True):
        own = q[first : first + len(mask)].transpose(0, 1)[None]
        out, _ = reference.tree_attention(own, k[None], v[None], mask, scale=scale, **variant)
        parts.append(out[0].transpose(0, 1))
        first += len(mask)
    return torch.cat(parts)


def by_hand(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """``[T, H_q, D]`` with a plain softmax in fp64 over the positions that each query sees."""
    heads, group = q.shape[1], q.shape[1] // k.shape[0]
    out = torch.zeros_like(q, dtype=torch.float64)
    for t in range(len(q)):
        for h in range(heads):
            keys, values = (x[h // group, seen[t]].double() for x in (k, v))
            out[t, h] = (keys @ q[t, h].double() * scale).softmax(0) @ values
    return out.to(q.dtype)


# (prefix length, queries, tail length) of each sequence
RAGGED = {
    "one": [(11, 5, 5)],
    "a batch": [(7, 3, 3), (0, 9, 9), (23, 1, 1)],
    "tails longer than the queries": [(6, 4, 9), (0, 2, 7), (13, 1, 12)],
    "over 64 bits": [(5, 70, 70), (9, 3, 130), (0, 64, 64)],
}
HEADS = {"MHA": Heads(4, 4, 8), "GQA": Heads(6, 2, 8), "MQA": Heads(3, 1, 16)}
VARIANTS: dict[str, dict[str, float]] = {"plain": {}, "softcap": {"softcap": 2.0}, "sinks": {"sinks": 1.0}}


def variant_of(name: str, heads: Heads) -> dict[str, object]:
    return {"sinks": torch.randn(heads.query)} if name == "sinks" else dict(VARIANTS[name])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("batch", RAGGED)
def test_contiguous_kv(batch: str, heads: str, variant: str) -> None:
    shape, lengths = HEADS[heads], [length for length, *_ in RAGGED[batch]]
    masks = [tree_mask(queries, tail, seed) for seed, (_, queries, tail) in enumerate(RAGGED[batch])]
    how = variant_of(variant, shape)
    q = torch.randn(sum(map(len, masks)), shape.query, shape.dim)
    k, v = torch.randn(2, len(masks), shape.kv, 160, shape.dim)
    plan = plan_trees(shape, masks, lengths, device="cpu")
    ends = [length + mask.shape[1] for length, mask in zip(lengths, masks, strict=True)]
    kv = [(k[b, :, :end], v[b, :, :end]) for b, end in enumerate(ends)]
    for b, end in enumerate(ends):
        k[b, :, end:] = v[b, :, end:] = torch.nan
    out = attend(q, KV(k, v), plan, **how)
    torch.testing.assert_close(out, expected(q, kv, masks, 0.4, **how))


@pytest.mark.parametrize("per_head", [True, False], ids=["a table per head", "a table for all heads"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("batch", RAGGED)
def test_paged_kv(batch: str, heads: str, per_head: bool) -> None:
    """Pages in any order, some of them shared between heads; unused pages hold NaN."""
    shape, lengths = HEADS[heads], [length for length, *_ in RAGGED[batch]]
    masks = [tree_mask(queries, tail, seed) for seed, (_, queries, tail) in enumerate(RAGGED[batch])]
    ends = [length + mask.shape[1] for length, mask in zip(lengths, masks, strict=True)]
    width = -(-max(ends) // PAGE) + 2
    tables = (len(masks), shape.kv, width) if per_head else (len(masks), width)
    table = torch.randint(1, 60, tables, dtype=torch.int32)
    k, v = torch.randn(2, 61, shape.kv, PAGE, shape.dim)
    k[0] = v[0] = k[60] = v[60] = torch.nan
    for b, end in enumerate(ends):
        table[b, ..., -(-end // PAGE) :] = 60
    q = torch.randn(sum(map(len, masks)), shape.query, shape.dim)
    plan = plan_trees(shape, masks, lengths, device="cpu")
    kv = []
    for b, end in enumerate(ends):
        picked = []
        for pages in (k, v):
            heads_kv = []
            for head in range(shape.kv):
                own = table[b, head] if per_head else table[b]
                heads_kv.append(torch.stack([pages[own[r // PAGE], head, r % PAGE] for r in range(end)]))
            picked.append(torch.stack(heads_kv))
        kv.append((picked[0], picked[1]))
    out = attend(q, KV(k, v, table), plan)
    torch.testing.assert_close(out, expected(q, kv, masks, 0.4))


def test_pages_that_overlap_in_memory() -> None:
    """A contiguous cache ``[B, H, S, D]`` seen as pages, as the retrieval view does."""
    heads, batch, positions = Heads(4, 2, 8), 3, 24
    cache = torch.randn(2, batch, heads.kv, positions, heads.dim)
    apart = heads.kv * positions // PAGE
    shape = ((batch - 1) * apart + positions // PAGE, heads.kv, PAGE, heads.dim)
    strides = (PAGE * heads.dim, positions * heads.dim, heads.dim, 1)
    k, v = (t.as_strided(shape, strides, t.storage_offset()) for t in cache)
    table = torch.stack([torch.arange(positions // PAGE) + b * apart for b in range(batch)]).int()
    masks = [tree_mask(5, 5, b) for b in range(batch)]
    plan = plan_trees(heads, masks, [7, 19, 0], device="cpu")
    q = torch.randn(15, heads.query, heads.dim)
    whole = attend(q, KV(*cache), plan)
    assert torch.equal(attend(q, KV(k, v, table), plan), whole)


def test_against_a_softmax_by_hand() -> None:
    """Independent of the reference: the positions that each query sees are listed."""
    heads, masks, lengths = Heads(4, 2, 8), [tree_mask(6, 8, 0), tree_mask(3, 3, 1)], [9, 4]
    k, v = torch.randn(2, 2, heads.kv, 20, heads.dim)
    q = torch.randn(9, heads.query, heads.dim)
    plan = plan_trees(heads, masks, lengths, device="cpu")
    out = attend(q, KV(k, v), plan)
    for b, (queries, mask) in enumerate(zip((q[:6], q[6:]), masks, strict=True)):
        before = torch.ones(len(mask), lengths[b], dtype=torch.bool)
        seen = torch.cat([before, mask], 1)
        end = seen.shape[1]
        hand = by_hand(queries, k[b, :, :end], v[b, :, :end], seen, 0.4)
        torch.testing.assert_close(out[:6] if b == 0 else out[6:], hand)


def test_lengths_and_masks_change_in_place() -> None:
    heads = Heads(2, 1, 8)
    k, v = torch.randn(2, 2, 1, 40, 8)
    q = torch.randn(8, 2, 8)
    masks = [tree_mask(4, 6, seed) for seed in (0, 1)]
    plan = plan_trees(heads, [torch.ones(4, 6, dtype=torch.bool)] * 2, [0, 0], device="cpu")
    for lengths in ([3, 30], [34, 0]):
        plan.lengths.copy_(torch.tensor(lengths))
        words = torch.stack([(mask.long() << torch.arange(6)).sum(1) for mask in masks])
        plan.mask.copy_(words.reshape(-1, 1))
        fresh = plan_trees(heads, masks, lengths, device="cpu")
        out = attend(q, KV(k, v), plan)
        assert torch.equal(out, attend(q, KV(k, v), fresh))


def test_the_highest_bit_of_a_mask_word() -> None:
    """Mask words are signed integers, which bit 63 makes negative."""
    heads, mask = Heads(1, 1, 8), torch.zeros(64, 64, dtype=torch.bool)
    mask[:, 63] = True
    k, v = torch.randn(2, 1, 1, 64, 8)
    plan = plan_trees(heads, [mask], [0], device="cpu")
    assert int(plan.mask.max()) < 0
    out = attend(torch.randn(64, 1, 8), KV(k, v), plan)
    torch.testing.assert_close(out, v[0, :, 63].expand(64, 1, 8))


@pytest.mark.parametrize("paged", [True, False], ids=["pages", "contiguous"])
@pytest.mark.parametrize("tail", [6, 11], ids=["tail of the queries", "longer tail"])
@pytest.mark.parametrize("given", [1, 4, 6])
def test_fewer_queries_than_planned(given: int, tail: int, paged: bool) -> None:
    """The first queries of every sequence, with as many fewer new positions: later slots are not read."""
    heads, batch, lengths = Heads(4, 2, 8), 3, [13, 0, 4100]
    masks = [tree_mask(6, tail, seed) for seed in range(batch)]
    plan = plan_trees(heads, masks, lengths, device="cpu")
    size = 4120  # more than one batched product is used for
    k, v = torch.randn(2, batch, heads.kv, size, heads.dim)
    ends = [length + tail - 6 + given for length in lengths]
    for b, end in enumerate(ends):
        k[b, :, end:] = v[b, :, end:] = torch.nan
    q = torch.randn(batch * given, heads.query, heads.dim)
    kv = [(k[b, :, :end], v[b, :, :end]) for b, end in enumerate(ends)]
    wanted = expected(q, kv, [mask[:given, : tail - 6 + given] for mask in masks], 0.4)
    table = None
    if paged:
        # Pages of every sequence in reverse order.
        pages = size // PAGE
        table = torch.arange(batch * pages, dtype=torch.int32).view(batch, pages).flip(1)
        k, v = (
            t.unflatten(2, (pages, PAGE)).flip(2).transpose(1, 2).flatten(0, 1).contiguous() for t in (k, v)
        )
    out = attend(q, KV(k, v, table), plan)
    torch.testing.assert_close(out, wanted)


def test_windows_of_fewer_queries_than_planned() -> None:
    heads, mask = Heads(4, 2, 8), tree_mask(5, 5, 0)
    plan = plan_trees(heads, [mask], [30], device="cpu")
    k, v = torch.randn(2, 1, heads.kv, 40, heads.dim)
    q, first = torch.randn(3, heads.query, heads.dim), torch.tensor([4, 0, 29, 30, 30])
    first_rows = FirstVisible(first, first.amin(0, keepdim=True), first.amax(0, keepdim=True))
    out = attend(q, KV(k, v), plan, first_rows)
    wanted = expected(q, [(k[0, :, :33], v[0, :, :33])], [mask[:3, :3]], 0.4, first=first[:3])
    torch.testing.assert_close(out, wanted)

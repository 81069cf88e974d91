"""Attention of sequences that begin alike, the prefix read once, against each sequence with a copy of it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.kernels import triton_ops
from tests.support.kernels.kernels_cases import poisoned_memory, tree_mask
from triforce_tree.kernels.attention import reference
from triforce_tree.kernels.attention.backend import backend
from triforce_tree.kernels.attention.plan import KV, AttentionParams, Heads, pack_mask
from triforce_tree.kernels.attention.prefixes import PrefixPlan, PrefixSegment
from triforce_tree.kernels.cpu import backend as cpu_backend
from triforce_tree.kernels.step.kv_slots import dequantized, quantized

FIRST, APART = 80, 72
# Positions of the prefix, then of each sequence between it and the tail.
LENGTHS = {"ragged": [71, 9, 0, 40], "no prefix": [0, 30, 7, 1], "whole prefix": [80, 0, 0, 33]}
HEADS = {
    "MHA": Heads(4, 4, 16),
    "GQA": Heads(6, 2, 32),
    "MQA": Heads(3, 1, 16),
    "wide keys": Heads(4, 2, 48, 16),
}
Slots = tuple[Tensor, Tensor]


def place_of(b: int) -> int:
    """The first slot of a sequence after its prefixes: the second one lies after the third."""
    return FIRST + (0, 2, 1, 3, 4)[b] * APART


def places(batch: int) -> list[int]:
    return [place_of(b) for b in range(batch)]


def problem(
    heads: Heads, lengths: list[int], queries: int, tail: int, dtype: torch.dtype
) -> tuple[Tensor, Slots]:
    """Queries, and slots that hold NaN wherever no sequence has a position."""
    batch = len(lengths) - 1
    slots = []
    for dim in (heads.dim, heads.value_dim):
        made = torch.full((1, heads.kv, FIRST + batch * APART + 3, dim), torch.nan, dtype=dtype)
        made[:, :, : lengths[0]] = torch.randn(1, heads.kv, lengths[0], dim)
        for b, length in enumerate(lengths[1:]):
            first = place_of(b)
            made[:, :, first : first + length + tail] = torch.randn(1, heads.kv, length + tail, dim)
        slots.append(made)
    return torch.randn(batch * queries, heads.query, heads.dim).to(dtype), (slots[0], slots[1])


def plan_of(heads: Heads, mask: Tensor, lengths: list[int], device: str = "cpu") -> PrefixPlan:
    batch = len(lengths) - 1
    made = empty_plan(heads, mask, lengths[1:], depth=1, device=device)
    made.set([PrefixSegment(0, lengths[0], 0, batch)], places(batch))
    return made


def empty_plan(heads: Heads, mask: Tensor, lengths: list[int], depth: int, device: str = "cpu") -> PrefixPlan:
    """Returns a plan without prefixes for sequences of these ``lengths``."""
    batch = len(lengths)
    words = pack_mask(mask).repeat(batch, 1).to(device)
    counts = torch.tensor([*lengths, *[0] * depth * batch], dtype=torch.int32, device=device)
    return PrefixPlan(heads, mask, batch, depth, counts, words)


def attended(name: str, plan: PrefixPlan, q: Tensor, kv: KV, **how: Any) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps of this backend, on the CPU."""
    device = plan.plan.device
    k, v, *rest = (t.to(device) for t in (kv.k, kv.v, *(kv.scales or ())))
    with poisoned_memory():
        made = backend(name).prefixes(plan, q.dtype, k.dtype)
        made.begin()
        moved = KV(k, v, scales=(rest[0], rest[1]) if rest else None)
        out, lse = made.states(q.to(device), moved, AttentionParams(0.4, **how))
    return out.cpu(), lse.cpu()


def expected(q: Tensor, kv: Slots, mask: Tensor, lengths: list[int], **how: object) -> tuple[Tensor, Tensor]:
    """Each sequence alone, its keys and values after a copy of the prefix, in fp32."""
    parts = []
    for b, length in enumerate(lengths[1:]):
        first, stop = place_of(b), place_of(b) + length + mask.shape[1]
        own = [torch.cat([t[:, :, : lengths[0]], t[:, :, first:stop]], 2).float() for t in kv]
        queries = q[b * len(mask) : (b + 1) * len(mask)].float().transpose(0, 1)[None]
        out, lse = reference.tree_attention(queries, *own, mask, scale=0.4, **how)
        parts.append((out[0].transpose(0, 1), lse[0].transpose(0, 1)))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(lses)


@pytest.mark.parametrize("compiled", [True, False], ids=["C", "torch"])
@pytest.mark.parametrize("variant", ["plain", "softcap", "sinks"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_on_the_cpu(
    lengths: str, heads: str, variant: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, counts = HEADS[heads], LENGTHS[lengths]
    mask = tree_mask(5, 7, 1)
    q, kv = problem(shape, counts, 5, 7, torch.float32)
    variants = {"plain": {}, "softcap": {"softcap": 2.0}, "sinks": {"sinks": torch.randn(shape.query)}}
    if not compiled:
        monkeypatch.setattr(cpu_backend, "fp32_attention", lambda *args, **how: None)
    made = attended("cpu", plan_of(shape, mask, counts), q, KV(*kv), **variants[variant])
    torch.testing.assert_close(made, expected(q, kv, mask, counts, **variants[variant]))


def test_fewer_queries_than_planned() -> None:
    """The first ones of each sequence, as forwards on the CPU bring them."""
    shape, counts, mask = HEADS["GQA"], LENGTHS["ragged"], tree_mask(6, 6, 2)
    q, kv = problem(shape, counts, 2, 6, torch.float32)
    plan = plan_of(shape, mask, counts)
    for _ in range(2):
        made = attended("cpu", plan, q, KV(*kv))
        torch.testing.assert_close(made, expected(q, kv, mask[:2, :2], counts))


def test_in_8_bits_on_the_cpu() -> None:
    shape, counts, mask = HEADS["GQA"], LENGTHS["ragged"], tree_mask(5, 7, 1)
    q, kv = problem(shape, counts, 5, 7, torch.float32)
    (k, k_scale), (v, v_scale) = map(quantized, kv)
    made = attended("cpu", plan_of(shape, mask, counts), q, KV(k, v, scales=(k_scale, v_scale)))
    stored = dequantized(k, k_scale, q.dtype), dequantized(v, v_scale, q.dtype)
    torch.testing.assert_close(made, expected(q, stored, mask, counts))


@triton_ops.runs_kernels
@pytest.mark.parametrize(
    ("heads", "queries", "lengths", "dtype"),
    [
        ("GQA", 5, "ragged", torch.float16),
        ("GQA", 4, "no prefix", torch.float32),
        ("MHA", 1, "ragged", torch.float16),
        ("MQA", 23, "whole prefix", torch.float16),
        ("MQA", 7, "ragged", torch.float32),
        ("wide keys", 3, "ragged", torch.float16),
    ],
)
def test_by_the_kernel(heads: str, queries: int, lengths: str, dtype: torch.dtype) -> None:
    """One launch over the prefix and all sequences; with more query rows than a tile, several programs."""
    triton_ops.require_triton()
    shape, counts = HEADS[heads], LENGTHS[lengths]
    mask = tree_mask(queries, queries, 3)
    q, kv = problem(shape, counts, queries, queries, dtype)
    sinks = torch.randn(shape.query)
    plan = plan_of(shape, mask, counts, triton_ops.DEVICE)
    sinks_there = sinks.to(triton_ops.DEVICE)
    out, lse = attended("triton", plan, q, KV(*kv), sinks=sinks_there)
    exact, exact_lse = expected(q, kv, mask, counts, sinks=sinks)
    limit = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 4e-3, "atol": 4e-3}
    torch.testing.assert_close(out.float(), exact, **limit)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-3, atol=1e-3)


@triton_ops.runs_kernels
def test_by_the_kernel_in_8_bits() -> None:
    triton_ops.require_triton()
    shape, counts, mask = HEADS["GQA"], LENGTHS["ragged"], tree_mask(5, 5, 1)
    q, kv = problem(shape, counts, 5, 5, torch.float32)
    (k, k_scale), (v, v_scale) = map(quantized, kv)
    plan = plan_of(shape, mask, counts, triton_ops.DEVICE)
    stored = dequantized(k, k_scale, q.dtype), dequantized(v, v_scale, q.dtype)
    out, _ = attended("triton", plan, q, KV(k, v, scales=(k_scale, v_scale)))
    torch.testing.assert_close(out, expected(q, stored, mask, counts)[0], rtol=1e-5, atol=1e-5)


# Prefixes of five sequences: one of all with two groups behind it, of which one has a group of its own; two
# documents and a sequence without any; sequences of one prefix that do not follow each other.
GROUPS = {
    "nested": [(0, 30, 0, 5), (30, 21, 0, 3), (51, 7, 1, 2), (58, 22, 3, 2)],
    "disjoint": [(0, 33, 0, 2), (33, 47, 3, 2)],
    "apart": [(0, 40, 0, 1), (40, 40, 1, 1), (0, 40, 2, 1), (40, 40, 3, 2)],
    "none": [],
}


def grouped(
    heads: Heads,
    lengths: list[int],
    queries: int,
    groups: list[tuple[int, int, int, int]],
    dtype: torch.dtype,
) -> tuple[Tensor, Slots, list[Slots]]:
    """Queries, slots with NaN wherever nothing is stored, and keys and values of each sequence in one."""
    q, kv = problem(heads, [FIRST, *lengths], queries, queries, dtype)
    stored = {slot for place, length, *_ in groups for slot in range(place, place + length)}
    empty = [slot for slot in range(FIRST) if slot not in stored]
    for part in kv:
        part[:, :, empty] = torch.nan
    alone = []
    for b, length in enumerate(lengths):
        own = place_of(b)
        runs = [(place, count) for place, count, first, rows in groups if first <= b < first + rows]
        runs.append((own, length + queries))
        parts = [torch.cat([t[:, :, at : at + count] for at, count in runs], 2).float() for t in kv]
        alone.append((parts[0], parts[1]))
    return q, kv, alone


def each_alone(q: Tensor, alone: list[Slots], mask: Tensor, **how: object) -> tuple[Tensor, Tensor]:
    parts = []
    for b, own in enumerate(alone):
        queries = q[b * len(mask) : (b + 1) * len(mask)].float().transpose(0, 1)[None]
        out, lse = reference.tree_attention(queries, *own, mask, scale=0.4, **how)
        parts.append((out[0].transpose(0, 1), lse[0].transpose(0, 1)))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(lses)


@pytest.mark.parametrize("compiled", [True, False], ids=["C", "torch"])
@pytest.mark.parametrize("sinks", [False, True])
def test_groups_on_the_cpu(sinks: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One plan, whose prefixes change."""
    if not compiled:
        monkeypatch.setattr(cpu_backend, "fp32_attention", lambda *args, **how: None)
    heads, lengths, mask = HEADS["GQA"], [9, 0, 40, 3, 17], tree_mask(5, 5, 1)
    variant = {"sinks": torch.randn(heads.query)} if sinks else {}
    plan = None
    for groups in GROUPS.values():
        q, kv, alone = grouped(heads, lengths, 5, groups, torch.float32)
        plan = plan or empty_plan(heads, mask, lengths, depth=3)
        plan.set([PrefixSegment(*each) for each in groups], places(len(lengths)))
        made = attended("cpu", plan, q, KV(*kv), **variant)
        torch.testing.assert_close(made, each_alone(q, alone, mask, **variant))


@triton_ops.runs_kernels
@pytest.mark.parametrize(
    ("heads", "queries", "dtype", "names"),
    [
        ("GQA", 4, torch.float32, tuple(GROUPS)),
        pytest.param("MQA", 23, torch.float16, ("nested", "apart"), marks=pytest.mark.slow),
    ],
)
def test_groups_by_the_kernel(heads: str, queries: int, dtype: torch.dtype, names: tuple[str, ...]) -> None:
    """One launch over all prefixes and sequences, by one plan in buffers that stay where they are.

    Of the case with several tiles of queries, which takes much longer, the two kinds of groups with which a
    sequence's queries are in several segments, or in one that others of the same slots do not follow.
    """
    triton_ops.require_triton()
    shape, lengths, mask = HEADS[heads], [9, 0, 40, 3, 17], tree_mask(queries, queries, 3)
    made, addresses = None, set()
    for groups in (GROUPS[name] for name in names):
        q, kv, alone = grouped(shape, lengths, queries, groups, dtype)
        made = made or empty_plan(shape, mask, lengths, 3, triton_ops.DEVICE)
        made.set([PrefixSegment(*each) for each in groups], places(len(lengths)))
        plan = made.plan
        addresses.add(
            tuple(t.data_ptr() for t in (plan.lengths, plan.segments, plan.owner_start, plan.owners))
        )
        out, lse = attended("triton", made, q, KV(*kv))
        exact, exact_lse = each_alone(q, alone, mask)
        limit = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 4e-3, "atol": 4e-3}
        torch.testing.assert_close(out.cpu().float(), exact, **limit)
        torch.testing.assert_close(lse.cpu(), exact_lse, rtol=1e-3, atol=1e-3)
    assert len(addresses) == 1

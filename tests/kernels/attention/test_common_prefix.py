"""Attention of sequences that begin alike, the prefix read once, against each sequence with a copy of it."""

import pytest
import torch
from torch import Tensor

from tests.support.kernels import triton_ops
from tests.support.kernels.kernels_cases import tree_mask
from triforce_tree.kernels.attention import reference
from triforce_tree.kernels.attention.nodes import PrefixPlan, PrefixSegment
from triforce_tree.kernels.attention.plan import Heads, pack_mask
from triforce_tree.kernels.cpu import host_prefix
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


def plan_of(heads: Heads, mask: Tensor, lengths: list[int], q: Tensor, kv_dtype: torch.dtype) -> PrefixPlan:
    batch = len(lengths) - 1
    made = empty_plan(heads, mask, lengths[1:], q, kv_dtype, depth=1)
    made.set([PrefixSegment(0, lengths[0], 0, batch)], places(batch))
    return made


def empty_plan(
    heads: Heads, mask: Tensor, lengths: list[int], q: Tensor, kv_dtype: torch.dtype, depth: int
) -> PrefixPlan:
    """Without prefixes; ``lengths`` of the sequences."""
    batch, device = len(lengths), triton_ops.DEVICE
    words = pack_mask(mask).repeat(batch, 1).to(device)
    counts = torch.tensor([*lengths, *[0] * depth * batch], dtype=torch.int32, device=device)
    return PrefixPlan(heads, mask, batch, depth, counts, words, q.dtype, kv_dtype)


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
        monkeypatch.setattr(host_prefix, "attention", lambda *args, **how: None)
    plan = plan_of(shape, mask, counts, q, q.dtype) if triton_ops.DEVICE == "cpu" else None
    if plan is None:
        pytest.skip("plans are for the GPU")
    made = plan(q, *kv, scale=0.4, **variants[variant])
    torch.testing.assert_close(made, expected(q, kv, mask, counts, **variants[variant]))


def test_fewer_queries_than_planned() -> None:
    """The first ones of each sequence, as forwards on the CPU bring them."""
    if triton_ops.DEVICE != "cpu":
        pytest.skip("plans are for the GPU")
    shape, counts, mask = HEADS["GQA"], LENGTHS["ragged"], tree_mask(6, 6, 2)
    q, kv = problem(shape, counts, 2, 6, torch.float32)
    plan = plan_of(shape, mask, counts, q, q.dtype)
    for _ in range(2):
        made = plan(q, *kv, scale=0.4)
        torch.testing.assert_close(made, expected(q, kv, mask[:2, :2], counts))


def test_in_8_bits_on_the_cpu() -> None:
    if triton_ops.DEVICE != "cpu":
        pytest.skip("plans are for the GPU")
    shape, counts, mask = HEADS["GQA"], LENGTHS["ragged"], tree_mask(5, 7, 1)
    q, kv = problem(shape, counts, 5, 7, torch.float32)
    (k, k_scale), (v, v_scale) = map(quantized, kv)
    made = plan_of(shape, mask, counts, q, torch.int8)(q, k, v, scale=0.4, scales=(k_scale, v_scale))
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
    from triforce_tree.kernels.attention import launch

    shape, counts = HEADS[heads], LENGTHS[lengths]
    mask = tree_mask(queries, queries, 3)
    q, kv = problem(shape, counts, queries, queries, dtype)
    sinks = torch.randn(shape.query)
    plan = plan_of(shape, mask, counts, q, dtype).plan
    for part in (plan.partial_out, plan.partial_lse):
        part.fill_(torch.nan)
    on_device = [t.to(triton_ops.DEVICE) for t in (q, *kv, sinks)]
    out, lse = launch.run(*on_device[:3], plan, scale=0.4, sinks=on_device[3])
    exact, exact_lse = expected(q, kv, mask, counts, sinks=sinks)
    limit = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 4e-3, "atol": 4e-3}
    torch.testing.assert_close(out.cpu().float(), exact, **limit)
    torch.testing.assert_close(lse.cpu(), exact_lse, rtol=1e-3, atol=1e-3)


@triton_ops.runs_kernels
def test_by_the_kernel_in_8_bits() -> None:
    triton_ops.require_triton()
    from triforce_tree.kernels.attention import launch

    shape, counts, mask = HEADS["GQA"], LENGTHS["ragged"], tree_mask(5, 5, 1)
    q, kv = problem(shape, counts, 5, 5, torch.float32)
    (k, k_scale), (v, v_scale) = map(quantized, kv)
    plan = plan_of(shape, mask, counts, q, torch.int8).plan
    stored = dequantized(k, k_scale, q.dtype), dequantized(v, v_scale, q.dtype)
    q_on, k_on, v_on, *scales = (t.to(triton_ops.DEVICE) for t in (q, k, v, k_scale, v_scale))
    out, _ = launch.run(q_on, k_on, v_on, plan, scale=0.4, scales=(scales[0], scales[1]))
    torch.testing.assert_close(out.cpu(), expected(q, stored, mask, counts)[0], rtol=1e-5, atol=1e-5)


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
    if triton_ops.DEVICE != "cpu":
        pytest.skip("plans are for the GPU")
    if not compiled:
        monkeypatch.setattr(host_prefix, "attention", lambda *args, **how: None)
    heads, lengths, mask = HEADS["GQA"], [9, 0, 40, 3, 17], tree_mask(5, 5, 1)
    variant = {"sinks": torch.randn(heads.query)} if sinks else {}
    plan = None
    for groups in GROUPS.values():
        q, kv, alone = grouped(heads, lengths, 5, groups, torch.float32)
        plan = plan or empty_plan(heads, mask, lengths, q, q.dtype, depth=3)
        plan.set([PrefixSegment(*each) for each in groups], places(len(lengths)))
        made = plan(q, *kv, scale=0.4, **variant)
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
    from triforce_tree.kernels.attention import launch

    shape, lengths, mask = HEADS[heads], [9, 0, 40, 3, 17], tree_mask(queries, queries, 3)
    made, addresses = None, set()
    for groups in (GROUPS[name] for name in names):
        q, kv, alone = grouped(shape, lengths, queries, groups, dtype)
        made = made or empty_plan(shape, mask, lengths, q, dtype, depth=3)
        made.set([PrefixSegment(*each) for each in groups], places(len(lengths)))
        plan = made.plan
        addresses.add(
            tuple(t.data_ptr() for t in (plan.lengths, plan.segments, plan.owner_start, plan.owners))
        )
        for part in (plan.partial_out, plan.partial_lse):
            part.fill_(torch.nan)
        on_device = [t.to(triton_ops.DEVICE) for t in (q, *kv)]
        out, lse = launch.run(*on_device, plan, scale=0.4)
        exact, exact_lse = each_alone(q, alone, mask)
        limit = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 4e-3, "atol": 4e-3}
        torch.testing.assert_close(out.cpu().float(), exact, **limit)
        torch.testing.assert_close(lse.cpu(), exact_lse, rtol=1e-3, atol=1e-3)
    assert len(addresses) == 1

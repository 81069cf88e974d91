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
from triforce_tree.kernels.attention.prefixes import PrefixPlan, segments_of
from triforce_tree.kernels.cpu import backend as cpu_backend
from triforce_tree.kernels.step.kv_slots import dequantized, quantized

PAGE = 8
# Positions of the prefix, then of each sequence between it and the tail.
LENGTHS = {"ragged": [72, 9, 0, 40], "no prefix": [0, 30, 7, 1], "whole prefix": [80, 0, 0, 33]}
HEADS = {
    "MHA": Heads(4, 4, 16),
    "GQA": Heads(6, 2, 32),
    "MQA": Heads(3, 1, 16),
    "wide keys": Heads(4, 2, 48, 16),
}
Slots = tuple[Tensor, Tensor]


class Problem:
    """Sequences whose pages are in any order, with NaN in all slots that hold no position of a sequence.

    Args:
        shared: numbers of the pages of each sequence that others may share.
        lengths: of each sequence, positions between those pages and the tail.
        queries, tail: of each sequence.

    Attributes:
        q, kv, table: the arguments of attention.
        segments, ends: the arguments of ``PrefixPlan.set``.
        alone: keys and values of each sequence, in fp32.
    """

    def __init__(
        self,
        heads: Heads,
        shared: list[list[int]],
        lengths: list[int],
        queries: int,
        tail: int,
        dtype: torch.dtype,
        depth: int,
    ) -> None:
        last = max([-1, *(page for pages in shared for page in pages)]) + 1
        own = [-(-(length + tail) // PAGE) for length in lengths]
        begins = [last + sum(own[:b]) for b in range(len(own))]
        paths = [[*pages, *range(at, at + n)] for pages, at, n in zip(shared, begins, own, strict=True)]
        count = last + sum(own) + 1
        order = torch.randperm(count)
        self.table = torch.zeros(len(lengths), max(map(len, paths)), dtype=torch.int32)
        parts: list[Tensor] = []
        self.alone: list[Slots] = []
        for dim in (heads.dim, heads.value_dim):
            parts.append(torch.full((count, heads.kv, PAGE, dim), torch.nan, dtype=dtype))
        for b, (path, pages, length) in enumerate(zip(paths, shared, lengths, strict=True)):
            self.table[b, : len(path)] = places = order[path].int()
            end, seen = len(pages) * PAGE + length + tail, list[Tensor]()
            for part in parts:
                for position in range(end):
                    slot = part[places[position // PAGE], :, position % PAGE]
                    if slot.isnan().all():
                        slot.copy_(torch.randn(slot.shape))
                seen.append(part[places.long()].transpose(0, 1).flatten(1, 2)[None, :, :end].float())
            self.alone.append((seen[0], seen[1]))
        self.kv = parts[0], parts[1]
        self.q = torch.randn(len(lengths) * queries, heads.query, heads.dim).to(dtype)
        self.segments = list(segments_of([order[pages].tolist() for pages in shared], depth, PAGE))
        self.ends = [len(pages) * PAGE for pages in shared]


def common(heads: Heads, counts: list[int], queries: int, tail: int, dtype: torch.dtype) -> Problem:
    """Returns sequences that all begin with the first of ``counts`` positions."""
    shared = [list(range(counts[0] // PAGE))] * (len(counts) - 1)
    return Problem(heads, shared, counts[1:], queries, tail, dtype, 1)


def plan_of(
    heads: Heads, mask: Tensor, made: Problem, lengths: list[int], depth: int = 1, device: str = "cpu"
) -> PrefixPlan:
    batch = len(lengths)
    words = pack_mask(mask).repeat(batch, 1).to(device)
    counts = torch.tensor(lengths, dtype=torch.int32, device=device)
    plan = PrefixPlan(heads, mask, batch, depth, counts, words)
    plan.set(made.segments, made.ends)
    return plan


def attended(
    name: str, plan: PrefixPlan, made: Problem, kv: KV | None = None, **how: Any
) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps of this backend, on the CPU."""
    kv, device = kv or KV(*made.kv), plan.own.device
    k, v, *rest = (t.to(device) for t in (kv.k, kv.v, *(kv.scales or ())))
    with poisoned_memory():
        attention = backend(name).prefixes(plan, made.q.dtype, k.dtype, PAGE)
        attention.begin()
        moved = KV(k, v, made.table.to(device), (rest[0], rest[1]) if rest else None)
        out, lse = attention.states(made.q.to(device), moved, AttentionParams(0.4, **how))
    return out.cpu(), lse.cpu()


def expected(made: Problem, mask: Tensor, **how: object) -> tuple[Tensor, Tensor]:
    """Each sequence alone, in fp32."""
    parts = []
    for b, own in enumerate(made.alone):
        queries = made.q[b * len(mask) : (b + 1) * len(mask)].float().transpose(0, 1)[None]
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
    made = common(shape, counts, 5, 7, torch.float32)
    variants = {"plain": {}, "softcap": {"softcap": 2.0}, "sinks": {"sinks": torch.randn(shape.query)}}
    if not compiled:
        monkeypatch.setattr(cpu_backend, "fp32_attention", lambda *args, **how: None)
    found = attended("cpu", plan_of(shape, mask, made, counts[1:]), made, **variants[variant])
    torch.testing.assert_close(found, expected(made, mask, **variants[variant]))


def test_fewer_queries_than_planned() -> None:
    """The first ones of each sequence, as forwards on the CPU bring them."""
    shape, counts, mask = HEADS["GQA"], LENGTHS["ragged"], tree_mask(6, 6, 2)
    made = common(shape, counts, 2, 2, torch.float32)
    plan = plan_of(shape, mask, made, counts[1:])
    for _ in range(2):
        found = attended("cpu", plan, made)
        torch.testing.assert_close(found, expected(made, mask[:2, :2]))


def in_int8(made: Problem) -> KV:
    """Returns keys and values in 8 bits, and lets ``made.alone`` be what they are then."""
    (k, k_scale), (v, v_scale) = map(quantized, made.kv)
    stored = dequantized(k, k_scale, torch.float32), dequantized(v, v_scale, torch.float32)
    made.alone = [
        tuple(
            t[made.table[b].long()].transpose(0, 1).flatten(1, 2)[None, :, : own[0].shape[2]] for t in stored
        )
        for b, own in enumerate(made.alone)
    ]
    return KV(k, v, scales=(k_scale, v_scale))


def test_in_8_bits_on_the_cpu() -> None:
    shape, counts, mask = HEADS["GQA"], LENGTHS["ragged"], tree_mask(5, 7, 1)
    made = common(shape, counts, 5, 7, torch.float32)
    found = attended("cpu", plan_of(shape, mask, made, counts[1:]), made, in_int8(made))
    torch.testing.assert_close(found, expected(made, mask))


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
    """With more query rows than a tile, several programs."""
    triton_ops.require_triton()
    shape, counts = HEADS[heads], LENGTHS[lengths]
    mask = tree_mask(queries, queries, 3)
    made = common(shape, counts, queries, queries, dtype)
    sinks = torch.randn(shape.query)
    plan = plan_of(shape, mask, made, counts[1:], device=triton_ops.DEVICE)
    out, lse = attended("triton", plan, made, sinks=sinks.to(triton_ops.DEVICE))
    exact, exact_lse = expected(made, mask, sinks=sinks)
    limit = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 4e-3, "atol": 4e-3}
    torch.testing.assert_close(out.float(), exact, **limit)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-3, atol=1e-3)


@triton_ops.runs_kernels
def test_by_the_kernel_in_8_bits() -> None:
    triton_ops.require_triton()
    shape, counts, mask = HEADS["GQA"], LENGTHS["ragged"], tree_mask(5, 5, 1)
    made = common(shape, counts, 5, 5, torch.float32)
    plan = plan_of(shape, mask, made, counts[1:], device=triton_ops.DEVICE)
    out, _ = attended("triton", plan, made, in_int8(made))
    torch.testing.assert_close(out, expected(made, mask)[0], rtol=1e-5, atol=1e-5)


# Pages of prefixes of five sequences: one prefix of all with two groups behind it, of which one has a group
# of its own; two documents and a sequence without any; sequences of one prefix that do not follow each other;
# more groups within each other than the plan has segments for a sequence.
GROUPS = {
    "nested": [[0, 1, 4], [0, 1, 4, 5], [0, 1, 4, 5], [0, 1, 6], [0, 1, 6]],
    "disjoint": [[0, 1], [0, 1], [], [5, 6, 7], [5, 6, 7]],
    "apart": [[0, 1], [3, 4], [0, 1], [3, 4], []],
    "deep": [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]],
    "none": [[], [], [], [], []],
}


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
        made = Problem(heads, groups, lengths, 5, 5, torch.float32, 3)
        plan = plan or plan_of(heads, mask, made, lengths, 3)
        plan.set(made.segments, made.ends)
        torch.testing.assert_close(attended("cpu", plan, made, **variant), expected(made, mask, **variant))


@pytest.mark.parametrize("name", GROUPS)
def test_a_shared_page_is_read_once_for_adjacent_sequences(name: str) -> None:
    groups, read = GROUPS[name], 0
    segments = list(segments_of(groups, 3, PAGE))
    for b, pages in enumerate(groups):
        own = sorted(segment for segment in segments if 0 <= b - segment.first < segment.rows)
        assert len(own) <= 3
        assert [segment.start for segment in own] == [0, *(s.start + s.length for s in own)][: len(own)]
        assert sum(segment.length for segment in own) == len(pages) * PAGE
        for start, length, first, _ in own:
            part = slice(start // PAGE, (start + length) // PAGE)
            assert groups[first][part] == pages[part]
    read = sum(segment.length for segment in segments) // PAGE
    assert read == {"nested": 5, "disjoint": 5, "apart": 8, "deep": 8, "none": 0}[name]


@triton_ops.runs_kernels
@pytest.mark.parametrize(
    ("heads", "queries", "dtype", "names"),
    [
        ("GQA", 4, torch.float32, tuple(GROUPS)),
        pytest.param("MQA", 23, torch.float16, ("nested", "apart"), marks=pytest.mark.slow),
    ],
)
def test_groups_by_the_kernel(heads: str, queries: int, dtype: torch.dtype, names: tuple[str, ...]) -> None:
    """By one plan in buffers that stay where they are.

    Of the case with several tiles of queries, which takes much longer, the two kinds of groups with which a
    sequence's queries are in several segments, or in one that others of the same slots do not follow.
    """
    triton_ops.require_triton()
    shape, lengths, mask = HEADS[heads], [9, 0, 40, 3, 17], tree_mask(queries, queries, 3)
    plan, addresses = None, set()
    for groups in (GROUPS[name] for name in names):
        made = Problem(shape, groups, lengths, queries, queries, dtype, 3)
        plan = plan or plan_of(shape, mask, made, lengths, 3, triton_ops.DEVICE)
        plan.set(made.segments, made.ends)
        own, shared = plan.own, plan.shared
        buffers = (own.segments, shared.lengths, shared.segments, shared.owner_start, shared.owners)
        addresses.add(tuple(t.data_ptr() for t in buffers))
        out, lse = attended("triton", plan, made)
        exact, exact_lse = expected(made, mask)
        limit = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 4e-3, "atol": 4e-3}
        torch.testing.assert_close(out.cpu().float(), exact, **limit)
        torch.testing.assert_close(lse.cpu(), exact_lse, rtol=1e-3, atol=1e-3)
    assert len(addresses) == 1


@triton_ops.runs_kernels
@pytest.mark.parametrize("name", ["disjoint", "none"])
def test_segments_without_queries_have_no_work(name: str) -> None:
    """A plan has segments for the most prefixes that sequences may share, which are few in most passes."""
    triton_ops.require_triton()
    heads, lengths, mask = HEADS["GQA"], [9, 0, 40, 3, 17], tree_mask(4, 4, 3)
    made = Problem(heads, GROUPS[name], lengths, 4, 4, torch.float32, 3)
    plan = plan_of(heads, mask, made, lengths, 3, triton_ops.DEVICE)
    attention = backend("triton").prefixes(plan, made.q.dtype, made.q.dtype, PAGE)
    bounds = attention.shared.bounds.fill_(-1)
    q, k, v, table = (t.to(plan.own.device) for t in (made.q, *made.kv, made.table))
    attention.states(q, KV(k, v, table), AttentionParams(0.4))
    used = len(made.segments) * heads.kv
    assert len(bounds) == 3 * 5 * heads.kv
    assert (bounds[:used] >= 0).all()
    assert (bounds[used:] == -1).all()

"""Attention by blocks of queries beside plain attention of each query over what it sees."""

import random
from itertools import accumulate

import numpy as np
import pytest
import torch

from tests.support.kernels import triton_ops
from tests.support.kernels.kernels_cases import poisoned_memory
from triforce_tree.kernels.attention import reference
from triforce_tree.kernels.attention.blocks import plan as block_plans
from triforce_tree.kernels.attention.blocks.plan import BlockPlan, Segment
from triforce_tree.kernels.attention.configs import KernelConfig
from triforce_tree.kernels.attention.plan import Heads

pytestmark = triton_ops.runs_kernels


def random_segments(rng: random.Random, most: int, longest: int) -> list[Segment]:
    """Nodes of a random forest, their queries in depth-first order; inner nodes may bring several tokens."""
    segments: list[Segment] = []
    node = queries = 0

    def grow(depth: int) -> None:
        nonlocal node, queries
        number, first, length = node, queries, rng.choice([0, 1, 3, longest, rng.randrange(longest)])
        node += 1
        tail = rng.choice([0, 0, 0, 2, 5])
        if queries + tail < most:
            queries += tail
            if tail:
                segments.append(Segment(number, length, tail, first, tail))
        else:
            tail = 0
        for _ in range(rng.randrange(4) if depth < 3 else 0):
            grow(depth + 1)
        if queries == first + tail and not tail and queries < most:
            queries += 1
        if queries > first + tail:
            segments.append(Segment(number, length + tail, 0, first + tail, queries - first - tail))

    while queries < most:
        grow(0)
    return segments


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "heads, dtype, page",
    [
        (Heads(6, 2, 32), torch.float16, 32),
        (Heads(4, 4, 32), torch.float16, 16),
        (Heads(20, 1, 16, 32), torch.float32, 64),
    ],
    ids=["gqa", "mha", "fp32"],
)
def test_random_trees(
    heads: Heads, dtype: torch.dtype, page: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that begin within a query's heads, nodes that several blocks see, a plan that is used twice."""
    triton_ops.require_triton()
    from triforce_tree.kernels.attention.blocks import launch

    monkeypatch.setattr(block_plans, "config_for", lambda *_: KernelConfig(16, 64, 4, 2, 1))
    device, rng = torch.device(triton_ops.DEVICE), random.Random(seed)
    torch.manual_seed(seed)
    queries = rng.choice([1, 5, 24])
    two = [random_segments(rng, queries, 150) for _ in range(2)]
    counts = []
    for segments in two:
        rows = [0] * (1 + max(segment.node for segment in segments))
        for node, length, tail, *_ in segments:
            rows[node] = max(rows[node], length + tail)
        counts.append([-(-n // page) for n in rows])
    most = max(map(sum, counts))
    plan = BlockPlan(
        heads,
        queries,
        max(map(len, two)),
        max(sum(segment.queries for segment in segments) for segments in two),
        5,
        most,
        page,
        device=device,
        dtype=dtype,
    )
    for segments, own in zip(two, counts, strict=True):
        places = rng.sample(range(most + 1), sum(own))
        starts = [0, *accumulate(own)]
        pages = [places[start : start + n] for start, n in zip(starts, own, strict=False)]
        sees = torch.zeros(queries, (most + 1) * page, dtype=torch.bool)
        for node, length, tail, first, count in segments:
            for i in range(count):
                slots = np.arange(length + min(tail, i + 1))
                sees[first + i, np.array(pages[node], dtype=int)[slots // page] * page + slots % page] = True
        dense = []
        for dim in (heads.dim, heads.value_dim):
            rows = torch.randn(1, heads.kv, len(sees[0]), dim, dtype=dtype)
            rows[:, :, ~sees.any(0)] = torch.nan
            dense.append(rows.to(device))
        q = torch.randn(queries, heads.query, heads.dim, dtype=dtype, device=device)
        kv = [t[0].unflatten(1, (most + 1, page)).transpose(0, 1) for t in dense]
        if rng.random() < 0.5:  # A forward that was planned ahead, and comes, or does not.
            plan.prepare(*rng.choice([(segments, pages), ([], [])]))
        plan.set(segments, pages)
        with poisoned_memory():
            plan.partial_out.fill_(torch.nan)
            plan.partial_lse.fill_(torch.nan)
            out, lse = launch.run(q, *kv, plan, scale=0.3)
        some = sees.any(0)
        expected, expected_lse = reference.tree_attention(
            q.transpose(0, 1)[None].float(), *(t[:, :, some].float() for t in dense),
            sees[:, some].to(device), scale=0.3,
        )  # fmt: skip
        torch.testing.assert_close(out.float(), expected[0].transpose(0, 1), atol=3e-3, rtol=0)
        torch.testing.assert_close(lse, expected_lse[0].T, atol=3e-3, rtol=0)


@pytest.mark.parametrize(
    "common, leaves, longest",
    [(200, 5, 20), pytest.param(4000, 20, 200, marks=pytest.mark.gpu)],
    ids=["short", "long"],
)
def test_leaves_after_a_long_text(common: int, leaves: int, longest: int) -> None:
    """Heads of Llama-3.1-8B, with the kernel's own configuration."""
    triton_ops.require_triton()
    from triforce_tree.kernels.attention.blocks import launch

    heads, page, device = Heads(32, 8, 128), 64, torch.device(triton_ops.DEVICE)
    # The interpreter has no bfloat16.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    lengths = [common, *(random.randint(1, longest) for _ in range(leaves))]
    segments = [Segment(0, common, 0, 0, leaves)]
    segments += [Segment(node, lengths[node], 0, node - 1, 1) for node in range(1, leaves + 1)]
    counts = [-(-length // page) for length in lengths]
    firsts = [0, *accumulate(counts)]
    pages = [[*range(first, first + n)] for first, n in zip(firsts, counts, strict=False)]
    sizes = leaves, len(segments), 2 * leaves, 0, firsts[-1], page
    plan = BlockPlan(heads, *sizes, device=device, dtype=dtype)
    plan.set(segments, pages)
    k, v = (torch.full((firsts[-1] * page, 8, 128), torch.nan, dtype=dtype) for _ in range(2))
    q, expected = torch.randn(leaves, 32, 128).to(dtype), []
    slots = [torch.arange(n) + first * page for n, first in zip(lengths, firsts, strict=False)]
    for own in slots:
        k[own], v[own] = torch.randn(2, len(own), 8, 128).to(dtype)
    nothing = torch.ones(1, 0, dtype=torch.bool)
    for leaf, own in enumerate(slots[1:]):
        keys, values = (t[torch.cat([slots[0], own])].transpose(0, 1)[None].float() for t in (k, v))
        out, _ = reference.tree_attention(q[None, leaf, :, None].float(), keys, values, nothing, scale=0.1)
        expected.append(out[0, :, 0])
    kv = [t.unflatten(0, (-1, page)).transpose(1, 2).contiguous().to(device) for t in (k, v)]
    with poisoned_memory():
        out, _ = launch.run(q.to(device), *kv, plan, scale=0.1)
    torch.testing.assert_close(out.float().cpu(), torch.stack(expected), atol=2e-2, rtol=2e-2)


def test_bad_sizes_are_refused() -> None:
    device, heads = torch.device("cpu"), Heads(2, 1, 16)
    with pytest.raises(ValueError, match=r"40000 queries exceed 32767, the most of one plan"):
        BlockPlan(heads, 40_000, 1, 1, 0, 1, 16, device=device, dtype=torch.float32)
    plan = BlockPlan(heads, 4, 1, 8, 0, 4, 16, device=device, dtype=torch.float32)
    with pytest.raises(
        ValueError, match=r"2 segments with 0 tiles and .* exceed the plan's 1, .*larger plan"
    ):
        plan.set([Segment(0, 3, 0, 0, 4), Segment(1, 3, 0, 0, 2)], [[1], [2]])

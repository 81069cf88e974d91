"""Exact attention: close to fp64, and the same bits wherever keys are stored and whatever else is computed.

By Triton in its interpreter (fp16), and by the C kernel.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.kernels import triton_ops
from tests.support.kernels.triton_ops import DEVICE
from triforce_tree.kernels.attention.exact import attention as exact
from triforce_tree.kernels.attention.exact.attention import MOST_DEPTH, ExactAttention
from triforce_tree.kernels.attention.plan import KV, AttentionParams, pack_mask
from triforce_tree.kernels.cpu.fp32 import exact as fp32_exact
from triforce_tree.kernels.cpu.fp32 import library
from triforce_tree.trees.ancestors import ancestor_mask

pytestmark = [triton_ops.runs_kernels, pytest.mark.usefixtures("poisoned_empty")]
Attention = Callable[[ExactAttention], Tensor]
PAGE = 16


def triton(request: ExactAttention) -> Tensor:
    triton_ops.require_triton()
    from triforce_tree.kernels.attention.exact import launch

    def moved(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.to(DEVICE)

    k, v, table, _ = request.kv
    params = replace(request.params, sinks=moved(request.params.sinks))
    own = {name: moved(t) for name, t in vars(request).items() if isinstance(t, Tensor)}
    kv = KV(k.to(DEVICE), v.to(DEVICE), moved(table))
    return launch.attention(replace(request, kv=kv, params=params, **own)).cpu()


def parents_of(nodes: int) -> list[int]:
    """A random tree, by depth: parents before children."""
    depths, parents = [0], [-1]
    for _ in range(1, nodes):
        parent = int(torch.randint(len(parents), ()))
        parents.append(parent)
        depths.append(depths[parent] + 1)
    order = sorted(range(nodes), key=lambda node: depths[node])
    place = {node: at for at, node in enumerate(order)}
    return [place[parents[node]] if node else -1 for node in order]


def case(
    lengths: list[int], nodes: int, dims: tuple[int, int], dtype: torch.dtype, slots: int
) -> ExactAttention:
    """Trees after prefixes of these lengths, 4 heads on 2 KV heads, and NaN in all slots after them."""
    mask = pack_mask(ancestor_mask(parents_of(nodes)))
    k, v = (torch.randn(len(lengths), 2, slots, dim).to(dtype) for dim in dims)
    for b, length in enumerate(lengths):
        k[b, :, length + nodes :] = v[b, :, length + nodes :] = torch.nan
    q = torch.randn(len(lengths) * nodes, 4, dims[0]).to(dtype)
    places = torch.tensor(lengths, dtype=torch.int32)
    return ExactAttention(q, KV(k, v), AttentionParams(0.2), places, mask.repeat(len(lengths), 1, 1))


def of_layer(request: ExactAttention, **how: Any) -> ExactAttention:
    """Returns the request with other attention parameters."""
    return replace(request, params=replace(request.params, **how))


def alone(request: ExactAttention, query: int, slots: int, tokens: int) -> ExactAttention:
    """The request of one query at the end of a line of ``tokens`` new ones, in another cache.

    Keys are in the slots of their positions, and all earlier ones before the tail.
    """
    b = query // request.tokens
    path = exact.seen_slots(of_layer(request, window=None))[query][0]
    tokens = min(tokens, len(path))
    k, v = (
        torch.full((1, *t.shape[1:2], slots, t.shape[3]), torch.nan, dtype=t.dtype)
        for t in (request.kv.k, request.kv.v)
    )
    k[0, :, : len(path)], v[0, :, : len(path)] = request.kv.k[b][:, path], request.kv.v[b][:, path]
    q = torch.randn(tokens, *request.q.shape[1:]).to(request.q.dtype)
    q[-1] = request.q[query]
    mask = pack_mask(torch.ones(tokens, tokens, dtype=torch.bool).tril())[None]
    start = torch.tensor([len(path) - tokens], dtype=torch.int32)
    return replace(request, q=q, kv=KV(k, v), lengths=start, mask=mask)


def check(attention: Attention, request: ExactAttention, queries: list[int], other_slots: int) -> None:
    """Compares with fp64, and with each of these queries alone: as a root, and at the end of a line."""
    out = attention(request)
    double = KV(request.kv.k.double(), request.kv.v.double())
    wide = replace(request, q=request.q.double(), kv=double)
    expected, plain = exact.definition(wide), exact.definition(request)
    limit = 2 * (plain - expected).abs().max() + torch.finfo(request.q.dtype).eps
    assert (out - expected).abs().max() <= limit
    for query in queries:
        for tokens in (1, 3):
            own = attention(alone(request, query, other_slots, tokens))
            assert torch.equal(own[-1], out[query]), (query, tokens)


FEATURES = {
    "plain": {},
    "softcap and sinks": {"softcap": 2.0, "sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])},
    "window": {"window": 90},
    "chunks": {"window": 48, "chunked": True},
}


@pytest.mark.skipif(library.library() is None, reason="needs a processor with AVX2, and a C compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("features", FEATURES)
def test_in_c(dtype: torch.dtype, features: str) -> None:
    """Across the runs of 512 positions, with widths that are no multiple of a vector."""
    for lengths in ([3, 64], [505, 511]):
        request = of_layer(case(lengths, 13, (24, 40), dtype, 600), **FEATURES[features])
        check(fp32_exact.attention, request, [0, 5, 12, 13, 20, 25], 540)


@pytest.mark.parametrize("features", FEATURES)
def test_in_triton(features: str) -> None:
    """Across the first two chunks, with more and fewer chunks in the cache than in the tree's."""
    request = of_layer(case([125, 650], 12, (16, 16), torch.float16, 1040), **FEATURES[features])
    check(triton, request, [0, 11, 23], 670)


def test_near_positions_in_triton() -> None:
    """The first positions of a text; and a line so deep that a query's near ones are all new."""
    check(triton, case([1, 5], 7, (16, 32), torch.float16, 300), [6, 13], 20)
    request = case([70], 66, (16, 16), torch.float16, 300)
    line = pack_mask(ancestor_mask([*range(-1, 64), 63]))[None]
    check(triton, replace(request, mask=line), [63, 65], 260)


def test_chunks_of_four_sizes() -> None:
    from triforce_tree.kernels.attention.exact import kernels

    starts = [0]
    while starts[-1] < 80_000:
        at = starts[-1]
        starts.append(at + (512 if at < 4096 else 1024 if at < 16384 else 2048 if at < 49152 else 4096))
    for chunk, start in enumerate(starts):
        assert kernels.chunks_of(start) == chunk
        assert kernels.chunks_of(start + 1) == chunk + 1
    assert kernels.TILE.value + kernels.DEPTH.value == kernels.NEAR.value
    assert kernels.DEPTH.value == MOST_DEPTH


@pytest.mark.parametrize("way", ["triton", "c"])
def test_through_a_table(way: str) -> None:
    if way == "c" and library.library() is None:
        pytest.skip("needs a processor with AVX2, and a C compiler")
    attention = triton if way == "triton" else fp32_exact.attention
    request = of_layer(case([100, 201], 9, (16, 16), torch.float16, 224), window=70)
    out = attention(request)
    pages = 224 // PAGE
    order = torch.randperm(2 * pages).view(2, pages)
    paged = [torch.full((2 * pages, 2, PAGE, 16), torch.nan, dtype=torch.float16) for _ in range(2)]
    for pool, slots in zip(paged, (request.kv.k, request.kv.v), strict=True):
        for b in range(2):
            pool[order[b]] = slots[b].view(2, pages, PAGE, 16).transpose(0, 1)
    assert torch.equal(attention(replace(request, kv=KV(*paged, order.int()))), out)


@pytest.mark.parametrize("way", ["triton", "c"])
def test_queries_that_see_nothing(way: str) -> None:
    """Unused nodes at the beginning of a text."""
    if way == "c" and library.library() is None:
        pytest.skip("needs a processor with AVX2, and a C compiler")
    request = case([0], 3, (16, 16), torch.float16, 70)
    out = (triton if way == "triton" else fp32_exact.attention)(
        replace(request, mask=torch.tensor([[[1], [3], [0]]]))
    )
    assert torch.equal(out[2], torch.zeros(4, 16, dtype=torch.float16))
    assert out.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dims, heads", [((128, 128), (32, 8)), ((128, 128), (8, 8)), ((256, 256), (8, 4))])
@pytest.mark.parametrize("length", [100, 5000, 20_000])
def test_real_shapes_on_a_gpu(dims: tuple[int, int], heads: tuple[int, int], length: int) -> None:
    """Chunks of all three sizes, a bulk copy of each tile, tiles of more rows than one."""
    nodes = 40
    small = case([length], nodes, dims, torch.bfloat16, length + 70)
    k, v = (torch.randn(1, heads[1], length + 70, dim).bfloat16() for dim in dims)
    request = replace(
        small, q=torch.randn(nodes, heads[0], dims[0]).bfloat16(), kv=KV(k, v),
        params=AttentionParams(dims[0] ** -0.5),
    )  # fmt: skip
    check(triton, request, [0, 17, 39], length + 1500)

"""Triton kernels: how much the latest queries look at each chunk of the context, for retrieval
caches.

A query head's interest in a chunk is its softmax share over the chunks' mean keys (TriForce, arXiv
2404.11912, section 4.1); the KV head takes the largest interest over its query group and all
queries, so a chunk that one query head needs is not averaged away.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from triforce_tree.kernels.device import describe
from triforce_tree.kernels.operators import fake, operator

_BLOCK = 64


@triton.jit
def _scores(
    q_ptr,
    means_ptr,
    pair,
    block,
    start,
    rows,
    chunks,
    scale,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Base-2 scores ``[BLOCK_M, BLOCK]`` of one tile of rows and chunks; -inf outside."""
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    chunk = start + tl.arange(0, BLOCK)
    column = tl.arange(0, BLOCK_D)
    inside = column < DIM
    q = tl.load(
        q_ptr + (pair * rows + row)[:, None] * DIM + column[None, :],
        mask=(row < rows)[:, None] & inside[None, :],
        other=0.0,
    )
    means = tl.load(
        means_ptr + (pair * chunks + chunk)[:, None] * DIM + column[None, :],
        mask=(chunk < chunks)[:, None] & inside[None, :],
        other=0.0,
    )
    scores = tl.dot(q, tl.trans(means), input_precision=PRECISION) * (scale * 1.4426950408889634)
    return tl.where((chunk < chunks)[None, :], scores, float("-inf"))


@triton.jit
def _lse_kernel(
    lse_ptr,  # fp32 [pairs, blocks, rows], base 2
    q_ptr,  # [pairs, rows, D]
    means_ptr,  # [pairs, chunks, D]
    rows,
    chunks,
    blocks,
    scale,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Base-2 log-sum-exp of each row over one block of chunks: ``[pairs, blocks, rows]``."""
    at, pair, block = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    scores = _scores(
        q_ptr, means_ptr, pair, block, at * BLOCK, rows, chunks, scale,
        DIM, BLOCK_D, BLOCK_M, BLOCK, PRECISION,
    )  # fmt: skip
    top = tl.max(scores, 1)
    lse = top + tl.log2(tl.sum(tl.exp2(scores - top[:, None]), 1))
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(lse_ptr + (pair * blocks + at) * rows + row, lse, mask=row < rows)


@triton.jit
def _interest_kernel(
    out_ptr,  # fp32 [pairs, chunks]
    total_ptr,  # fp32 [pairs, rows], base 2
    q_ptr,
    means_ptr,
    rows,
    chunks,
    scale,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Largest softmax share over all rows, for one block of chunks."""
    at, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    most = tl.zeros([BLOCK], tl.float32)
    for block in range(tl.cdiv(rows, BLOCK_M)):
        scores = _scores(
            q_ptr, means_ptr, pair, block, at * BLOCK, rows, chunks, scale,
            DIM, BLOCK_D, BLOCK_M, BLOCK, PRECISION,
        )  # fmt: skip
        row = block * BLOCK_M + tl.arange(0, BLOCK_M)
        total = tl.load(total_ptr + pair * rows + row, mask=row < rows, other=float("inf"))
        most = tl.maximum(most, tl.max(tl.exp2(scores - total[:, None]), 0))
    chunk = at * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + pair * chunks + chunk, most, mask=chunk < chunks)


@operator("chunk_scores")
def chunk_scores(q: Tensor, means: Tensor, scale: float) -> Tensor:
    """See ``reference.chunk_scores``."""
    batch, q_heads, queries, dim = q.shape
    kv_heads, chunks = means.shape[1], means.shape[2]
    pairs, rows = batch * kv_heads, q_heads // kv_heads * queries
    q, means = q.reshape(pairs, rows, dim).contiguous(), means.contiguous()
    out = torch.empty(batch, kv_heads, chunks, dtype=torch.float32, device=q.device)
    single = q.dtype == torch.float32
    # In fp32 both operands are held twice, as tf32 parts.
    block, block_m = (16, 16) if single else (_BLOCK, 16 if rows <= 16 else 64)
    blocks = triton.cdiv(chunks, block)
    lse = torch.empty(pairs, blocks, rows, dtype=torch.float32, device=q.device)
    # AMD multiplies fp32 as it is.
    precision = "ieee" if not describe(q.device).ptx else "tf32x3" if single else "tf32"
    shape = {
        "DIM": dim, "BLOCK_D": max(16, triton.next_power_of_2(dim)),
        "BLOCK_M": block_m, "BLOCK": block,
        "PRECISION": precision,
    }  # fmt: skip
    grid = (blocks, pairs, triton.cdiv(rows, block_m))
    _lse_kernel[grid](lse, q, means, rows, chunks, blocks, scale, **shape)
    total = lse.mul(0.6931471805599453).logsumexp(1).div(0.6931471805599453)
    _interest_kernel[grid[:2]](out, total, q, means, rows, chunks, scale, **shape)
    return out


@fake("chunk_scores")
def _(q: Tensor, means: Tensor, scale: float) -> Tensor:
    return means.new_empty(means.shape[:3], dtype=torch.float32)

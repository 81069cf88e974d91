"""Triton kernels that move KV rows: gather a selection, and commit the accepted part of a tail."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from triforce_tree.kernels.operators import fake, operator


@triton.jit
def _gather_kernel(
    out_ptr,  # [B, H, R, D]
    rows_ptr,  # [B, H, S, D] with strides
    index_ptr,  # int [B, H, R]
    stride_b,
    stride_h,
    stride_s,
    heads,
    count,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pair = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, BLOCK_D)
    real = place < count
    there = real[:, None] & (column < DIM)[None, :]
    source = tl.load(index_ptr + pair * count + place, mask=real, other=0).to(tl.int64)
    base = rows_ptr + pair // heads * stride_b + pair % heads * stride_h
    values = tl.load(base + source[:, None] * stride_s + column[None, :], mask=there, other=0.0)
    tl.store(out_ptr + (pair * count + place)[:, None] * DIM + column[None, :], values, mask=there)


@triton.jit
def _compact_kernel(
    rows_ptr,  # [B, H, S, D] with strides, changed in place
    index_ptr,  # int [R], -1 for no row
    start_ptr,  # int [1]
    stride_b,
    stride_h,
    stride_s,
    heads,
    count,
    DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK_R)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    source = tl.load(index_ptr + place, mask=place < count, other=-1).to(tl.int64)
    start = tl.load(start_ptr).to(tl.int64)
    there = (source >= 0)[:, None] & (column < DIM)[None, :]
    base = rows_ptr + pair // heads * stride_b + pair % heads * stride_h + start * stride_s
    values = tl.load(base + source[:, None] * stride_s + column[None, :], mask=there, other=0.0)
    # A row may be one thread's source and another's target: all must have read before any writes.
    tl.debug_barrier()
    tl.store(base + place[:, None] * stride_s + column[None, :], values, mask=there)


@operator("gather_rows")
def gather_rows(rows: Tensor, index: Tensor) -> Tensor:
    """See ``reference.gather_rows``: ``[B, H, S, D]`` and ``[B, H, R]`` to ``[B, H, R, D]``."""
    batch, heads, _, dim = rows.shape
    count, index = index.shape[2], index.contiguous()
    out = torch.empty(batch, heads, count, dim, dtype=rows.dtype, device=rows.device)
    block = 32
    _gather_kernel[(triton.cdiv(count, block), batch * heads)](
        out, rows, index, *_strides(rows), heads, count,
        DIM=dim, BLOCK_D=triton.next_power_of_2(dim), BLOCK=block,
    )  # fmt: skip
    return out


@fake("gather_rows")
def _(rows: Tensor, index: Tensor) -> Tensor:
    return rows.new_empty(*index.shape, rows.shape[3])


@operator("compact_rows", writes=("rows",))
def compact_rows(rows: Tensor, index: Tensor, start: Tensor) -> None:
    """See ``reference.compact_rows``; nothing is read on the host, so graphs can capture it."""
    batch, heads, _, dim = rows.shape
    count = index.shape[0]
    if count > 4096:
        raise ValueError(f"index has {count} rows, 4096 at most fit one program; commit in parts")
    block_r = triton.next_power_of_2(count)
    block_d = max(8, min(triton.next_power_of_2(dim), 8192 // block_r))
    _compact_kernel[(batch * heads, triton.cdiv(dim, block_d))](
        rows, index, start, *_strides(rows), heads, count, DIM=dim, BLOCK_R=block_r, BLOCK_D=block_d
    )


def _strides(rows: Tensor) -> tuple[int, int, int]:
    if rows.stride(3) != 1:
        raise ValueError("the last dimension of the rows must be dense; call .contiguous() first")
    return rows.stride(0), rows.stride(1), rows.stride(2)

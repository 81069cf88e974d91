"""Triton kernel: merge the partial results of exact attention in one order."""

import triton
import triton.language as tl

from triforce_tree.kernels.attention.exact.positions import chunk_of, first_seen, near_start
from triforce_tree.kernels.attention.tiles import LOG2E
from triforce_tree.kernels.launching import wait_for_previous


@triton.jit(do_not_specialize=["pieces", "window"])
def exact_combine_kernel(
    out_ptr,  # [B * T, H_q, D_v]
    partial_out_ptr,
    partial_lse_ptr,
    positions_ptr,
    sinks_ptr,  # [H_q]
    pieces,
    window,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TOGETHER: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the partial results of a query head: its chunks in their order, then its near tiles."""
    query, head = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, BLOCK_D)
    inside = columns < DIM
    wait_for_previous(PDL)
    row = query.to(tl.int64) * HEADS + head
    position = tl.load(positions_ptr + query)
    end = near_start(position)
    first = end * 0
    if WINDOW:
        first = first_seen(position, window, CHUNKED)
    first_chunk = chunk_of(first)
    # Where the window hides all far positions no chunk may have been written.
    chunks = tl.where(end > first, chunk_of(tl.maximum(end, 1) - 1) + 1, 0)
    best = tl.full([], float("-inf"), tl.float32)
    weight = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for at in range(first_chunk // TOGETHER * TOGETHER, chunks, TOGETHER):
        chunk = at + tl.arange(0, TOGETHER)
        valid = (chunk >= first_chunk) & (chunk < chunks)
        piece = row * pieces + chunk
        lse = tl.load(partial_lse_ptr + piece, mask=valid, other=float("-inf"))
        there = valid[:, None] & inside[None, :]
        outs = tl.load(partial_out_ptr + piece[:, None] * DIM + columns[None, :], mask=there, other=0.0)
        top = tl.maximum(best, tl.max(lse, 0))
        floor = tl.where(top == float("-inf"), 0.0, top)
        part_weight, rescale = tl.exp2(lse - floor), tl.exp2(best - floor)
        acc = acc * rescale + tl.sum(outs * part_weight[:, None], 0)
        weight = weight * rescale + tl.sum(part_weight, 0)
        best = top
    piece = row * pieces + pieces - 2
    lse, last_lse = tl.load(partial_lse_ptr + piece), tl.load(partial_lse_ptr + piece + 1)
    near = tl.load(partial_out_ptr + piece * DIM + columns, mask=inside, other=0.0)
    last = tl.load(partial_out_ptr + piece * DIM + DIM + columns, mask=inside, other=0.0)
    top = tl.maximum(tl.maximum(best, lse), last_lse)
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    # Unused nodes of a tree may see nothing, and -inf - -inf is NaN.
    floor = tl.where(top == float("-inf"), 0.0, top)
    rescale, near_weight, last_weight = tl.exp2(best - floor), tl.exp2(lse - floor), tl.exp2(last_lse - floor)
    acc = acc * rescale + near * near_weight + last * last_weight
    weight = weight * rescale + near_weight + last_weight
    if SINKS:
        weight += tl.exp2(sink - floor)
    weight = tl.where(weight == 0.0, 1.0, weight)
    tl.store(out_ptr + row * DIM + columns, (acc / weight).to(out_ptr.dtype.element_ty), mask=inside)

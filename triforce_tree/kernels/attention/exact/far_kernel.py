"""Triton kernel of exact attention over far positions: all sums go by position, whatever slots keys are in.

The positions that a query at position p sees are its *near* ones, from ``near_start(p)`` to p, and the *far*
ones before. Every ancestor of a tree no deeper than ``DEPTH`` is near, so that far positions are in their own
slots for all queries of a forward. They are divided into chunks with fixed bounds (``chunk_start``), each
summed by one program for all queries in tiles of fixed positions. Near ones are two tiles (``near_kernel``),
each in the order of positions. ``combine`` merges the sums in one order. No bound depends on the number of
queries or programs; tiles beyond a query's far positions add exactly 0 to its sums.
"""

import triton
import triton.language as tl

from triforce_tree.kernels.attention.exact.positions import chunk_start, first_seen, near_start
from triforce_tree.kernels.attention.tiles import (
    LOG2E,
    add_values,
    edge_tile,
    full_tile,
    kv_offsets,
    softcapped,
)
from triforce_tree.kernels.launching import wait_for_previous

_UNSPECIALIZED = [
    "tokens", "blocks", "pieces", "units", "window", "view_rows_per_sequence", "view_rows_per_head",
    "view_columns_per_head",
]  # fmt: skip


@triton.jit
def softmax_step(scores, seen, best, weight, base):
    """One step of the online softmax over scores ``[M, N]`` of rows that are ``seen``, whole or not at all.

    Returns probabilities, the factor on earlier sums, and the new maximum and sum of probabilities.
    """
    top = tl.where(seen, tl.maximum(best, tl.max(scores, 1)), best)
    floor = tl.where(top == float("-inf"), 0.0, top)
    # Where nothing is seen all probabilities become 0, and the factor 1.
    p = tl.exp2(scores * base - tl.where(seen, floor * base, float("inf"))[:, None])
    rescale = tl.where(seen, tl.exp2((best - floor) * base), 1.0)
    return p, rescale, top, weight * rescale + tl.sum(p, 1)


@triton.jit
def store_piece(out_ptr, lse_ptr, piece, real, acc, best, weight, base, columns, DIM: tl.constexpr):
    """Store normalised sums of rows that are ``real``, and their log-sum-exp in base 2."""
    empty = weight == 0.0
    out = acc * (1.0 / tl.where(empty, 1.0, weight))[:, None]
    lse = tl.where(empty, float("-inf"), best * base + tl.log2(tl.where(empty, 1.0, weight)))
    there = real[:, None] & (columns < DIM)[None, :]
    tl.store(out_ptr + piece[:, None] * DIM + columns[None, :], out, mask=there)
    tl.store(lse_ptr + piece, lse, mask=real)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def exact_far_kernel(
    q_ptr,  # [B * T, H_q, D], dense
    k_ptr,  # [B, H_kv, S, D] or pages [P, H_kv, PAGE, D], any strides but the last
    v_ptr,  # the same with D_v for D
    k_view,  # descriptors of matrix views of k and v when TMA, see ``launch.RowViews``; unused otherwise
    v_view,
    partial_out_ptr,  # fp32 [B * T, H_q, pieces, D_v]
    partial_lse_ptr,  # fp32 [B * T, H_q, pieces], base 2
    positions_ptr,  # int32 [B * T]
    table_ptr,  # int32 [B, H_kv, pages]
    scale,
    softcap,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_tb,
    stride_th,
    view_rows_per_sequence,
    view_rows_per_head,
    view_columns_per_head,
    tokens,  # T
    blocks,  # tiles of BLOCK_M query rows of a sequence and KV head
    pieces,  # partial results of a query: its chunks, then its two near tiles
    units,  # B * H_kv * blocks
    window,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # divides TILE
    PAGE: tl.constexpr,
    TMA: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One chunk of one KV head, for a tile of the query rows of a sequence."""
    wait_for_previous(PDL)
    program = tl.program_id(0)
    heads = KV_HEADS * GROUP
    columns, v_columns = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    inside, v_inside = columns < DIM, v_columns < VALUE_DIM
    offsets = tl.arange(0, BLOCK_N)
    base = LOG2E if SOFTCAP else scale * LOG2E

    # The last chunks come first: they are the largest, and small ones fill the gaps at the end.
    unit, chunk = program % units, pieces - 3 - program // units
    block, head = unit % blocks, unit // blocks % KV_HEADS
    sequence, head64 = unit // (blocks * KV_HEADS), head.to(tl.int64)
    packed = block * BLOCK_M + tl.arange(0, BLOCK_M)
    real = packed < tokens * GROUP
    query = sequence * tokens + packed // GROUP
    position = tl.load(positions_ptr + query, mask=real, other=0)
    end = tl.where(real, near_start(position), 0)
    begin, stop = chunk_start(chunk), tl.minimum(chunk_start(chunk + 1), tl.max(end, 0))
    first, least = position * 0, 0
    if WINDOW:
        first = first_seen(position, window, CHUNKED)
        least = tl.min(tl.where(real, first, 2147483647), 0)
        begin = tl.maximum(begin, least // BLOCK_N * BLOCK_N)
    if begin < stop:
        row = query.to(tl.int64) * heads + head * GROUP + packed % GROUP
        there = real[:, None] & inside[None, :]
        q = tl.load(q_ptr + row[:, None] * DIM + columns[None, :], mask=there, other=0.0)
        k_head, v_head = k_ptr + head64 * stride_kh, v_ptr + head64 * stride_vh
        if PAGE == 0:
            k_head += sequence.to(tl.int64) * stride_kb
            v_head += sequence.to(tl.int64) * stride_vb
        table_at = table_ptr + sequence.to(tl.int64) * stride_tb + head64 * stride_th
        view_row = sequence * view_rows_per_sequence + head * view_rows_per_head
        view_column = head * view_columns_per_head
        best = tl.full([BLOCK_M], float("-inf"), tl.float32)
        weight = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        for start in tl.range(begin, stop, BLOCK_N, num_stages=STAGES):
            slots = start + offsets
            if TMA:
                k = k_view.load([view_row + start, view_column])
            elif WINDOW:
                valid = slots >= least
                k_at = kv_offsets(slots, table_at, 0, stride_kb, stride_ks, PAGE, valid)
                k = edge_tile(k_head, k_at, columns, valid, inside)
            else:
                k_at = kv_offsets(slots, table_at, 0, stride_kb, stride_ks, PAGE, None)
                k = full_tile(k_head, k_at, columns, inside, DIM >= BLOCK_D)
            scores = softcapped(tl.dot(q, tl.trans(k)), scale, softcap, SOFTCAP)
            seen = start < end
            if WINDOW:
                scores = tl.where(slots[None, :] >= first[:, None], scores, float("-inf"))
                seen = seen & (start + BLOCK_N > first)
            p, rescale, best, weight = softmax_step(scores, seen, best, weight, base)
            if TMA:
                v = v_view.load([view_row + start, view_column // DIM * VALUE_DIM])
            elif WINDOW:
                v_at = kv_offsets(slots, table_at, 0, stride_vb, stride_vs, PAGE, valid)
                v = edge_tile(v_head, v_at, v_columns, valid, v_inside)
            else:
                v_at = kv_offsets(slots, table_at, 0, stride_vb, stride_vs, PAGE, None)
                v = full_tile(v_head, v_at, v_columns, v_inside, VALUE_DIM >= BLOCK_V)
            acc = add_values(acc * rescale[:, None], p, v, None, q.dtype, tl.float32)
        piece = row * pieces + chunk
        store_piece(
            partial_out_ptr, partial_lse_ptr, piece, real, acc, best, weight, base, v_columns, VALUE_DIM
        )

"""Triton kernel of exact attention over the near positions of queries, two tiles each; see ``far_kernel``.

The newest tile of a query has its ancestors in the tree, and is gathered by a program for each query. The one
before it is mostly the last whole tile of committed positions, which is in its own slots: there programs take
BLOCK_G query rows, as many as a program for one query has, so that both have the same products.

These programs need a third of the shared memory of those of far positions, so that more of them are on a
multiprocessor at a time than in one launch with those.
"""

import triton
import triton.language as tl

from triforce_tree.kernels.attention.exact.far_kernel import softmax_step, store_piece
from triforce_tree.kernels.attention.exact.positions import NEAR, TILE, first_seen, near_start, shared_start
from triforce_tree.kernels.attention.tiles import LOG2E, add_values, edge_tile, kv_offsets, softcapped


@triton.jit(do_not_specialize=["tokens", "pieces", "gathered", "blocks", "window"])
def exact_near_kernel(
    q_ptr,  # [B * T, H_q, D], dense
    k_ptr,  # [B, H_kv, S, D] or pages [P, H_kv, PAGE, D], any strides but the last
    v_ptr,  # the same with D_v for D
    partial_out_ptr,  # fp32 [B * T, H_q, pieces, D_v]
    partial_lse_ptr,  # fp32 [B * T, H_q, pieces], base 2
    positions_ptr,  # int32 [B * T]
    slots_ptr,  # int32 [B * T, NEAR]
    lengths_ptr,  # int32 [B]
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
    tokens,  # T
    pieces,  # partial results of a query: its chunks, then its two near tiles
    gathered,  # B * T * H_kv, the first programs; then B * H_kv * blocks
    blocks,  # tiles of BLOCK_G query rows of a sequence and KV head
    window,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,  # divides TILE
    BLOCK_G: tl.constexpr,  # at least GROUP
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """The near tiles of one query, gathered; or the first of BLOCK_G query rows, where it is committed."""
    if PDL:
        # No wait: the kernel before this one is that of far positions, and waited for what both read.
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    heads = KV_HEADS * GROUP
    columns, v_columns = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    inside, v_inside = columns < DIM, v_columns < VALUE_DIM
    offsets = tl.arange(0, BLOCK_N)
    base = LOG2E if SOFTCAP else scale * LOG2E
    group = tl.arange(0, BLOCK_G)

    shares = program >= gathered
    if shares:
        unit = program - gathered
        head = unit // blocks % KV_HEADS
        sequence = unit // (blocks * KV_HEADS)
        packed = unit % blocks * BLOCK_G + group
        query = sequence * tokens + packed // GROUP
        real = packed < tokens * GROUP
        member = packed % GROUP
    else:
        head = program % KV_HEADS
        query = program // KV_HEADS + group * 0
        sequence = program // KV_HEADS // tokens
        real = group < GROUP
        member = group
    position = tl.load(positions_ptr + query, mask=real, other=0)
    shared = shared_start(tl.load(lengths_ptr + sequence))
    start = shared
    if shares:
        real = real & (near_start(position) == shared)
        begin, end = 0, tl.max(real.to(tl.int32), 0)
    else:
        start = tl.max(near_start(position), 0)
        begin, end = (start == shared).to(tl.int32), 2
    first = position * 0
    if WINDOW:
        first = first_seen(position, window, CHUNKED)
    least = tl.min(tl.where(real, first, 2147483647), 0)
    last = tl.max(tl.where(real, position, -1), 0)
    head64, row = head.to(tl.int64), query.to(tl.int64) * heads + head * GROUP + member
    k_head, v_head = k_ptr + head64 * stride_kh, v_ptr + head64 * stride_vh
    if PAGE == 0:
        k_head += sequence.to(tl.int64) * stride_kb
        v_head += sequence.to(tl.int64) * stride_vb
    table_at = table_ptr + sequence.to(tl.int64) * stride_tb + head64 * stride_th
    slots_at = slots_ptr + tl.min(query, 0).to(tl.int64) * NEAR
    there = real[:, None] & inside[None, :]
    q = tl.load(q_ptr + row[:, None] * DIM + columns[None, :], mask=there, other=0.0)
    for tile in range(begin, end):
        best = tl.full([BLOCK_G], float("-inf"), tl.float32)
        weight = tl.zeros([BLOCK_G], tl.float32)
        acc = tl.zeros([BLOCK_G, BLOCK_V], tl.float32)
        for at in range(0, TILE, BLOCK_N):
            near = start + tile * TILE + at + offsets
            valid = (near <= last) & (near >= least)
            slots = tl.load(slots_at + tile * TILE + at + offsets, mask=valid, other=0)
            slots = tl.where(shares, near, slots)
            k_at = kv_offsets(slots, table_at, 0, stride_kb, stride_ks, PAGE, valid)
            v_at = kv_offsets(slots, table_at, 0, stride_vb, stride_vs, PAGE, valid)
            k = edge_tile(k_head, k_at, columns, valid, inside)
            v = edge_tile(v_head, v_at, v_columns, valid, v_inside)
            scores = softcapped(tl.dot(q, tl.trans(k)), scale, softcap, SOFTCAP)
            visible = (near[None, :] <= position[:, None]) & (near[None, :] >= first[:, None])
            scores = tl.where(visible, scores, float("-inf"))
            seen = tl.max(visible.to(tl.int32), 1) > 0
            p, rescale, best, weight = softmax_step(scores, seen, best, weight, base)
            acc = add_values(acc * rescale[:, None], p, v, None, q.dtype, tl.float32)
        piece = row * pieces + pieces - 2 + tile
        store_piece(
            partial_out_ptr, partial_lse_ptr, piece, real, acc, best, weight, base, v_columns, VALUE_DIM
        )
    if PDL:
        # The kernel after this one reads what the kernel before it wrote.
        tl.extra.cuda.gdc_wait()

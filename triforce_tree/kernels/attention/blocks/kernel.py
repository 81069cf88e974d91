"""Triton kernels of attention by blocks of queries (see ``plan``), which compute and merge partial outputs.

The online softmax is the same as in ``tree_attention``, in base 2 on raw scores; fp32 is summed in fp64. If a
query row does not see a whole tile, its maximum is set so that its probabilities become 0, without a mask of
elements.
"""

import triton
import triton.language as tl

from triforce_tree.kernels.attention.tiles import (
    LOG2E,
    add_values,
    edge_tile,
    full_tile,
    narrow_scores,
    prefetch,
    softcapped,
)
from triforce_tree.kernels.launching import wait_for_previous

# Triton must not compile variants of the kernels for integers that vary from plan to plan.
_UNSPECIALIZED = ["rows", "blocks", "slices", "view_rows_per_head", "view_columns_per_head"]


@triton.jit
def slot_offsets(slots, stride_page, stride_slot, PAGE: tl.constexpr):
    """Returns the element offsets of KV slots in pages."""
    return (slots // PAGE).to(tl.int64) * stride_page + (slots % PAGE).to(tl.int64) * stride_slot


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def block_attention_kernel(
    q_ptr,  # [queries, H_q, D]
    k_ptr,  # pages [pages, H_kv, PAGE, D], any strides but the last
    v_ptr,  # pages [pages, H_kv, PAGE, D_v]
    k_view,  # descriptors of matrix views of k and v if TMA, see ``launch.RowViews``; else unused
    k_rest_view,
    v_view,
    partial_out_ptr,  # fp32 [pieces, BLOCK_M, D_v]
    partial_lse_ptr,  # fp32, or fp64 when EXACT, [pieces, BLOCK_M], base 2
    shares_ptr,  # this and the next four are attributes of ``plan.Schedule``
    begins_ptr,
    columns_ptr,
    whole_ptr,
    gathered_ptr,
    scale,
    softcap,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    view_rows_per_head,
    view_columns_per_head,
    rows,  # queries * GROUP
    blocks,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,  # columns of the second part of keys, see ``configs.key_parts``; may be 0
    BLOCK_V: tl.constexpr,
    VALUE_PARTS: tl.constexpr,  # tiles of BLOCK_V columns of values, the second dimension of the grid
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    TMA: tl.constexpr,
    SOFTCAP: tl.constexpr,
    EXACT: tl.constexpr,
    STAGES: tl.constexpr,
    GATHER_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    REAL: tl.constexpr = tl.float64 if EXACT else tl.float32
    part = tl.program_id(0)
    if PDL:
        # A prefetch before the wait is safe, because it does not read values.
        prefetch(shares_ptr + part)
        prefetch(begins_ptr + part)
    wait_for_previous(PDL)
    at = tl.load(shares_ptr + part)
    stop = tl.load(shares_ptr + part + 1)
    block = tl.load(begins_ptr + part)

    tile_row = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    v_columns = tl.arange(0, BLOCK_V)
    if VALUE_PARTS > 1:  # all parts compute the same scores and write the same log-sum-exps
        v_columns += tl.program_id(1) * BLOCK_V
    offsets = tl.arange(0, BLOCK_N)
    inside, v_inside = columns < DIM, v_columns < VALUE_DIM
    if BLOCK_REST:
        rest_columns = BLOCK_D + tl.arange(0, BLOCK_REST)
        rest_inside = rest_columns < DIM
    scale, softcap = tl.cast(scale, REAL), tl.cast(softcap, REAL)
    base = LOG2E if SOFTCAP else scale * LOG2E

    while at < stop:
        first_whole = tl.load(columns_ptr + block)
        whole = tl.load(columns_ptr + blocks + block)
        first_gathered = tl.load(columns_ptr + 2 * blocks + block)
        before = tl.load(columns_ptr + 3 * blocks + block) * KV_HEADS
        after = stop
        if block + 1 < blocks:
            after = tl.load(columns_ptr + 3 * blocks + block + 1) * KV_HEADS
        else:
            after = tl.load(shares_ptr + tl.num_programs(0))
        tiles = (after - before) // KV_HEADS
        head = (at - before) // tl.maximum(tiles, 1)
        begin = at - before - head * tiles
        end = tl.minimum(tiles, begin + stop - at)
        head64 = head.to(tl.int64)

        row = block * BLOCK_M + tile_row
        real = row < rows
        token = row // GROUP
        q_at = q_ptr + token.to(tl.int64) * stride_qt + (head64 * GROUP + row % GROUP) * stride_qh
        q = tl.load(q_at[:, None] + columns[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        if BLOCK_REST:
            stored = real[:, None] & rest_inside[None, :]
            q_rest = tl.load(q_at[:, None] + rest_columns[None, :], mask=stored, other=0.0)
        k_head, v_head = k_ptr + head64 * stride_kh, v_ptr + head64 * stride_vh
        view_row, view_column = head * view_rows_per_head, head * view_columns_per_head

        best = tl.full([BLOCK_M], float("-inf"), REAL)
        weight = tl.zeros([BLOCK_M], REAL)
        acc = tl.zeros([BLOCK_M, BLOCK_V], REAL)

        # Entries are read one tile ahead, or every copy would wait for its entry.
        next_entry = tl.load(whole_ptr + first_whole + tl.minimum(begin, whole))
        for tile in tl.range(begin, tl.minimum(end, whole), num_stages=STAGES):
            entry = next_entry
            next_entry = tl.load(whole_ptr + first_whole + tile + 1)
            slot = (entry & 0xFFFFFFFF).to(tl.int32)
            if TMA:
                k = k_view.load([view_row + slot, view_column])
                if BLOCK_REST:
                    k_rest = k_rest_view.load([view_row + slot, view_column + BLOCK_D])
            else:
                k_at = slot_offsets(slot + offsets, stride_kb, stride_ks, PAGE)
                k = full_tile(k_head, k_at, columns, inside, DIM >= BLOCK_D)
                if BLOCK_REST:
                    k_rest = full_tile(k_head, k_at, rest_columns, rest_inside, DIM == BLOCK_D + BLOCK_REST)
            if EXACT:
                scores = narrow_scores(q_at, k_head + k_at, real, offsets >= 0, REAL, DIM)
            else:
                scores = tl.dot(q, tl.trans(k), out_dtype=REAL)
                if BLOCK_REST:
                    scores = tl.dot(q_rest, tl.trans(k_rest), scores, out_dtype=REAL)
            scores = softcapped(scores, scale, softcap, SOFTCAP)
            visible = (token >= ((entry >> 32) & 0xFFFF).to(tl.int32)) & (token < (entry >> 48).to(tl.int32))
            top = tl.where(visible, tl.maximum(best, tl.max(scores, 1)), best)
            p = tl.exp2(scores * base - tl.where(visible, top * base, float("inf"))[:, None])
            # A row that has seen no position has ``best`` and ``top`` -inf, and -inf - -inf is NaN.
            rescale = tl.exp2((best - tl.where(top == float("-inf"), 0.0, top)) * base)
            weight = weight * rescale + tl.sum(p, 1)
            acc = acc * rescale[:, None]
            if TMA:
                if DIM == VALUE_DIM:
                    v = v_view.load([view_row + slot, view_column])
                else:
                    v = v_view.load([view_row + slot, view_column // DIM * VALUE_DIM])
            else:
                v_at = slot_offsets(slot + offsets, stride_vb, stride_vs, PAGE)
                v = full_tile(v_head, v_at, v_columns, v_inside, VALUE_DIM % BLOCK_V == 0)
            acc = add_values(acc, p, v, None, q.dtype, REAL)
            best = top

        for tile in tl.range(tl.maximum(begin, whole) - whole, end - whole, num_stages=GATHER_STAGES):
            entries = tl.load(gathered_ptr + (first_gathered + tile) * BLOCK_N + offsets)
            slots, stops = (entries & 0xFFFFFFFF).to(tl.int32), (entries >> 48).to(tl.int32)
            # No query sees positions that pad a tile; their slot may hold any value, even NaN.
            valid = stops > 0
            k_at = slot_offsets(slots, stride_kb, stride_ks, PAGE)
            k = edge_tile(k_head, k_at, columns, valid, inside)
            if BLOCK_REST:
                k_rest = edge_tile(k_head, k_at, rest_columns, valid, rest_inside)
            v_at = slot_offsets(slots, stride_vb, stride_vs, PAGE)
            v = edge_tile(v_head, v_at, v_columns, valid, v_inside)
            if EXACT:
                scores = narrow_scores(q_at, k_head + k_at, real, valid, REAL, DIM)
            else:
                scores = tl.dot(q, tl.trans(k), out_dtype=REAL)
                if BLOCK_REST:
                    scores = tl.dot(q_rest, tl.trans(k_rest), scores, out_dtype=REAL)
            scores = softcapped(scores, scale, softcap, SOFTCAP)
            visible = token[:, None] >= ((entries >> 32) & 0xFFFF).to(tl.int32)[None, :]
            visible = visible & (token[:, None] < stops[None, :])
            scores = tl.where(visible, scores, float("-inf"))
            top = tl.maximum(best, tl.max(scores, 1))
            floor = tl.where(top == float("-inf"), 0.0, top)
            p = tl.exp2(scores * base - (floor * base)[:, None])
            rescale = tl.exp2((best - floor) * base)
            weight = weight * rescale + tl.sum(p, 1)
            acc = acc * rescale[:, None]
            acc = add_values(acc, p, v, None, q.dtype, REAL)
            best = top

        empty = weight == 0.0
        acc = acc * (1.0 / tl.where(empty, 1.0, weight))[:, None]
        lse = tl.where(empty, float("-inf"), best * base + tl.log2(tl.where(empty, 1.0, weight)))
        # Both the unit and the slice increase along the list, so no two pieces have the same sum.
        piece = (block * KV_HEADS + head + part).to(tl.int64) * BLOCK_M + tile_row
        tl.store(
            partial_out_ptr + piece[:, None] * VALUE_DIM + v_columns[None, :],
            acc,
            mask=real[:, None] & v_inside[None, :],
        )
        tl.store(partial_lse_ptr + piece, lse, mask=real)
        at += end - begin
        if at >= after:
            block += 1


@triton.jit(do_not_specialize=["rows"])
def block_combine_kernel(
    out_ptr,  # [queries, H_q, D_v]
    lse_ptr,  # fp32 [queries, H_q]
    partial_out_ptr,  # as in ``block_attention_kernel``
    partial_lse_ptr,
    bounds_ptr,  # int32 [blocks, H_kv, 2]
    sinks_ptr,  # [H_q]
    rows,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,  # D_v
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,  # query rows of one program; divides BLOCK_M
    CHUNK: tl.constexpr,
    SINKS: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    REAL: tl.constexpr = tl.float64 if EXACT else tl.float32
    first = tl.program_id(0) * ROWS
    head = tl.program_id(1)
    row = first + tl.arange(0, ROWS)
    real = row < rows
    columns = tl.arange(0, BLOCK_D)
    inside = columns < DIM
    chunk = tl.arange(0, CHUNK)
    unit = first // BLOCK_M * KV_HEADS + head
    # Bounds were written before the attention kernel started, so they can be read while it runs.
    part = tl.load(bounds_ptr + 2 * unit)
    last = tl.load(bounds_ptr + 2 * unit + 1)
    wait_for_previous(PDL)

    best = tl.full([ROWS], float("-inf"), REAL)
    weight = tl.zeros([ROWS], REAL)
    acc = tl.zeros([ROWS, BLOCK_D], REAL)
    for start in range(part, last + 1, CHUNK):
        parts = start + chunk
        valid = real[:, None] & (parts <= last)[None, :]
        piece = (unit + parts).to(tl.int64)[None, :] * BLOCK_M + (row % BLOCK_M)[:, None]
        lse = tl.load(partial_lse_ptr + piece, mask=valid, other=float("-inf"))
        outs = tl.load(
            partial_out_ptr + piece[:, :, None] * DIM + columns[None, None, :],
            mask=valid[:, :, None] & inside[None, None, :],
            other=0.0,
        )
        top = tl.maximum(best, tl.max(lse, 1))
        floor = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.exp2(lse - floor[:, None])
        rescale = tl.exp2(best - floor)
        acc = acc * rescale[:, None] + tl.sum(outs * weights[:, :, None], 1)
        weight = weight * rescale + tl.sum(weights, 1)
        best = top

    q_head = head * GROUP + row % GROUP
    if SINKS:
        sink = tl.load(sinks_ptr + q_head).to(REAL) * 1.4426950408889634
        top = tl.maximum(best, sink)
        floor = tl.where(top == float("-inf"), 0.0, top)
        acc = acc * tl.exp2(best - floor)[:, None]
        weight = weight * tl.exp2(best - floor) + tl.exp2(sink - floor)
        best = top
    empty = weight == 0.0
    out = acc / tl.where(empty, 1.0, weight)[:, None]
    total = tl.where(
        empty, float("-inf"), (best + tl.log2(tl.where(empty, 1.0, weight))) * 0.6931471805599453
    )
    at = (row // GROUP).to(tl.int64) * KV_HEADS * GROUP + q_head
    tl.store(
        out_ptr + at[:, None] * DIM + columns[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=real[:, None] & inside[None, :],
    )
    tl.store(lse_ptr + at, total, mask=real)

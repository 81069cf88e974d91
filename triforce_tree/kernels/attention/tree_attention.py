"""Triton kernel of tree attention: each program computes an equal slice of the (segment, KV head, tile) list.

A unit is one segment and one KV head. Its first tiles have ``BLOCK_N`` positions that every query sees,
without a mask or bounds checks in the loop. Then come edge tiles of ``EDGE`` positions: the start of a
sliding window, the ragged end of the prefix, and the tail under the mask. Each slice writes one fp32 partial
output for each of its units, and ``combine`` merges them.

The online softmax runs in base 2 on raw scores (FlashAttention-2, arXiv 2307.08691, section 3.1).

fp32 tensors are summed in fp64, so that the error of the hardware's approximate exp2 and log2 and of running
sums stays below torch's error; ``tiles`` says how they are multiplied.
"""

import triton
import triton.language as tl

from triforce_tree.kernels.attention.schedule import share_of, spans
from triforce_tree.kernels.attention.tiles import (
    LOG2E,
    add_values,
    edge_tile,
    full_tile,
    kv_offsets,
    narrow_scores,
    prefetch,
    scales_at,
    slot_scales,
    softcapped,
)
from triforce_tree.kernels.launching import wait_for_previous

# Triton must not compile variants of the kernel for integers that vary from plan to plan.
_UNSPECIALIZED = [
    "view_rows_per_sequence", "view_rows_per_head", "view_columns_per_head", "mask_halves", "max_query_rows",
    "slices", "blocks", "segments"]  # fmt: skip


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def tree_attention_kernel(
    q_ptr,  # [queries, H_q, D]
    k_ptr,  # unpaged [B, H_kv, S, D] or pages [pages, H_kv, PAGE, D], any strides but the last
    v_ptr,  # [B, H_kv, S, D_v] or pages [pages, H_kv, PAGE, D_v]
    k_scale_ptr,  # fp32, with a stride of 1 between slots, if k and v are int8; else None
    v_scale_ptr,
    k_view,  # descriptors of matrix views of k and v if TMA, see ``launch.RowViews``; else unused
    k_rest_view,
    v_view,
    partial_out_ptr,  # fp32 [pieces, D_v]
    partial_lse_ptr,  # fp32, or fp64 when EXACT, [pieces], base 2
    bounds_ptr,  # int32 [units, 2]: first and last slice that wrote a piece of the unit
    lengths_ptr,  # int32 [segments]
    segments_ptr,  # int32 [6, segments]
    mask_ptr,  # 32-bit halves of the mask words, [queries, 2 * words]
    table_ptr,  # int32 [B, H_kv, pages]
    first_ptr,  # int32 [queries], first position that a query sees
    low_ptr,  # int32 [segments], minimum and maximum (high_ptr) of first over the queries of a segment
    high_ptr,
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
    stride_cb,  # strides of k_scale and v_scale
    stride_ch,
    stride_tb,
    stride_th,
    view_rows_per_sequence,  # ``launch.RowViews.steps``
    view_rows_per_head,
    view_columns_per_head,
    mask_halves,
    max_query_rows,
    slices,
    blocks,
    segments,
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
    EDGE: tl.constexpr,
    SINGLE: tl.constexpr,
    BLOCK_SEGMENTS: tl.constexpr,
    PAGE: tl.constexpr,
    TMA: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    EXACT: tl.constexpr,
    NARROW: tl.constexpr,  # whether fp32 is multiplied in fp32, not in fp64
    STAGES: tl.constexpr,
    EDGE_STAGES: tl.constexpr,
    ALIGN: tl.constexpr,
    PDL: tl.constexpr,
):
    REAL: tl.constexpr = tl.float64 if EXACT else tl.float32
    part = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    if PDL:
        # A prefetch before the wait is safe, because it does not read values.
        prefetch(lengths_ptr)
        prefetch(segments_ptr + 2 * segments)
    wait_for_previous(PDL)

    # This program computes the slice [at, stop) of the list, which begins in ``segment``.
    if SINGLE:
        length = tl.load(lengths_ptr)
        tail = tl.load(segments_ptr + 2)
        low, high = 0, 0
        if WINDOW:
            low, high = tl.load(low_ptr), tl.load(high_ptr)
        full_start, full, front, ragged, edges, front_start, ragged_start = spans(
            length, tail, low, high, BLOCK_N, EDGE, WINDOW
        )
        sequence, first_kv, first_query, earlier_queries = 0, 0, 0, 0
        queries = max_query_rows // GROUP
        tiles = full + edges
        total = tiles * KV_HEADS
        segment, before = part * 0, part * 0
    else:
        all_segments = tl.arange(0, BLOCK_SEGMENTS)
        exists = all_segments < segments
        lengths = tl.load(lengths_ptr + all_segments, mask=exists, other=0)
        tails = tl.load(segments_ptr + 2 * segments + all_segments, mask=exists, other=0)
        lows, highs = lengths * 0, lengths * 0
        if WINDOW:
            lows = tl.load(low_ptr + all_segments, mask=exists, other=0)
            highs = tl.load(high_ptr + all_segments, mask=exists, other=0)
        _, fulls, _, _, edges_of, _, _ = spans(lengths, tails, lows, highs, BLOCK_N, EDGE, WINDOW)
        # Segments without queries, which come last, have no tile.
        counts = tl.load(segments_ptr + 4 * segments + all_segments, mask=exists, other=0)
        sizes = tl.where(counts > 0, fulls + edges_of, 0) * KV_HEADS
        total = tl.sum(sizes)

    at, stop = share_of(part, total, slices, KV_HEADS, ALIGN if SINGLE else 0)
    if not SINGLE:
        ends = tl.cumsum(sizes, 0)
        segment = tl.sum(((ends <= at) & exists).to(tl.int32))
        before = tl.sum(tl.where(all_segments < segment, sizes, 0))

    tile_row = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    v_columns = tl.arange(0, BLOCK_V)
    if VALUE_PARTS > 1:  # all parts compute the same scores and write the same log-sum-exps
        v_columns += tl.program_id(1) * BLOCK_V
    full_offsets = tl.arange(0, BLOCK_N)
    edge_offsets = tl.arange(0, EDGE)
    inside, v_inside = columns < DIM, v_columns < VALUE_DIM
    if BLOCK_REST:
        rest_columns = BLOCK_D + tl.arange(0, BLOCK_REST)
        rest_inside = rest_columns < DIM
    scale, softcap = tl.cast(scale, REAL), tl.cast(softcap, REAL)
    base = LOG2E if SOFTCAP else scale * LOG2E

    while at < stop:
        if not SINGLE:
            length = tl.load(lengths_ptr + segment)
            sequence = tl.load(segments_ptr + segment)
            first_kv = tl.load(segments_ptr + segments + segment)
            tail = tl.load(segments_ptr + 2 * segments + segment)
            first_query = tl.load(segments_ptr + 3 * segments + segment)
            queries = tl.load(segments_ptr + 4 * segments + segment)
            earlier_queries = tl.load(segments_ptr + 5 * segments + segment)
            low, high = 0, 0
            if WINDOW:
                low, high = tl.load(low_ptr + segment), tl.load(high_ptr + segment)
            full_start, full, front, ragged, edges, front_start, ragged_start = spans(
                length, tail, low, high, BLOCK_N, EDGE, WINDOW
            )
            tiles = full + edges
        head = (at - before) // tiles
        begin = at - before - head * tiles
        end = tl.minimum(tiles, begin + stop - at)
        last = end
        if not SINGLE:  # a program whose rows all exceed the queries of this segment reads no tile of it
            last = tl.where(block * BLOCK_M < queries * GROUP, end, begin)
        head64 = head.to(tl.int64)

        row = block * BLOCK_M + tile_row
        real = row < queries * GROUP
        token = first_query + row // GROUP
        q_at = q_ptr + token.to(tl.int64) * stride_qt + (head64 * GROUP + row % GROUP) * stride_qh
        q = tl.load(q_at[:, None] + columns[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        if EXACT and not NARROW:
            q = q.to(REAL)
        if BLOCK_REST:
            stored = real[:, None] & rest_inside[None, :]
            q_rest = tl.load(q_at[:, None] + rest_columns[None, :], mask=stored, other=0.0).to(q.dtype)
        if WINDOW:
            first = tl.load(first_ptr + token, mask=real, other=0)

        k_head, v_head = k_ptr + head64 * stride_kh, v_ptr + head64 * stride_vh
        if PAGE == 0:
            k_head += tl.cast(sequence, tl.int64) * stride_kb
            v_head += tl.cast(sequence, tl.int64) * stride_vb
        table_at = table_ptr + tl.cast(sequence, tl.int64) * stride_tb + head64 * stride_th
        view_row = first_kv + sequence * view_rows_per_sequence + head * view_rows_per_head
        view_column = head * view_columns_per_head

        best = tl.full([BLOCK_M], float("-inf"), REAL)
        weight = tl.zeros([BLOCK_M], REAL)
        acc = tl.zeros([BLOCK_M, BLOCK_V], REAL)

        if TMA and PAGE > 0:
            # The page table is read one tile ahead, or every copy would wait for its entry.
            last_page = (first_kv + tl.maximum(length - 1, 0)) // PAGE
            next_position = first_kv + full_start + begin * BLOCK_N
            page = tl.load(table_at + tl.minimum(next_position // PAGE, last_page))
        for tile in tl.range(begin, tl.minimum(last, full), num_stages=STAGES):
            start = full_start + tile * BLOCK_N
            if TMA:
                if PAGE == 0:
                    source = view_row + start
                else:
                    source = head * view_rows_per_head + page * PAGE + (first_kv + start) % PAGE
                    next_position = (first_kv + start + BLOCK_N) // PAGE
                    page = tl.load(table_at + tl.minimum(next_position, last_page))
                k = k_view.load([source, view_column])
                if BLOCK_REST:
                    k_rest = k_rest_view.load([source, view_column + BLOCK_D])
            else:
                k_at = kv_offsets(start + full_offsets, table_at, first_kv, stride_kb, stride_ks, PAGE, None)
                k = full_tile(k_head, k_at, columns, inside, DIM >= BLOCK_D)
                if BLOCK_REST:
                    k_rest = full_tile(k_head, k_at, rest_columns, rest_inside, DIM == BLOCK_D + BLOCK_REST)
            if NARROW:
                all_valid = full_offsets >= 0
                scores = narrow_scores(q_at, k_head + k_at, real, all_valid, REAL, DIM)
            else:
                scores = tl.dot(q, tl.trans(k.to(q.dtype)), out_dtype=REAL)
                if BLOCK_REST:
                    scores = tl.dot(q_rest, tl.trans(k_rest.to(q.dtype)), scores, out_dtype=REAL)
            v_scale = None
            if k_scale_ptr is not None:
                slots = scales_at(start + full_offsets, sequence, table_at, first_kv, stride_cb, PAGE, None)
                slots += head64 * stride_ch
                scores *= slot_scales(k_scale_ptr + slots, None, REAL)[None, :]
                v_scale = slot_scales(v_scale_ptr + slots, None, REAL)
            scores = softcapped(scores, scale, softcap, SOFTCAP)
            top = tl.maximum(best, tl.max(scores, 1))
            p = tl.exp2(scores * base - (top * base)[:, None])
            rescale = tl.exp2((best - top) * base)
            weight = weight * rescale + tl.sum(p, 1)
            acc = acc * rescale[:, None]
            if TMA:
                if DIM == VALUE_DIM:
                    v = v_view.load([source, view_column])
                else:
                    v = v_view.load([source, view_column // DIM * VALUE_DIM])
            else:
                v_at = kv_offsets(start + full_offsets, table_at, first_kv, stride_vb, stride_vs, PAGE, None)
                v = full_tile(v_head, v_at, v_columns, v_inside, VALUE_DIM % BLOCK_V == 0)
            acc = add_values(acc, p, v, v_scale, q.dtype, REAL)
            best = top

        for tile in tl.range(tl.maximum(begin, full) - full, last - full, num_stages=EDGE_STAGES):
            bits = tl.full([BLOCK_M], -1, tl.int32)
            if tile < front:
                start, limit = front_start + tile * EDGE, length
            elif tile < front + ragged:
                start, limit = ragged_start + (tile - front) * EDGE, length
            else:
                start, limit = length + (tile - front - ragged) * EDGE, length + tail
                word = mask_ptr + token.to(tl.int64) * mask_halves + (tile - front - ragged)
                # ``row * 0`` makes a block, because Triton's interpreter cannot combine a block with a
                # scalar.
                bits = tl.load(word, mask=real & (row * 0 + start < limit), other=0)
            positions = start + edge_offsets
            valid = positions < limit
            if WINDOW:
                # The slots of positions before the window may be reused or unwritten.
                valid = valid & (positions >= low)
            k_at = kv_offsets(positions, table_at, first_kv, stride_kb, stride_ks, PAGE, valid)
            k = edge_tile(k_head, k_at, columns, valid, inside)
            if BLOCK_REST:
                k_rest = edge_tile(k_head, k_at, rest_columns, valid, rest_inside)
            # Slots after the end may hold any value, even NaN, and 0 * NaN is NaN. So they are read as 0.
            v_at = kv_offsets(positions, table_at, first_kv, stride_vb, stride_vs, PAGE, valid)
            v = edge_tile(v_head, v_at, v_columns, valid, v_inside)
            if NARROW:
                scores = narrow_scores(q_at, k_head + k_at, real, valid, REAL, DIM)
            else:
                scores = tl.dot(q, tl.trans(k.to(q.dtype)), out_dtype=REAL)
                if BLOCK_REST:
                    scores = tl.dot(q_rest, tl.trans(k_rest.to(q.dtype)), scores, out_dtype=REAL)
            v_scale = None
            if k_scale_ptr is not None:
                slots = scales_at(positions, sequence, table_at, first_kv, stride_cb, PAGE, valid)
                slots += head64 * stride_ch
                scores *= slot_scales(k_scale_ptr + slots, valid, REAL)[None, :]
                v_scale = slot_scales(v_scale_ptr + slots, valid, REAL)
            scores = softcapped(scores, scale, softcap, SOFTCAP)
            visible = (((bits[:, None] >> edge_offsets[None, :]) & 1) != 0) & valid[None, :]
            if WINDOW:
                visible = visible & (positions[None, :] >= first[:, None])
            scores = tl.where(visible, scores, float("-inf"))
            top = tl.maximum(best, tl.max(scores, 1))
            # A query row that has seen no position has the maximum -inf, and -inf - -inf is NaN.
            floor = tl.where(top == float("-inf"), 0.0, top)
            p = tl.exp2(scores * base - (floor * base)[:, None])
            rescale = tl.exp2((best - floor) * base)
            weight = weight * rescale + tl.sum(p, 1)
            acc = acc * rescale[:, None]
            acc = add_values(acc, p, v, v_scale, q.dtype, REAL)
            best = top

        empty = weight == 0.0
        acc = acc * (1.0 / tl.where(empty, 1.0, weight))[:, None]
        lse = tl.where(empty, float("-inf"), best * base + tl.log2(tl.where(empty, 1.0, weight)))
        piece = (tl.cast(earlier_queries, tl.int64) * KV_HEADS + head64 * queries) * GROUP
        piece = piece + part.to(tl.int64) * max_query_rows + row
        tl.store(
            partial_out_ptr + piece[:, None] * VALUE_DIM + v_columns[None, :],
            acc,
            mask=real[:, None] & v_inside[None, :],
        )
        tl.store(partial_lse_ptr + piece, lse, mask=real)
        if block == 0:
            unit = segment * KV_HEADS + head
            if begin == 0:
                tl.store(bounds_ptr + 2 * unit, part)
            if end == tiles:
                tl.store(bounds_ptr + 2 * unit + 1, part)

        at += end - begin
        if not SINGLE:  # noqa: SIM102 - the outer condition is a compile-time constant
            if at - before >= tiles * KV_HEADS:
                before += tiles * KV_HEADS
                segment += 1

"""Triton kernel that merges the fp32 partial outputs of every query head in a fixed, deterministic order.

With one segment, the range of a query's partial outputs is computed from the lengths. Otherwise the main
kernel has written it into ``bounds``. ``reference.merge_states`` is the definition. Partial log-sum-exps are
in base 2, the result is in base e.
"""

import triton
import triton.language as tl

from triforce_tree.kernels.attention.schedule import cut_evenly, slice_of, spans
from triforce_tree.kernels.launching import wait_for_previous


@triton.jit(do_not_specialize=["max_query_rows", "segments", "slices"])
def combine_kernel(
    out_ptr,  # [queries, H_q, D_v]
    lse_ptr,  # fp32 [queries, H_q]
    partial_out_ptr,  # fp32 [pieces, D_v]
    partial_lse_ptr,  # fp32, or fp64 when EXACT, [pieces], base 2
    bounds_ptr,  # int32 [units, 2]
    lengths_ptr,  # int32 [segments]
    segments_ptr,  # int32 [6, segments]
    low_ptr,  # int32 [segments]
    high_ptr,
    owner_start_ptr,  # int32 [queries + 1]
    owners_ptr,  # int32
    sinks_ptr,  # [H_q]
    other_ptr,  # [queries, H_q, D_v], attention to other positions, if OTHER
    other_lse_ptr,  # fp32 [queries, H_q]
    max_query_rows,
    segments,
    slices,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,  # D_v
    BLOCK_D: tl.constexpr,
    TOGETHER: tl.constexpr,
    SINGLE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EDGE: tl.constexpr,
    ALIGN: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    OTHER: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merges the outputs of one query for ``TOGETHER`` heads that share a KV head."""
    REAL: tl.constexpr = tl.float64 if EXACT else tl.float32
    BLOCKS: tl.constexpr = (GROUP + TOGETHER - 1) // TOGETHER
    token = tl.program_id(0)
    kv_head = tl.program_id(1) // BLOCKS
    member = tl.program_id(1) % BLOCKS * TOGETHER + tl.arange(0, TOGETHER)
    there = member < GROUP
    q_head = kv_head * GROUP + member
    columns = tl.arange(0, BLOCK_D)
    inside = there[:, None] & (columns < DIM)[None, :]
    chunk_offsets = tl.arange(0, CHUNK)
    if SINGLE:
        owner, last_owner = 0, 1
    else:
        owner = tl.load(owner_start_ptr + token)
        last_owner = tl.load(owner_start_ptr + token + 1)
    if SINGLE:
        # Lengths were written before the main kernel started, so they can be read while it still runs.
        low, high = 0, 0
        if WINDOW:
            low, high = tl.load(low_ptr), tl.load(high_ptr)
        _, full, _, _, edges, _, _ = spans(
            tl.load(lengths_ptr), tl.load(segments_ptr + 2), low, high, BLOCK_N, EDGE, WINDOW
        )
        tiles = full + edges
        groups, _, cuts, each, spare = cut_evenly(tiles * KV_HEADS, slices, KV_HEADS, ALIGN)
        from_part = slice_of(kv_head * tiles, each, spare)
        to_part = slice_of(kv_head * tiles + tiles - 1, each, spare)
        from_part = tl.where(groups > 1, kv_head * cuts, from_part)
        to_part = tl.where(groups > 1, kv_head * cuts + cuts - 1, to_part)
    wait_for_previous(PDL)

    best = tl.full([TOGETHER], float("-inf"), REAL)
    weight = tl.zeros([TOGETHER], REAL)
    acc = tl.zeros([TOGETHER, BLOCK_D], REAL)
    result = token.to(tl.int64) * KV_HEADS * GROUP + q_head
    elements = result[:, None] * DIM + columns[None, :]
    if OTHER:
        best = tl.load(other_lse_ptr + result, mask=there, other=float("-inf")).to(REAL) * 1.4426950408889634
        seen = best > float("-inf")
        weight = tl.where(seen, 1.0, 0.0).to(REAL)
        acc = tl.load(other_ptr + elements, mask=inside, other=0.0).to(REAL)
        # The output may be NaN where nothing is seen.
        acc = tl.where(seen[:, None], acc, 0.0)
    for index in range(owner, last_owner):
        if SINGLE:
            segment, first_query, earlier_queries = 0, 0, 0
            queries = max_query_rows // GROUP
        else:
            segment = tl.load(owners_ptr + index)
            first_query = tl.load(segments_ptr + 3 * segments + segment)
            queries = tl.load(segments_ptr + 4 * segments + segment)
            earlier_queries = tl.load(segments_ptr + 5 * segments + segment).to(tl.int64)
        unit = segment * KV_HEADS + kv_head
        if SINGLE:
            first_part, last_part = from_part, to_part
        else:
            first_part = tl.load(bounds_ptr + 2 * unit)
            last_part = tl.load(bounds_ptr + 2 * unit + 1)
        row = (token - first_query) * GROUP + member
        origin = (earlier_queries * KV_HEADS + kv_head * queries) * GROUP + row
        for part in range(first_part, last_part + 1, CHUNK):
            parts = part + chunk_offsets
            valid = parts <= last_part
            piece = origin[None, :] + parts.to(tl.int64)[:, None] * max_query_rows
            lse = tl.load(partial_lse_ptr + piece, mask=valid[:, None] & there[None, :], other=float("-inf"))
            outs = tl.load(
                partial_out_ptr + piece[:, :, None] * DIM + columns[None, None, :],
                mask=valid[:, None, None] & inside[None, :, :],
                other=0.0,
            )
            top = tl.maximum(best, tl.max(lse, 0))
            floor = tl.where(top == float("-inf"), 0.0, top)
            part_weight = tl.exp2(lse - floor[None, :])
            rescale = tl.exp2(best - floor)
            acc = acc * rescale[:, None] + tl.sum(outs * part_weight[:, :, None], 0)
            weight = weight * rescale + tl.sum(part_weight, 0)
            best = top

    if SINKS:
        sink = tl.load(sinks_ptr + q_head, mask=there, other=0.0).to(REAL) * 1.4426950408889634
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
    tl.store(out_ptr + elements, out.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(lse_ptr + result, total, mask=there)

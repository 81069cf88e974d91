"""Triton kernels of exact attention, which sum in the order of positions, whatever the KV slots of keys.

A query at position p sees *near* positions, from ``near_start(p)`` to p, and *far* positions before them.
Every ancestor in a tree of depth up to ``DEPTH`` is near. So a far position is in the same slot for all
queries of a forward. Far positions are divided into chunks with fixed bounds (``chunk_start``). One program
sums a chunk for all queries, in tiles of fixed positions. Near positions are two tiles, each in the order of
positions. The last kernel merges the partial outputs in a fixed order. No bound depends on the number of
queries or programs, and tiles beyond the far positions of a query add exactly 0 to its sums.

The second near tile of a query holds its ancestors in the tree, so a program for each query gathers it. The
first near tile is usually the last whole tile of committed positions, which all queries of a sequence share.
One program computes it for BLOCK_G query rows, the same number of rows as in a program for one query, so that
both compute the same products. Far and near positions have separate launches, because a program for near
positions needs a third of the shared memory, so that more of them run on a multiprocessor at a time.
"""

import triton
import triton.language as tl

from triforce_tree.kernels.attention.tiles import (
    LOG2E,
    add_values,
    edge_tile,
    full_tile,
    kv_offsets,
    softcapped,
)
from triforce_tree.kernels.launching import wait_for_previous

DEPTH = tl.constexpr(64)
TILE = tl.constexpr(64)
NEAR = tl.constexpr(128)  # a query has at most DEPTH + TILE near positions
# From each of these positions on, chunks have the size beside it. So a short text is divided among many
# programs, and a long text has few partial outputs.
_CHUNKS = ((0, 512), (4096, 1024), (16_384, 2048), (49_152, 4096))


def chunks_of(positions: int) -> int:
    """Returns the number of chunks of ``positions`` positions."""
    ends = [start for start, _ in _CHUNKS[1:]] + [positions]
    return sum(
        triton.cdiv(max(0, min(positions, end) - start), size)
        for (start, size), end in zip(_CHUNKS, ends, strict=True)
    )


# Kernels read single constants: the second to fourth start, the four sizes, the chunks before these starts.
_SECOND, _THIRD, _FOURTH = (tl.constexpr(start) for start, _ in _CHUNKS[1:])
_SIZE_1, _SIZE_2, _SIZE_3, _SIZE_4 = (tl.constexpr(size) for _, size in _CHUNKS)
_BEFORE_2, _BEFORE_3, _BEFORE_4 = (tl.constexpr(chunks_of(start)) for start, _ in _CHUNKS[1:])


@triton.jit
def near_start(position):
    """Returns the first near position of a query, a multiple of TILE."""
    return tl.maximum(position - DEPTH, 0) // TILE * TILE


@triton.jit
def shared_start(length):
    """Returns the first position of the last whole committed tile, the first near tile of most queries."""
    return length // TILE * TILE - TILE


@triton.jit
def chunk_start(chunk):
    """Returns the first position of a chunk."""
    start = tl.where(chunk < _BEFORE_2, chunk * _SIZE_1, _SECOND + (chunk - _BEFORE_2) * _SIZE_2)
    start = tl.where(chunk < _BEFORE_3, start, _THIRD + (chunk - _BEFORE_3) * _SIZE_3)
    return tl.where(chunk < _BEFORE_4, start, _FOURTH + (chunk - _BEFORE_4) * _SIZE_4)


@triton.jit
def chunk_of(position):
    """Returns the chunk of a position."""
    chunk = tl.where(position < _SECOND, position // _SIZE_1, _BEFORE_2 + (position - _SECOND) // _SIZE_2)
    chunk = tl.where(position < _THIRD, chunk, _BEFORE_3 + (position - _THIRD) // _SIZE_3)
    return tl.where(position < _FOURTH, chunk, _BEFORE_4 + (position - _FOURTH) // _SIZE_4)


@triton.jit
def first_seen(position, window, CHUNKED: tl.constexpr):
    """Returns the first position that a query sees within a window."""
    if CHUNKED:
        return position // window * window
    return tl.maximum(position - window + 1, 0)


@triton.jit(do_not_specialize=["tokens", "planned", "words"])
def near_slots_kernel(
    positions_ptr,  # int32 [B * T], written
    slots_ptr,  # int32 [B * T, NEAR], written: the slot of each near position
    lengths_ptr,  # int32 [B]
    mask_ptr,  # int64 [B, planned, words]
    tokens,
    planned,
    words,
    BLOCK: tl.constexpr,
):
    """Writes the position of each query and the slots of its near positions."""
    query = tl.program_id(0)
    sequence, token = query // tokens, query % tokens
    length = tl.load(lengths_ptr + sequence)
    slot = tl.arange(0, BLOCK)
    word_at = mask_ptr + (sequence * planned + token).to(tl.int64) * words + slot // 64
    word = tl.load(word_at, mask=slot < tokens, other=0)
    seen = ((word >> (slot % 64).to(tl.int64)) & 1).to(tl.int32)
    rank = tl.cumsum(seen, 0) - seen
    position = length + tl.sum(seen, 0) - 1
    start = near_start(position)
    near = start + tl.arange(0, NEAR)
    own = slots_ptr + query * NEAR
    tl.store(positions_ptr + query, position)
    tl.store(own + tl.arange(0, NEAR), near, mask=near < length)
    tl.store(own + length + rank - start, length + slot, mask=seen != 0)


_UNSPECIALIZED = [
    "tokens", "blocks", "pieces", "units", "window", "view_rows_per_sequence", "view_rows_per_head",
    "view_columns_per_head",
]  # fmt: skip


@triton.jit
def softmax_step(scores, seen, best, weight, base):
    """Runs one step of the online softmax over scores ``[M, N]``; only rows in ``seen`` (bool ``[M]``) count.

    Returns:
        unnormalised probabilities ``[M, N]``, the factor on earlier sums ``[M]``, the new maximum ``[M]`` and
        the new sum of probabilities ``[M]``.
    """
    top = tl.where(seen, tl.maximum(best, tl.max(scores, 1)), best)
    floor = tl.where(top == float("-inf"), 0.0, top)
    # In a row that sees no position, all probabilities become 0 and the factor becomes 1.
    p = tl.exp2(scores * base - tl.where(seen, floor * base, float("inf"))[:, None])
    rescale = tl.where(seen, tl.exp2((best - floor) * base), 1.0)
    return p, rescale, top, weight * rescale + tl.sum(p, 1)


@triton.jit
def store_piece(out_ptr, lse_ptr, piece, real, acc, best, weight, base, columns, DIM: tl.constexpr):
    """Stores the partial outputs of the rows in ``real``, and their log-sum-exps in base 2."""
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
    v_ptr,  # [B, H_kv, S, D_v] or pages [P, H_kv, PAGE, D_v]
    k_view,  # descriptors of matrix views of k and v if TMA, see ``launch.RowViews``; else unused
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
    pieces,  # partial outputs of a query: its chunks, then its two near tiles
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
    """Attends to one chunk of one KV head for a tile of the query rows of a sequence."""
    wait_for_previous(PDL)
    program = tl.program_id(0)
    heads = KV_HEADS * GROUP
    columns, v_columns = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    inside, v_inside = columns < DIM, v_columns < VALUE_DIM
    offsets = tl.arange(0, BLOCK_N)
    base = LOG2E if SOFTCAP else scale * LOG2E

    # Programs with the last chunks start first, because these chunks are the largest.
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


@triton.jit(do_not_specialize=["tokens", "pieces", "gathered", "blocks", "window"])
def exact_near_kernel(
    q_ptr,  # [B * T, H_q, D], dense
    k_ptr,  # [B, H_kv, S, D] or pages [P, H_kv, PAGE, D], any strides but the last
    v_ptr,  # [B, H_kv, S, D_v] or pages [P, H_kv, PAGE, D_v]
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
    pieces,  # partial outputs of a query: its chunks, then its two near tiles
    gathered,  # B * T * H_kv, number of the programs that gather; B * H_kv * blocks others follow
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
    """Attends to the near tiles of one query, or to the committed first near tile of BLOCK_G query rows."""
    if PDL:
        # There is no wait, because the previous kernel (far positions) has waited for the inputs of both.
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
        # The next kernel reads what the kernel before this one wrote.
        tl.extra.cuda.gdc_wait()


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
    """Merges the partial outputs of a query head: its chunks in their order, then its near tiles."""
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
    # If the window hides all far positions, chunks may be unwritten, so none is read.
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
    # An unused node of a tree may see no position, and -inf - -inf is NaN.
    floor = tl.where(top == float("-inf"), 0.0, top)
    rescale, near_weight, last_weight = tl.exp2(best - floor), tl.exp2(lse - floor), tl.exp2(last_lse - floor)
    acc = acc * rescale + near * near_weight + last * last_weight
    weight = weight * rescale + near_weight + last_weight
    if SINKS:
        weight += tl.exp2(sink - floor)
    weight = tl.where(weight == 0.0, 1.0, weight)
    tl.store(out_ptr + row * DIM + columns, (acc / weight).to(out_ptr.dtype.element_ty), mask=inside)

"""Triton kernels that select the ``slots`` best chunks of a retrieval view; ``select`` holds the definition.

The first launch computes scores, reading every mean key once; the scores stay in L2. The second launch has
one program per sequence and KV head. It holds the scores as ordered integers in registers, finds the
``slots``-th largest by bisection, counting the scores above a pivot, and writes the selected chunks in
ascending order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from triforce_tree.kernels.launching import launched_early, wait_for_previous, warps
from triforce_tree.kernels.step.select import VARIANCE_WEIGHT

# Chunks per program of the first launch.
_BLOCK = 64
# Most scores that a program holds in registers; more scores are processed in blocks of half this number.
_HELD = 16384
_LOWEST = tl.constexpr(-(2**31))
_HIGHEST = tl.constexpr(2**31 - 1)
# Bisection of values converges faster than bisection of their bits, but may stall. After this many steps the
# bits are bisected, which takes at most 32 steps.
_BY_VALUE = tl.constexpr(24)


@triton.jit
def _score_kernel(
    score_ptr,  # fp32 [B, H_q, C]
    top_ptr,  # fp32 [B, H_q, blocks], largest score of a block
    mass_ptr,  # fp32 [B, H_q, blocks], sum of exp(score - largest)
    q_ptr,  # [B, H_q, D] with strides
    means_ptr,  # [B, H, C, DIM] with strides
    limit_ptr,  # int64 [B]
    q_b,
    q_h,
    means_b,
    means_h,
    means_c,
    heads,
    chunks,
    blocks,
    scale,
    variance_weight,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,  # D, or 2 D with variances
    Q_DIM: tl.constexpr,  # D
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    block, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    sequence, head = pair // heads, pair % heads
    limit = tl.minimum(tl.load(limit_ptr + sequence), chunks)
    if block * BLOCK < limit:
        chunk = block * BLOCK + tl.arange(0, BLOCK)
        column = tl.arange(0, BLOCK_D)
        real, inside = chunk < limit, column < DIM
        at = means_ptr + sequence * means_b + head * means_h + chunk[:, None].to(tl.int64) * means_c
        means = tl.load(at + column[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        for member in range(GROUP):
            row = pair * GROUP + member
            q_at = q_ptr + sequence * q_b + (head * GROUP + member) * q_h
            q = tl.load(q_at + column % Q_DIM, mask=inside, other=0.0).to(tl.float32)
            if DIM > Q_DIM:
                q = tl.where(column < Q_DIM, q, variance_weight * scale * q * q)
            score = tl.sum(means.to(tl.float32) * q[None, :], 1) * scale
            tl.store(score_ptr + row * chunks + chunk, score, mask=real)
            if GROUP > 1:
                score = tl.where(real, score, float("-inf"))
                top = tl.max(score, 0)
                floor = tl.where(top == float("-inf"), 0.0, top)
                tl.store(top_ptr + row * blocks + block, top)
                tl.store(mass_ptr + row * blocks + block, tl.sum(tl.exp(score - floor), 0))


@triton.jit
def _ordered(value):
    """Returns int32 that compare like the fp32 values, with NaN as -inf, all above ``_LOWEST``."""
    value = tl.where(value == 0.0, 0.0, value)  # -0.0 becomes 0.0
    value = tl.where(value == value, value, float("-inf"))
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _number(key):
    """Inverts ``_ordered``."""
    bits = tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.int32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _keys(
    score_ptr,
    lse,
    row,
    start,
    limit,
    chunks,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Returns the scores of chunks ``start ... start + BLOCK - 1`` as ordered int32; chunk 0 has the highest.

    Args:
        lse: fp32 ``[BLOCK_GROUP]``, log-sum-exp of each query head of the group.
    """
    chunk = start + tl.arange(0, BLOCK)
    real = chunk < limit
    if GROUP > 1:
        # All query heads are loaded at once; in a loop each head would wait for its loads.
        member = tl.arange(0, BLOCK_GROUP)[:, None]
        there = (member < GROUP) & real[None, :]
        scores = tl.load(
            score_ptr + (row + member) * chunks + chunk[None, :], mask=there, other=float("-inf")
        )
        best_score = tl.max(tl.where(there, scores - lse[:, None], float("-inf")), 0)
    else:
        best_score = tl.load(score_ptr + row * chunks + chunk, mask=real, other=0.0)
    key = tl.where(real, _ordered(best_score), _LOWEST)
    return tl.where(chunk == 0, _HIGHEST, key)


@triton.jit
def _total(
    top_ptr, mass_ptr, row, used, blocks, GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    """Returns the log-sum-exp over the candidates for each query head of a group, from the sums of blocks."""
    member = tl.arange(0, BLOCK_GROUP)[:, None]
    best = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_GROUP], tl.float32)
    for start in range(0, used, BLOCK):
        at = start + tl.arange(0, BLOCK)[None, :]
        there = (member < GROUP) & (at < used)
        top = tl.load(top_ptr + (row + member) * blocks + at, mask=there, other=float("-inf"))
        mass = tl.load(mass_ptr + (row + member) * blocks + at, mask=there, other=0.0)
        new = tl.maximum(best, tl.max(top, 1))
        floor = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(best - floor) + tl.sum(mass * tl.exp(top - floor[:, None]), 1)
        best = new
    return best + tl.log(total)


@triton.jit
def _extremes(keys, limit, start, BLOCK: tl.constexpr):
    """Returns the lowest and the highest key of the candidates except chunk 0."""
    chunk = start + tl.arange(0, BLOCK)
    candidate = (chunk > 0) & (chunk < limit)
    return tl.min(tl.where(candidate, keys, _HIGHEST), 0), tl.max(tl.where(candidate, keys, _LOWEST), 0)


# Specialised on ``slots`` 1, the kernel has a loop that never runs, which Triton 3.6 cannot compile.
@triton.jit(do_not_specialize=["slots"])
def _choose_kernel(
    table_ptr,  # int32 [B, H, W] with strides
    score_ptr,  # fp32 [B, H_q, C]
    key_ptr,  # int32 [B, H, C], keys if registers do not hold all of them
    top_ptr,  # fp32 [B, H_q, blocks]
    mass_ptr,
    limit_ptr,  # int64 [B]
    table_b,
    table_h,
    table_w,
    heads,
    chunks,
    blocks,
    slots,
    GROUP: tl.constexpr,
    HELD: tl.constexpr,  # whether one block holds all chunks
    BLOCK: tl.constexpr,
    PART: tl.constexpr,  # chunks per program of the first launch
    BLOCK_PARTS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    pair = tl.program_id(0).to(tl.int64)
    sequence, head = pair // heads, pair % heads
    row = pair * GROUP
    limit = tl.minimum(tl.load(limit_ptr + sequence), chunks).to(tl.int32)
    lse = tl.zeros([BLOCK_GROUP], tl.float32)
    if GROUP > 1:
        lse = _total(top_ptr, mass_ptr, row, tl.cdiv(limit, PART), blocks, GROUP, BLOCK_GROUP, BLOCK_PARTS)
    keys = _keys(score_ptr, lse, row, 0, limit, chunks, GROUP, BLOCK_GROUP, BLOCK)
    low, high = _extremes(keys, limit, 0, BLOCK)
    stored_keys = key_ptr + pair * chunks + tl.arange(0, BLOCK)
    if not HELD:
        tl.store(stored_keys, keys)
        for start in range(BLOCK, limit, BLOCK):
            keys = _keys(score_ptr, lse, row, start, limit, chunks, GROUP, BLOCK_GROUP, BLOCK)
            tl.store(stored_keys + start, keys, mask=start + tl.arange(0, BLOCK) < chunks)
            lower, higher = _extremes(keys, limit, start, BLOCK)
            low, high = tl.minimum(low, lower), tl.maximum(high, higher)
        tl.debug_barrier()
    # At least `slots` keys are >= `low` (`count_low` of them), and fewer are >= `high` (`count_high`).
    low, high = low.to(tl.int64), high.to(tl.int64) + 1
    count_low, count_high, step = limit, 1, 0
    while (high - low > 1) & (count_low > slots) & (count_high < slots):
        midpoint = _ordered(0.5 * _number(low) + 0.5 * _number(high)).to(tl.int64)
        by_value = (step < _BY_VALUE) & (midpoint > low) & (midpoint < high)
        pivot = tl.where(by_value, midpoint, low + (high - low) // 2)
        bound = pivot.to(tl.int32)
        if HELD:
            count = tl.sum((keys >= bound).to(tl.int32), 0)
        else:
            count = 0
            for start in range(0, limit, BLOCK):
                real = start + tl.arange(0, BLOCK) < limit
                more = tl.load(stored_keys + start, mask=real, other=_LOWEST)
                count += tl.sum((more >= bound).to(tl.int32), 0)
        reaches = count >= slots
        low, count_low = tl.where(reaches, pivot, low), tl.where(reaches, count, count_low)
        high, count_high = tl.where(reaches, high, pivot), tl.where(reaches, count_high, count)
        step += 1
    # The selected chunks have keys >= `high`, or are the lowest chunks with keys in [`low`, `high`).
    out = table_ptr + sequence * table_b + head * table_h
    first, last = low.to(tl.int32), high.to(tl.int32)
    selected_before, tied_before = 0, 0
    for start in range(0, BLOCK if HELD else limit, BLOCK):
        chunk = start + tl.arange(0, BLOCK)
        if not HELD:
            keys = tl.load(stored_keys + start, mask=chunk < limit, other=_LOWEST)
        selected = keys >= last
        tied = (keys >= first) & (keys < last) & (chunk < limit)
        # One scan computes both counts, because a block has fewer than 2^15 chunks.
        packed = selected.to(tl.int32) * 65536 + tied.to(tl.int32)
        before = tl.cumsum(packed, 0) - packed
        tied_rank = tied_before + (before & 65535)
        place = selected_before + (before >> 16) + tl.minimum(tied_rank, slots - count_high)
        chosen = (selected | (tied & (tied_rank < slots - count_high))) & (place < slots)
        tl.store(out + place * table_w, chunk, mask=chosen)
        total = tl.sum(packed, 0)
        selected_before += total >> 16
        tied_before += total & 65535


def select_chunks(q: Tensor, means: Tensor, limit: Tensor, table: Tensor, slots: int, scale: float) -> None:
    """See ``select.select_chunks``; the workspace holds fp32 ``[B, H_q, C]`` scores."""
    batch, heads, chunks, dim = means.shape
    q_heads = q.shape[1]
    if dim not in (q.shape[2], 2 * q.shape[2]):
        raise ValueError(f"means of {dim} columns do not fit queries of {q.shape[2]}; give D or 2 D")
    if q.stride(2) != 1:
        q = q.contiguous()
    if means.stride(3) != 1 or table.dtype != torch.int32 or table.shape[2] < slots:
        raise ValueError(
            f"means need a dense last dimension; table is {table.dtype} {tuple(table.shape)}, "
            f"it must be int32 with {slots} columns or more"
        )
    limit = limit.contiguous()
    blocks = triton.cdiv(chunks, _BLOCK)
    scores = torch.empty(batch, q_heads, chunks, dtype=torch.float32, device=q.device)
    tops = torch.empty(batch, q_heads, blocks, dtype=torch.float32, device=q.device)
    masses = torch.empty_like(tops)
    group, block_d = q_heads // heads, triton.next_power_of_2(dim)
    # More warps hold the means of a larger block in registers.
    options = warps(max(4, _BLOCK * block_d // 4096))
    _score_kernel[(blocks, batch * heads)](
        scores, tops, masses, q, means, limit, q.stride(0), q.stride(1), *means.stride()[:3],
        heads, chunks, blocks, scale, VARIANCE_WEIGHT,
        GROUP=group, DIM=dim, Q_DIM=q.shape[2], BLOCK_D=block_d, BLOCK=_BLOCK,
        **launched_early(q.device), **options,
    )  # fmt: skip
    held = chunks <= _HELD
    block = triton.next_power_of_2(chunks) if held else _HELD // 2
    keys = limit if held else torch.empty(batch, heads, chunks, dtype=torch.int32, device=q.device)
    options = warps(max(4, min(16, block // 512)))
    _choose_kernel[(batch * heads,)](
        table, scores, keys, tops, masses, limit, *table.stride(), heads, chunks, blocks, slots,
        GROUP=group, HELD=held, BLOCK=block,
        PART=_BLOCK, BLOCK_PARTS=min(256, triton.next_power_of_2(blocks)),
        BLOCK_GROUP=triton.next_power_of_2(group), **launched_early(q.device), **options,
    )  # fmt: skip

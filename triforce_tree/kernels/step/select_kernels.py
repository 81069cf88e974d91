"""Triton kernels that choose the chunks of a retrieval view: scores, then the exact best ``slots``.

Two launches. The first reads every mean once; its scores stay in L2. The second has one program per
sequence and KV head, which holds the scores as ordered integers in registers, brackets the last chosen
score by counting, and writes the chosen chunks in ascending order. ``select.select_chunks`` is
the definition.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

# Chunks of one program of the first launch.
_BLOCK = 64
# Scores that the registers of one program hold; of more it walks half as many at a time.
_HELD = 16384
_LOWEST = tl.constexpr(-(2**31))
_HIGHEST = tl.constexpr(2**31 - 1)
# Halving between values closes in faster than halving between their bits, but may creep; after so many
# counts the bits take over, which need 32 at most.
_BY_VALUE = tl.constexpr(24)


@triton.jit
def _score_kernel(
    score_ptr,  # fp32 [B, H_q, C]
    top_ptr,  # fp32 [B, H_q, blocks], largest score of a block
    mass_ptr,  # fp32 [B, H_q, blocks], sum of exp(score - largest)
    q_ptr,  # [B, H_q, D] with strides
    means_ptr,  # [B, H, C, D] with strides
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
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
            q = tl.load(q_at + column, mask=inside, other=0.0).to(tl.float32)
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
    """fp32 as int32 that compare alike; not a number stands below everything but what is absent."""
    value = tl.where(value == 0.0, 0.0, value)  # one zero
    value = tl.where(value == value, value, float("-inf"))
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _number(key):
    """The fp32 that ``_ordered`` made this of."""
    bits = tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.int32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _keys(score_ptr, lse_ptr, row, start, limit, chunks, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Interest of chunks ``start ... start + BLOCK - 1`` as ordered integers; chunk 0 above all."""
    chunk = start + tl.arange(0, BLOCK)
    real = chunk < limit
    most = tl.load(score_ptr + row * chunks + chunk, mask=real, other=0.0)
    if GROUP > 1:
        most -= tl.load(lse_ptr + row)
        for member in range(1, GROUP):
            score = tl.load(score_ptr + (row + member) * chunks + chunk, mask=real, other=0.0)
            most = tl.maximum(most, score - tl.load(lse_ptr + row + member))
    key = tl.where(real, _ordered(most), _LOWEST)
    return tl.where(chunk == 0, _HIGHEST, key)


@triton.jit
def _total(lse_ptr, top_ptr, mass_ptr, row, used, blocks, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Log-sum-exp of each query head of a group over the candidates, from those of the blocks."""
    for member in range(GROUP):
        best, total = float("-inf"), 0.0
        for start in range(0, used, BLOCK):
            at = start + tl.arange(0, BLOCK)
            top = tl.load(top_ptr + (row + member) * blocks + at, mask=at < used, other=float("-inf"))
            mass = tl.load(mass_ptr + (row + member) * blocks + at, mask=at < used, other=0.0)
            new = tl.maximum(best, tl.max(top, 0))
            floor = tl.where(new == float("-inf"), 0.0, new)
            total = total * tl.exp(best - floor) + tl.sum(mass * tl.exp(top - floor), 0)
            best = new
        tl.store(lse_ptr + row + member, best + tl.log(total))


@triton.jit
def _extremes(keys, limit, start, BLOCK: tl.constexpr):
    """Lowest and highest key among the candidates but chunk 0."""
    chunk = start + tl.arange(0, BLOCK)
    asked = (chunk > 0) & (chunk < limit)
    return tl.min(tl.where(asked, keys, _HIGHEST), 0), tl.max(tl.where(asked, keys, _LOWEST), 0)


# A single slot as a constant leaves a loop that never runs, over which Triton 3.6 fails.
@triton.jit(do_not_specialize=["slots"])
def _choose_kernel(
    table_ptr,  # int32 [B, H, W] with strides
    score_ptr,  # fp32 [B, H_q, C]
    key_ptr,  # int32 [B, H, C]: where keys are kept that registers do not hold
    top_ptr,  # fp32 [B, H_q, blocks]
    mass_ptr,
    lse_ptr,  # fp32 [B, H_q], written here
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
    PART: tl.constexpr,  # chunks of a program of the first launch
    BLOCK_PARTS: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    sequence, head = pair // heads, pair % heads
    row = pair * GROUP
    limit = tl.minimum(tl.load(limit_ptr + sequence), chunks).to(tl.int32)
    if GROUP > 1:
        _total(lse_ptr, top_ptr, mass_ptr, row, tl.cdiv(limit, PART), blocks, GROUP, BLOCK_PARTS)
        tl.debug_barrier()
    keys = _keys(score_ptr, lse_ptr, row, 0, limit, chunks, GROUP, BLOCK)
    low, high = _extremes(keys, limit, 0, BLOCK)
    kept = key_ptr + pair * chunks + tl.arange(0, BLOCK)
    if not HELD:
        tl.store(kept, keys)
        for start in range(BLOCK, limit, BLOCK):
            keys = _keys(score_ptr, lse_ptr, row, start, limit, chunks, GROUP, BLOCK)
            tl.store(kept + start, keys, mask=start + tl.arange(0, BLOCK) < chunks)
            lower, higher = _extremes(keys, limit, start, BLOCK)
            low, high = tl.minimum(low, lower), tl.maximum(high, higher)
        tl.debug_barrier()
    # At least `slots` keys are `low` or more (`most` of them), and fewer are `high` or more (`least`).
    low, high = low.to(tl.int64), high.to(tl.int64) + 1
    most, least, step = limit, 1, 0
    while (high - low > 1) & (most > slots) & (least < slots):
        guess = _ordered(0.5 * _number(low) + 0.5 * _number(high)).to(tl.int64)
        by_value = (step < _BY_VALUE) & (guess > low) & (guess < high)
        middle = tl.where(by_value, guess, low + (high - low) // 2)
        bound = middle.to(tl.int32)
        if HELD:
            count = tl.sum((keys >= bound).to(tl.int32), 0)
        else:
            count = 0
            for start in range(0, limit, BLOCK):
                real = start + tl.arange(0, BLOCK) < limit
                more = tl.load(kept + start, mask=real, other=_LOWEST)
                count += tl.sum((more >= bound).to(tl.int32), 0)
        enough = count >= slots
        low, most = tl.where(enough, middle, low), tl.where(enough, count, most)
        high, least = tl.where(enough, high, middle), tl.where(enough, least, count)
        step += 1
    # All from `high` on, and of those that are `low` or more the lowest chunks.
    out = table_ptr + sequence * table_b + head * table_h
    first, last = low.to(tl.int32), high.to(tl.int32)
    sure_before, maybe_before = 0, 0
    for start in range(0, BLOCK if HELD else limit, BLOCK):
        chunk = start + tl.arange(0, BLOCK)
        if not HELD:
            keys = tl.load(kept + start, mask=chunk < limit, other=_LOWEST)
        sure = keys >= last
        maybe = (keys >= first) & (keys < last) & (chunk < limit)
        # Two counts in one scan: a block has fewer than 2^15 chunks.
        packed = sure.to(tl.int32) * 65536 + maybe.to(tl.int32)
        before = tl.cumsum(packed, 0) - packed
        maybe_at = maybe_before + (before & 65535)
        place = sure_before + (before >> 16) + tl.minimum(maybe_at, slots - least)
        chosen = (sure | (maybe & (maybe_at < slots - least))) & (place < slots)
        tl.store(out + place * table_w, chunk, mask=chosen)
        total = tl.sum(packed, 0)
        sure_before += total >> 16
        maybe_before += total & 65535


def select_chunks(q: Tensor, means: Tensor, limit: Tensor, table: Tensor, slots: int, scale: float) -> None:
    """See ``select.select_chunks``; the workspace holds fp32 ``[B, H_q, C]`` scores."""
    batch, heads, chunks, dim = means.shape
    q_heads = q.shape[1]
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
    lse = torch.empty(batch, q_heads, dtype=torch.float32, device=q.device)
    group = q_heads // heads
    _score_kernel[(blocks, batch * heads)](
        scores, tops, masses, q, means, limit, q.stride(0), q.stride(1), *means.stride()[:3],
        heads, chunks, blocks, scale,
        GROUP=group, DIM=dim, BLOCK_D=triton.next_power_of_2(dim), BLOCK=_BLOCK,
    )  # fmt: skip
    held = chunks <= _HELD
    block = triton.next_power_of_2(chunks) if held else _HELD // 2
    keys = limit if held else torch.empty(batch, heads, chunks, dtype=torch.int32, device=q.device)
    options = {} if knobs.runtime.interpret else {"num_warps": max(4, min(16, block // 512))}
    _choose_kernel[(batch * heads,)](
        table, scores, keys, tops, masses, lse, limit, *table.stride(), heads, chunks, blocks, slots,
        GROUP=group, HELD=held, BLOCK=block,
        PART=_BLOCK, BLOCK_PARTS=min(256, triton.next_power_of_2(blocks)),
        **options,
    )  # fmt: skip

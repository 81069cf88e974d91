"""Triton functions for tiles of keys and values: offsets, loads, and matrix products by dtype and device.

fp32 operands are multiplied in fp64 where tensor cores are as fast in fp64 as other units in fp32 (A100,
H100). Elsewhere they are multiplied in fp32 without tensor cores. Three products in tf32 would have up to
five times torch's error.
"""

import triton
import triton.language as tl

# Columns of queries and keys that ``narrow_scores`` multiplies at a time.
PART = tl.constexpr(16)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def prefetch(pointer):
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // dummy $0", "=r,l", [pointer], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def softcapped(scores, scale, softcap, SOFTCAP: tl.constexpr):
    """Returns scaled and softcapped scores; without ``SOFTCAP``, the raw scores, which the caller scales."""
    if SOFTCAP:
        exp_2x = tl.exp2(scores * (scale / softcap) * (2.0 * LOG2E))
        scores = softcap * (1.0 - 2.0 / (exp_2x + 1.0))
    return scores


@triton.jit
def kv_offsets(positions, table_at, first_kv, stride_block, stride_slot, PAGE: tl.constexpr, valid):
    """Returns the int64 element offsets of KV positions, by the page table if ``PAGE`` is not 0."""
    if PAGE == 0:
        return (first_kv + positions).to(tl.int64) * stride_slot
    logical = first_kv + positions
    page = tl.load(table_at + logical // PAGE, mask=valid).to(tl.int64)
    return page * stride_block + (logical % PAGE).to(tl.int64) * stride_slot


@triton.jit
def full_tile(head, at, columns, inside, EVERY: tl.constexpr):
    """Loads columns of the KV slots at ``at``, and 0 for columns not ``inside`` unless ``EVERY`` is set."""
    if EVERY:
        return tl.load(head + at[:, None] + columns[None, :])
    return tl.load(head + at[:, None] + columns[None, :], mask=inside[None, :], other=0.0)


@triton.jit
def edge_tile(head, at, columns, valid, inside):
    """Loads columns of the KV slots at ``at``, and 0 for slots not ``valid`` and columns not ``inside``."""
    return tl.load(head + at[:, None] + columns[None, :], mask=valid[:, None] & inside[None, :], other=0.0)


@triton.jit
def narrow_scores(q_at, k_at, real, valid, REAL: tl.constexpr, DIM: tl.constexpr):
    """Returns raw scores ``[BLOCK_M, positions]``, multiplied in fp32 and summed in ``REAL``.

    Products without tensor cores hold all columns of their operands in registers, so only ``PART`` columns
    are multiplied at a time. Keys that are not ``valid`` are read as 0.
    """
    scores = tl.zeros([q_at.shape[0], k_at.shape[0]], REAL)
    for part in range(0, DIM, PART):
        columns = part + tl.arange(0, PART)[None, :]
        q = tl.load(q_at[:, None] + columns, mask=real[:, None] & (columns < DIM), other=0.0)
        k = tl.load(k_at[:, None] + columns, mask=valid[:, None] & (columns < DIM), other=0.0)
        scores += tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee").to(REAL)
    return scores


@triton.jit
def scales_at(positions, sequence, table_at, first_kv, stride_block, PAGE: tl.constexpr, valid):
    """Returns the offsets of the scales of KV positions, whose slots have a stride of 1."""
    at = kv_offsets(positions, table_at, first_kv, stride_block, 1, PAGE, valid)
    if PAGE == 0:
        at += tl.cast(sequence, tl.int64) * stride_block
    return at


@triton.jit
def slot_scales(at, valid, REAL: tl.constexpr):
    """Loads scales of int8 keys or values, and 0 where they are not ``valid``; None loads all."""
    if valid is None:
        return tl.load(at).to(REAL)
    else:
        return tl.load(at, mask=valid, other=0.0).to(REAL)


@triton.jit
def add_values(acc, p, v, v_scale, Kind: tl.constexpr, REAL: tl.constexpr):
    """Returns ``acc + p v``, multiplied in ``Kind`` and summed in ``REAL``.

    ``p`` holds the probabilities ``[BLOCK_M, positions]``, ``v`` the values ``[positions, BLOCK_V]``.
    ``v_scale`` holds the scale of each position for values in int8; else it is None. It multiplies the
    probabilities, which have fewer elements. In fp16 it multiplies the values, because the products with
    probabilities could exceed the range of fp16.
    """
    if v_scale is not None:
        if Kind == tl.float16:
            v = v.to(tl.float32) * v_scale[:, None]
        else:
            p *= v_scale[None, :]
    if Kind == tl.float32:
        return acc + tl.dot(p.to(Kind), v.to(Kind), input_precision="ieee").to(REAL)
    else:
        return tl.dot(p.to(Kind), v.to(Kind), acc, out_dtype=REAL)

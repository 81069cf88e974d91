"""Tiles of keys and values: where they are in memory, loads, and the matrix products that differ by dtype
and device.

fp32 is multiplied in fp64 where tensor cores do so as fast as other units multiply fp32 (A100, H100): queries
are cast to fp64, and one ``tl.dot`` does it. Elsewhere it is multiplied in fp32. Three tf32 products instead
of one would have up to five times torch's error.
"""

import triton
import triton.language as tl

# Columns of queries and keys that are multiplied at a time.
PART = tl.constexpr(16)


@triton.jit
def kv_offsets(positions, table_at, first_kv, stride_block, stride_slot, PAGE: tl.constexpr, valid):
    """Element offsets of KV positions: through the page table, or directly."""
    if PAGE == 0:
        return (first_kv + positions).to(tl.int64) * stride_slot
    logical = first_kv + positions
    page = tl.load(table_at + logical // PAGE, mask=valid).to(tl.int64)
    return page * stride_block + (logical % PAGE).to(tl.int64) * stride_slot


@triton.jit
def full_tile(head, at, columns, inside, EVERY: tl.constexpr):
    """Columns of the KV slots ``at``; those that are not ``inside`` read as 0, unless EVERY one is."""
    if EVERY:
        return tl.load(head + at[:, None] + columns[None, :])
    return tl.load(head + at[:, None] + columns[None, :], mask=inside[None, :], other=0.0)


@triton.jit
def edge_tile(head, at, columns, valid, inside):
    """Columns of the KV slots ``at``; those that are not ``inside``, and slots not ``valid``, read as 0."""
    return tl.load(head + at[:, None] + columns[None, :], mask=valid[:, None] & inside[None, :], other=0.0)


@triton.jit
def narrow_scores(q_at, k_at, real, valid, REAL: tl.constexpr, DIM: tl.constexpr):
    """Raw scores ``[BLOCK_M, positions]`` of fp32, multiplied in fp32 and summed in ``REAL``.

    Products without tensor cores hold all columns of their operands in registers, so only ``PART`` columns
    are multiplied at a time. Keys that are not ``valid`` read as zero.
    """
    scores = tl.zeros([q_at.shape[0], k_at.shape[0]], REAL)
    for part in range(0, DIM, PART):
        columns = part + tl.arange(0, PART)[None, :]
        q = tl.load(q_at[:, None] + columns, mask=real[:, None] & (columns < DIM), other=0.0)
        k = tl.load(k_at[:, None] + columns, mask=valid[:, None] & (columns < DIM), other=0.0)
        scores += tl.dot(q, tl.trans(k), input_precision="ieee").to(REAL)
    return scores


@triton.jit
def add_values(acc, p, v, Kind: tl.constexpr, REAL: tl.constexpr):
    """``acc + p v``, multiplied in ``Kind`` and summed in ``REAL``."""
    if Kind == tl.float32:
        return acc + tl.dot(p.to(Kind), v, input_precision="ieee").to(REAL)
    else:
        return tl.dot(p.to(Kind), v.to(Kind), acc, out_dtype=REAL)

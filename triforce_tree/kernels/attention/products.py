"""Products of tree attention that differ by dtype and device.

fp32 is multiplied in fp64 where tensor cores do so as fast as other units multiply fp32 (A100, H100): queries
come as fp64, and ``tl.dot`` does all. Elsewhere it is multiplied in fp32. Three tf32 products in place of one
would lose up to five times as much as torch.
"""

import triton
import triton.language as tl

# Columns of queries and keys that are multiplied at a time.
PART = tl.constexpr(16)


@triton.jit
def narrow_scores(q_rows, k_rows, real, valid, REAL: tl.constexpr, DIM: tl.constexpr):
    """Raw scores ``[BLOCK_M, rows]`` of fp32, multiplied in fp32 and summed in ``REAL``.

    Products that go through no tensor core hold all columns of their operands in registers, so only ``PART``
    of them are multiplied at a time. Rows of K that are not ``valid`` read as zero.
    """
    scores = tl.zeros([q_rows.shape[0], k_rows.shape[0]], REAL)
    for part in range(0, DIM, PART):
        at = part + tl.arange(0, PART)[None, :]
        q = tl.load(q_rows[:, None] + at, mask=real[:, None] & (at < DIM), other=0.0)
        k = tl.load(k_rows[:, None] + at, mask=valid[:, None] & (at < DIM), other=0.0)
        scores += tl.dot(q, tl.trans(k), input_precision="ieee").to(REAL)
    return scores


@triton.jit
def add_values(acc, p, v, Kind: tl.constexpr, REAL: tl.constexpr):
    """``acc + p v``, multiplied in ``Kind`` and summed in ``REAL``."""
    if Kind == tl.float32:
        return acc + tl.dot(p.to(Kind), v, input_precision="ieee").to(REAL)
    else:
        return tl.dot(p.to(Kind), v.to(Kind), acc, out_dtype=REAL)

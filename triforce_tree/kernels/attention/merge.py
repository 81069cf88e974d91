"""Triton kernels that merge the attention to disjoint sets of KV positions, in a fixed order.

For parts p with outputs ``out_p`` and log-sum-exps ``lse_p`` (natural logarithms), let ``m = max lse_p``.
Then ``out = sum exp(lse_p - m) out_p / sum exp(lse_p - m)`` and ``lse = m + log sum exp(lse_p - m)`` (cascade
inference; DeFT, arXiv 2404.00242, section 3.2). ``reference.merge_states`` is the definition.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

# Largest number of parts of one launch.
_MOST_PARTS = 12


@triton.jit
def _merge_kernel(
    out_ptr,  # [rows, D]
    lse_ptr,  # fp32 [rows]
    outs_ptr,  # [PARTS, rows, D]
    lses_ptr,  # fp32 [PARTS, rows]
    rows,
    PARTS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    real = row < rows
    there = real[:, None] & (column < DIM)[None, :]
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for part in range(PARTS):
        lse = tl.load(lses_ptr + part * rows.to(tl.int64) + row, mask=real, other=float("-inf"))
        # The output of an empty part is not read: it may hold any value, even NaN.
        full = there & (lse != float("-inf"))[:, None]
        place = (part * rows.to(tl.int64) + row)[:, None] * DIM + column[None, :]
        out = tl.load(outs_ptr + place, mask=full, other=0.0).to(tl.float32)
        top = tl.maximum(best, lse)
        floor = tl.where(top == float("-inf"), 0.0, top)
        part_weight, rescale = tl.exp(lse - floor), tl.exp(best - floor)
        acc = acc * rescale[:, None] + out * part_weight[:, None]
        weight = weight * rescale + part_weight
        best = top
    empty = weight == 0.0
    weight = tl.where(empty, 1.0, weight)
    out = acc / weight[:, None]
    tl.store(out_ptr + row[:, None] * DIM + column[None, :], out.to(out_ptr.dtype.element_ty), mask=there)
    tl.store(lse_ptr + row, tl.where(empty, float("-inf"), best + tl.log(weight)), mask=real)


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """See ``reference.merge_states``."""
    parts, dim = outs.shape[0], outs.shape[-1]
    outs, lses = outs.contiguous(), lses.float().contiguous()
    out = torch.empty(outs.shape[1:], dtype=outs.dtype, device=outs.device)
    lse = torch.empty(lses.shape[1:], dtype=torch.float32, device=outs.device)
    block = 4
    _merge_kernel[(triton.cdiv(lse.numel(), block),)](
        out, lse, outs, lses, lse.numel(),
        PARTS=parts, DIM=dim, BLOCK_D=triton.next_power_of_2(dim), BLOCK=block,
    )  # fmt: skip
    return out, lse


# Without this, Triton would compile variants for other lengths.
@triton.jit(do_not_specialize=["parts", "rows", "tokens"])
def _merge_parts_kernel(
    out_ptr,  # [B, T, H, D]
    lse_ptr,  # fp32 [B, H, T]
    outs,  # pointers to the output of each part, [B, T, H, D]
    lses,  # pointers to the log-sum-exps of each part, fp32 [B, H, T]
    parts,
    rows,
    heads,
    tokens,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Row numbers have 32 bits, because divisions in 64 bits take as long as the loads.
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, BLOCK_D)
    real = row < rows
    there = real[:, None] & (column < DIM)[None, :]
    head, token = row % heads, row // heads
    place = ((token // tokens) * heads + head) * tokens + token % tokens
    elements = row[:, None].to(tl.int64) * DIM + column[None, :]
    count = tl.zeros([BLOCK], tl.int32) + parts
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for part in tl.static_range(len(lses)):
        lse = tl.load(lses[part] + place, mask=real & (part < count), other=float("-inf"))
        best = tl.maximum(best, lse)
    floor = tl.where(best == float("-inf"), 0.0, best)
    weight = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for part in tl.static_range(len(lses)):
        lse = tl.load(lses[part] + place, mask=real & (part < count), other=float("-inf"))
        part_weight = tl.exp(lse - floor)
        # The output of an empty part is not read: it may hold any value, even NaN.
        full = there & (part_weight > 0.0)[:, None]
        out = tl.load(outs[part] + elements, mask=full, other=0.0).to(tl.float32)
        acc += out * part_weight[:, None]
        weight += part_weight
    empty = weight == 0.0
    weight = tl.where(empty, 1.0, weight)
    tl.store(out_ptr + elements, (acc * (1.0 / weight)[:, None]).to(out_ptr.dtype.element_ty), mask=there)
    tl.store(lse_ptr + place, tl.where(empty, float("-inf"), floor + tl.log(weight)), mask=real)


def merge_parts(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """See ``reference.merge_parts``."""
    count, (_, heads, tokens, dim) = min(len(outs), _MOST_PARTS), outs[0].shape
    parts = [out.transpose(1, 2).contiguous() for out in outs[:count]]
    weights = [lse.float().contiguous() for lse in lses[:count]]
    out, lse = torch.empty_like(parts[0]), torch.empty_like(weights[0])
    # Every number of arguments would be compiled separately, so it is fixed; the repeated parts are not read.
    parts += parts[-1:] * (_MOST_PARTS - count)
    weights += weights[-1:] * (_MOST_PARTS - count)
    block = max(4, 2048 // triton.next_power_of_2(dim))
    _merge_parts_kernel[(triton.cdiv(lse.numel(), block),)](
        out, lse, tuple(parts), tuple(weights), count, lse.numel(), heads, tokens,
        DIM=dim, BLOCK_D=triton.next_power_of_2(dim), BLOCK=block,
    )  # fmt: skip
    if count < len(outs):
        return merge_parts([out.transpose(1, 2), *outs[count:]], [lse, *lses[count:]])
    return out.transpose(1, 2), lse

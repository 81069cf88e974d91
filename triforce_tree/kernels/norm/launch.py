"""Triton kernel of ``reference.row_rms_norm``: a program has one row, or several of few columns."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from triforce_tree.kernels.norm.reference import MOST_COLUMNS


@triton.jit
def row_rms_norm_kernel(
    out_ptr,  # [rows, columns]
    x_ptr,
    weight_ptr,  # [columns]
    eps,
    shift,
    columns,
    rows,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    LATE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 1) / columns + eps)[:, None]
    weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32) + shift
    if not LATE:
        normed = normed.to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * columns + column, (normed * weight).to(out_ptr.dtype.element_ty), mask=inside)


def row_rms_norm(x: Tensor, weight: Tensor, eps: float, shift: float, late: bool) -> Tensor:
    """See ``reference.row_rms_norm``.

    Raises:
        ValueError: rows are longer than ``MOST_COLUMNS``.
    """
    x, columns = x.contiguous(), x.shape[-1]
    if columns > MOST_COLUMNS:
        raise ValueError(f"rows of {columns} elements; the kernel sums up to {MOST_COLUMNS}")
    out = torch.empty_like(x)
    if x.numel():
        block, rows = triton.next_power_of_2(columns), x.numel() // columns
        # By the columns alone: a row is summed in the same order whatever is computed beside it.
        each = max(1, 2048 // block)
        row_rms_norm_kernel[(triton.cdiv(rows, each),)](
            out, x, weight, eps, shift, columns, rows, BLOCK=block, ROWS=each, LATE=late,
            num_warps=min(16, max(1, each * block // 512)),
        )  # fmt: skip
    return out

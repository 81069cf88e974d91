"""Triton kernel of ``reference.row_rms_norm``: one program a row."""

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
    BLOCK: tl.constexpr,
    LATE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / columns + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32) + shift
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
        block = triton.next_power_of_2(columns)
        row_rms_norm_kernel[(x.numel() // columns,)](
            out, x, weight, eps, shift, columns, BLOCK=block, LATE=late,
            num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return out

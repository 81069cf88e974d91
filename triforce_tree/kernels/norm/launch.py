"""Triton kernel of RMS norms, in which a program computes one row, or several rows with few columns."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from triforce_tree.kernels.launching import launched_early, wait_for_previous, warps
from triforce_tree.kernels.norm.reference import MOST_COLUMNS


# Without this, Triton would compile variants for other numbers of rows.
@triton.jit(do_not_specialize=["rows"])
def row_rms_norm_kernel(
    out_ptr,  # [rows, columns]
    total_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,  # [columns]
    eps,
    shift,
    columns,
    rows,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    LATE: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    # No kernel of a forward writes weights, so they are read before the previous kernel has ended.
    weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32) + shift
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * columns + column, total, mask=inside)
        x = total.to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 1) / columns + eps)[:, None]
    if not LATE:
        normed = normed.to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * columns + column, (normed * weight).to(out_ptr.dtype.element_ty), mask=inside)


def row_rms_norm(x: Tensor, weight: Tensor, eps: float, shift: float, late: bool) -> Tensor:
    """See ``reference.row_rms_norm``.

    Raises:
        ValueError: rows have more than ``MOST_COLUMNS`` elements.
    """
    return _launch(x, None, weight, eps, shift, late)[1]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, shift: float, late: bool
) -> tuple[Tensor, Tensor]:
    """See ``reference.add_rms_norm``.

    Raises:
        ValueError: rows have more than ``MOST_COLUMNS`` elements, or x and residual differ in shape or dtype.
    """
    if x.shape != residual.shape or x.dtype != residual.dtype:
        raise ValueError(
            f"x is {x.dtype} {list(x.shape)}, residual is {residual.dtype} {list(residual.shape)}; they must "
            "be alike"
        )
    return _launch(x, residual.contiguous(), weight, eps, shift, late)


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, shift: float, late: bool
) -> tuple[Tensor, Tensor]:
    """Computes the sum (x if there is no residual) and its norm."""
    x, columns = x.contiguous(), x.shape[-1]
    if columns > MOST_COLUMNS:
        raise ValueError(f"rows of {columns} elements; the kernel sums up to {MOST_COLUMNS}")
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    if x.numel():
        block, rows = triton.next_power_of_2(columns), x.numel() // columns
        # It depends only on the columns, so that the order of a row's sums does not depend on other rows.
        each = max(1, 2048 // block)
        row_rms_norm_kernel[(triton.cdiv(rows, each),)](
            out, total, x, x if residual is None else residual, weight, eps, shift, columns, rows,
            BLOCK=block, ROWS=each, LATE=late, ADD=residual is not None,
            **launched_early(x.device), **warps(min(16, max(1, each * block // 512))),
        )  # fmt: skip
    return total, out

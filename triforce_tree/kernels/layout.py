"""How K and V look to Hopper's bulk copy engine: matrices of rows, described once per call."""

from typing import NamedTuple

import torch
from torch import Tensor
from triton import next_power_of_2
from triton.tools.tensor_descriptor import TensorDescriptor


class RowViews(NamedTuple):
    """K and V as matrices ``[rows, columns]``, tiles of ``block_n`` rows.

    ``steps``: rows from one sequence to the next, rows and columns from one head to the next.
    """

    k: TensorDescriptor
    v: TensorDescriptor
    steps: tuple[int, int, int]


def row_views(k: Tensor, v: Tensor, page: int, block_n: int) -> RowViews | None:
    """Views of K and V ``[B, H_kv, S, D]``, or of pages; None where the layout does not allow any.

    Rows of one head must be equally spaced over all that a tile can touch, so heads are either
    columns (storage ``[S, H_kv, D]``) or a whole number of row strides apart (``[H_kv, S, D]``).
    """
    batch, kv_heads, rows, dim = k.shape
    block_stride, head_stride, row_stride, _ = k.stride()
    if v.stride() != k.stride() or dim != next_power_of_2(dim) or k.dtype == torch.float32:
        return None
    if page and (page % block_n or block_stride != page * row_stride):
        return None
    aligned = all(t.data_ptr() % 16 == 0 for t in (k, v)) and row_stride * k.itemsize % 16 == 0
    if not aligned or row_stride < dim:
        return None
    if batch == 1:
        block_stride = 0
    if block_stride % row_stride:
        return None
    rows_per_batch = 0 if page else block_stride // row_stride
    span = (batch - 1) * (block_stride // row_stride) + rows
    if kv_heads == 1 or (head_stride == dim and row_stride >= kv_heads * dim):
        rows_per_head, columns_per_head, columns = 0, dim, kv_heads * dim
    elif head_stride % row_stride == 0:
        rows_per_head, columns_per_head, columns = head_stride // row_stride, 0, dim
        span += (kv_heads - 1) * rows_per_head
    else:
        return None
    if not block_n <= span < 2**31:
        return None
    shape, strides, block = [span, columns], [row_stride, 1], [block_n, dim]
    return RowViews(
        TensorDescriptor(k, shape, strides, block),
        TensorDescriptor(v, shape, strides, block),
        (rows_per_batch, rows_per_head, columns_per_head),
    )

"""Selection of context chunks on the CPU by ``select.h``, for queries and mean keys in fp32."""

import struct

import torch
from torch import Tensor

from triforce_tree.kernels.cpu.fp32.library import run_with_work, usable
from triforce_tree.kernels.step import select

_SELECT = struct.Struct("21qdd")


def select_chunks(q: Tensor, means: Tensor, limit: Tensor, table: Tensor, slots: int, scale: float) -> None:
    """See ``kernels.step.select_chunks``."""
    compiled = usable(q, means)
    if compiled is None or table.stride(2) != 1:
        select.select_chunks.definition(q, means, limit, table, slots, scale)
        return
    (batch, heads, chunks, columns), dim = means.shape, q.shape[2]
    run_with_work(compiled.select_chunks, _SELECT, (
        q.data_ptr(), *q.stride()[:2], means.data_ptr(), *means.stride()[:3], limit.data_ptr(),
        table.data_ptr(), *table.stride()[:2], batch, heads, q.shape[1] // heads, dim, columns, chunks,
        slots, torch.get_num_threads(), scale, select.VARIANCE_WEIGHT * scale,
    ))  # fmt: skip

"""Causal attention of many fp32 queries on the CPU, by ``prefill.h``."""

import struct

import torch
from torch import Tensor

from triforce_tree.kernels.cpu.fp32.library import run_with_work, usable

_PREFILL = struct.Struct("24qd")
# With fewer query rows for each KV head, most lanes of a panel have nothing to do.
_LEAST_ROWS = 16


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor | None:
    """Computes ``attention.prefill.causal_attention``; None if the C kernel does not serve the tensors.

    The result of a query does not depend on the other queries, bit for bit.
    """
    batch, heads, queries, dim = q.shape
    kv_heads, positions, value_dim = k.shape[1], k.shape[2], v.shape[3]
    library = usable(q, k, v) if queries * heads >= _LEAST_ROWS * kv_heads else None
    if library is None:
        return None
    out = q.new_empty(batch, queries, heads, value_dim)
    run_with_work(library.prefill_attention, _PREFILL, (
        q.data_ptr(), *q.stride()[:3], k.data_ptr(), v.data_ptr(), *k.stride()[:3], *v.stride()[:3],
        out.data_ptr(), batch, kv_heads, heads // kv_heads, queries, positions, dim, value_dim,
        window or 0, torch.get_num_threads(), scale,
    ))  # fmt: skip
    return out.transpose(1, 2)

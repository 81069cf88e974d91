"""The operator ``append_kv`` for fp32 KV slots on the CPU, by ``attention.h``."""

import struct

from torch import Tensor

from triforce_tree.kernels.cpu.fp32.library import usable
from triforce_tree.kernels.step import kv_slots

_APPEND = struct.Struct("24q")


def append_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    ring: int = 0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """See ``kernels.step.append_kv``; dtypes other than fp32 use the definition."""
    library = usable(k_cache, v_cache, k, v)
    if library is None or k_scale is not None or not start.is_contiguous():
        kv_slots.append_kv.definition(k_cache, v_cache, k, v, start, ring, k_scale, v_scale)
        return
    batch, heads, tokens, _ = k.shape
    size = k_cache.shape[2]
    kv_slots.check_ring(ring, tokens, size)
    request = _APPEND.pack(
        k.data_ptr(), *k.stride()[:3], k_cache.data_ptr(), *k_cache.stride()[:3], k.shape[3],
        v.data_ptr(), *v.stride()[:3], v_cache.data_ptr(), *v_cache.stride()[:3], v.shape[3],
        start.data_ptr(), batch, heads, tokens, size, ring,
    )  # fmt: skip
    library.append(request)

"""Commit of accepted paths on the CPU by ``slots.h``, for any dtype."""

import struct

from torch import Tensor

from triforce_tree.kernels.cpu.fp32.library import run_with_work, usable
from triforce_tree.kernels.step import kv_slots

_MOVE = struct.Struct("23q")


def move_kv(k: Tensor, v: Tensor, index: Tensor, start: Tensor, ring: int = 0) -> None:
    """See ``kernels.step.move_kv``."""
    compiled = usable()
    if compiled is None or k.stride(4) != 1 or v.stride(4) != 1 or index.stride(1) != 1:
        kv_slots.move_kv.definition(k, v, index, start, ring)
        return
    (layers, batch, heads, size, _), places = k.shape, index.shape[1]
    kv_slots.check_ring(ring, places, size)
    slots = (
        field
        for t in (k, v)
        for field in (t.data_ptr(), *(n * t.itemsize for n in t.stride()[:4]), t.shape[4] * t.itemsize)
    )
    run_with_work(compiled.move_kv, _MOVE, (
        *slots, index.data_ptr(), start.data_ptr(), index.stride(0), layers, batch, heads, size, places, ring,
    ))  # fmt: skip

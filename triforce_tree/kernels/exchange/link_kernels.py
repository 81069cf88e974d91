"""Triton kernels of ``link``: one warp that reads the device's clock of nanoseconds, and one that waits."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer


@triton.jit
def _begin_kernel(begun_ptr):
    tl.store(begun_ptr, globaltimer())


@triton.jit(do_not_specialize=["counts", "size", "rate"])
def _end_kernel(
    state_ptr,  # int64 [2]
    begun_ptr,  # int64 [1]
    count_ptr,  # int32 [counts], or None
    counts,
    size,
    rate,
    BLOCK: tl.constexpr,
):
    total = tl.zeros([], tl.int64) + size
    if count_ptr is not None:
        parts = tl.zeros([BLOCK], tl.int32)
        for start in range(0, counts, BLOCK):
            at = start + tl.arange(0, BLOCK)
            parts += tl.load(count_ptr + at, mask=at < counts, other=0)
        total *= tl.sum(parts, 0)
    begun = tl.load(begun_ptr)
    # Transfers of other streams may end at the same time.
    seen = tl.atomic_add(state_ptr, 0)
    free = seen - 1
    end = begun
    while seen != free:
        free = seen
        end = tl.maximum(free, begun) + total * 1000 // rate
        seen = tl.atomic_cas(state_ptr, free, end)
    tl.atomic_add(state_ptr + 1, total)
    now = globaltimer()
    while now < end:
        now = globaltimer()


def begin_transfer(begun: Tensor) -> None:
    """See ``link.begin_transfer``."""
    _begin_kernel[(1,)](begun, num_warps=1)


def end_transfer(state: Tensor, begun: Tensor, count: Tensor | None, size: int, rate: int) -> None:
    """See ``link.end_transfer``; ``count`` is dense."""
    if count is not None and not count.is_contiguous():
        raise ValueError("count must be a dense tensor")
    counts = 1 if count is None else count.numel()
    _end_kernel[(1,)](state, begun, count, counts, size, rate, BLOCK=128, num_warps=1)

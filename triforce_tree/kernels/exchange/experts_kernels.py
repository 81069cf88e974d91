"""Triton kernels of ``experts``: one program lists the experts, and many programs copy them.

The copying kernel reads page-locked host memory over the bus.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

# Number of programs that copy, and bytes of a step, which together saturate the bus.
_PROGRAMS, _STEP_BYTES = 64, 8192
_IDS = 1024


@triton.jit(do_not_specialize=["ids_count", "layer"])
def _choose_kernel(
    ids_ptr,  # [n]
    held_ptr,  # int32 [E]
    moves_ptr,  # int32 [E], used as scratch first
    count_ptr,  # int32 [1]
    fetched_ptr,  # int64 [1]
    ids_count,
    experts,
    layer,
    BLOCK_I: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    expert = tl.arange(0, BLOCK_E)
    exists = expert < experts
    tl.store(moves_ptr + expert, tl.zeros([BLOCK_E], tl.int32), mask=exists)
    tl.debug_barrier()
    for start in range(0, ids_count, BLOCK_I):
        at = start + tl.arange(0, BLOCK_I)
        wanted = tl.load(ids_ptr + at, mask=at < ids_count, other=-1)
        inside = (wanted >= 0) & (wanted < experts)
        tl.store(moves_ptr + wanted, tl.full([BLOCK_I], 1, tl.int32), mask=inside)
    tl.debug_barrier()
    routed = tl.load(moves_ptr + expert, mask=exists, other=0) > 0
    missing = routed & (tl.load(held_ptr + expert, mask=exists, other=0) != layer)
    # All threads must have read their flags before the list overwrites them.
    tl.debug_barrier()
    order = tl.cumsum(missing.to(tl.int32), 0) - 1
    count = tl.sum(missing.to(tl.int32), 0)
    tl.store(moves_ptr + order, expert, mask=missing)
    tl.store(held_ptr + expert, tl.zeros([BLOCK_E], tl.int32) + layer, mask=missing)
    tl.store(count_ptr, count)
    tl.store(fetched_ptr, tl.load(fetched_ptr) + count)


def choose_experts(
    ids: Tensor, held: Tensor, moves: Tensor, count: Tensor, fetched: Tensor, layer: int
) -> None:
    """See ``exchange.choose_experts``; all tensors but ``ids`` must be dense."""
    if any(t.dtype != torch.int32 or not t.is_contiguous() for t in (held, moves, count)):
        raise ValueError("held, moves and count must be dense int32 tensors")
    ids = ids.reshape(-1).contiguous()
    options = {} if knobs.runtime.interpret else {"num_warps": 4}
    _choose_kernel[(1,)](
        ids, held, moves, count, fetched, ids.numel(), held.numel(), layer,
        BLOCK_I=_IDS, BLOCK_E=triton.next_power_of_2(held.numel()), **options,
    )  # fmt: skip


@triton.jit
def _fetch_kernel(
    slots_ptr,  # [E, words]
    on_host_ptr,  # [E, words], host memory
    moves_ptr,  # int32 [E]
    count_ptr,  # int32 [1]
    words,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    blocks = tl.cdiv(words, BLOCK)
    total = tl.load(count_ptr) * blocks
    work = tl.program_id(0)
    while work < total:
        first = tl.load(moves_ptr + work // blocks).to(tl.int64) * words
        at = (work % blocks) * BLOCK + tl.arange(0, BLOCK)
        there = at < words
        tl.store(slots_ptr + first + at, tl.load(on_host_ptr + first + at, mask=there), mask=there)
        work += PROGRAMS


def fetch_experts(slots: Tensor, on_host: Tensor, moves: Tensor, count: Tensor) -> None:
    """See ``exchange.fetch_experts``; ``on_host`` is page-locked memory, whose address kernels can use."""
    if slots.dtype != on_host.dtype or slots.shape != on_host.shape:
        raise ValueError("slots and on_host must be tensors of one dtype and size")
    if not (slots.is_contiguous() and on_host.is_contiguous()):
        raise ValueError("slots and on_host must be dense")
    _fetch_kernel[(_PROGRAMS,)](
        slots, on_host, moves, count, slots.shape[1], BLOCK=_STEP_BYTES // slots.itemsize, PROGRAMS=_PROGRAMS
    )

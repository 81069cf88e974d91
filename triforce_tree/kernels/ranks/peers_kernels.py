"""Triton kernels of ``peers``; the program of a channel waits for the same channel of other ranks.

Programs start in ascending order on every rank. So programs of the lowest channels always run at the same
time, even if a device runs few programs at once, and there is no deadlock.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from triforce_tree.runtime.peer_memory import CHANNELS, ELEMENTS, MOST_RANKS, layout, rows_of_channel


@triton.jit
def _meet(arrived, channel, call, RANKS: tl.constexpr, MOST: tl.constexpr, OWN: tl.constexpr):
    # The writes of all threads must precede the release below.
    tl.debug_barrier()
    for peer in tl.static_range(RANKS):
        if peer != OWN:
            # The old value is not used, so the program does not wait for the other GPU.
            tl.atomic_add(arrived[peer] + channel * MOST + OWN, 1, sem="release", scope="sys")
    for peer in tl.static_range(RANKS):
        if peer != OWN:
            counter = arrived[OWN] + channel * MOST + peer
            # The difference is also correct after the counters have wrapped around.
            while tl.atomic_add(counter, 0, sem="acquire", scope="sys") - (call + 1) < 0:
                pass
    tl.debug_barrier()


@triton.jit(do_not_specialize=["size"])
def _sum_kernel(
    out_ptr,  # [size]
    x_ptr,  # [size]
    arrived,  # int32 [channels, MOST] of each rank
    data,  # [2, channels, BLOCK] of each rank
    calls_ptr,  # int32 [channels]
    size,
    channels,
    OWN: tl.constexpr,
    RANKS: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    channel = tl.program_id(0)
    call = tl.load(calls_ptr + channel)
    at = tl.arange(0, BLOCK)
    index = channel * BLOCK + at
    place = ((call & 1) * channels + channel) * BLOCK + at
    x = tl.load(x_ptr + index, mask=index < size, other=0.0)
    tl.store(data[OWN] + place, x)
    _meet(arrived, channel, call, RANKS, MOST, OWN)
    total = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(RANKS):
        total += tl.load(data[peer] + place, volatile=True).to(tl.float32)
    tl.store(out_ptr + index, total.to(out_ptr.dtype.element_ty), mask=index < size)
    tl.store(calls_ptr + channel, call + 1)


@triton.jit(do_not_specialize=["rows"])
def _merge_kernel(
    out_ptr,  # [rows, DIM]
    own_out_ptr,  # [rows, DIM]
    own_lse_ptr,  # fp32 [rows]
    arrived,  # int32 [channels, MOST] of each rank
    lses,  # fp32 [2, channels, ELEMENTS] of each rank
    data,  # [2, channels, ELEMENTS] of each rank
    calls_ptr,  # int32 [channels]
    rows,
    channels,
    OWN: tl.constexpr,
    RANKS: tl.constexpr,
    MOST: tl.constexpr,
    ELEMENTS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    channel = tl.program_id(0)
    call = tl.load(calls_ptr + channel)
    own, column = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    row = channel * ROWS + own
    real = row < rows
    there = real[:, None] & (column < DIM)[None, :]
    begin = ((call & 1) * channels + channel) * ELEMENTS
    place = begin + own[:, None] * DIM + column[None, :]
    out = tl.load(own_out_ptr + row[:, None] * DIM + column[None, :], mask=there, other=0.0)
    lse = tl.load(own_lse_ptr + row, mask=real, other=float("-inf"))
    tl.store(data[OWN] + place, out, mask=there)
    tl.store(lses[OWN] + begin + own, lse)
    _meet(arrived, channel, call, RANKS, MOST, OWN)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for peer in tl.static_range(RANKS):
        # No load waits for another load. A rank also reads its own part from memory, so that the code and the
        # bits are the same on all ranks.
        part = tl.load(lses[peer] + begin + own, volatile=True)
        value = tl.load(data[peer] + place, mask=there, other=0.0, volatile=True)
        top = tl.maximum(best, part)
        floor = tl.where(top == float("-inf"), 0.0, top)
        part_weight, rescale = tl.exp(part - floor), tl.exp(best - floor)
        # The output of an empty part may hold any value, even NaN.
        value = tl.where((part_weight > 0.0)[:, None], value.to(tl.float32), 0.0)
        acc = acc * rescale[:, None] + value * part_weight[:, None]
        weight = weight * rescale + part_weight
        best = top
    acc = acc / tl.where(weight == 0.0, 1.0, weight)[:, None]
    tl.store(out_ptr + row[:, None] * DIM + column[None, :], acc.to(out_ptr.dtype.element_ty), mask=there)
    tl.store(calls_ptr + channel, call + 1)


def sum_with_peers(x: Tensor, memories: Sequence[Tensor], calls: Tensor, rank: int) -> Tensor:
    """See ``peers.sum_with_peers``."""
    out = torch.empty_like(x)
    places = [layout(memory, x.dtype) for memory in memories]
    _sum_kernel[(triton.cdiv(x.numel(), ELEMENTS),)](
        out, x, tuple(p.arrived for p in places), tuple(p.data for p in places), calls, x.numel(), CHANNELS,
        OWN=rank, RANKS=len(places), MOST=MOST_RANKS, BLOCK=ELEMENTS,
    )  # fmt: skip
    return out


def merge_with_peers(
    out: Tensor, lse: Tensor, memories: Sequence[Tensor], calls: Tensor, rank: int
) -> Tensor:
    """See ``peers.merge_with_peers``."""
    dim, rows = out.shape[-1], lse.numel()
    merged, own = torch.empty_like(out), rows_of_channel(dim)
    places = [layout(memory, out.dtype) for memory in memories]
    _merge_kernel[(triton.cdiv(rows, own),)](
        merged, out, lse, tuple(p.arrived for p in places), tuple(p.lse for p in places),
        tuple(p.data for p in places), calls, rows, CHANNELS,
        OWN=rank, RANKS=len(places), MOST=MOST_RANKS, ELEMENTS=ELEMENTS, DIM=dim,
        BLOCK_D=triton.next_power_of_2(dim), ROWS=own,
    )  # fmt: skip
    return merged

"""Triton kernels of ``chunks``: one program per KV head assigns slots, and many programs fetch chunks.

The fetching kernels read page-locked host memory over the bus. Chunks are too small for the copy engine, in
which they would also wait for large copies.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

# Fetching programs per KV head, enough to saturate the bus.
_FETCHERS = 16
_WORDS = 1024
# Elements of a tile that a warp holds, 128 in each thread.
_HELD = 4096


@triton.jit
def _exchange_kernel(
    held_ptr,  # int32 [P, S]
    place_ptr,  # int32 [P, C]
    wanted_ptr,  # int32 [P, W]
    hand_ptr,  # int32 [P]
    moves_ptr,  # int32 [P, 2, W]
    counts_ptr,  # int32 [P]
    in_use_ptr,  # int32 [P, S], scratch
    free_slots_ptr,  # int32 [P, S], scratch
    slots,
    chunks,
    wanted_count,
    BLOCK_S: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    held, place = held_ptr + pair * slots, place_ptr + pair * chunks
    in_use, free_slots = in_use_ptr + pair * slots, free_slots_ptr + pair * slots
    moves = moves_ptr + pair * 2 * wanted_count
    at = tl.arange(0, BLOCK_W)
    slot = tl.arange(0, BLOCK_S)
    chunk = tl.load(wanted_ptr + pair * wanted_count + at, mask=at < wanted_count, other=0)
    own = tl.load(place + chunk, mask=at < wanted_count, other=0)
    missing = (at < wanted_count) & (own < 0)
    tl.store(in_use + slot, tl.zeros([BLOCK_S], tl.int32), mask=slot < slots)
    tl.debug_barrier()
    tl.store(in_use + own, tl.full([BLOCK_W], 1, tl.int32), mask=(at < wanted_count) & (own >= 0))
    tl.debug_barrier()
    # ``clock_order`` lists the slots from the clock hand on.
    hand = tl.load(hand_ptr + pair)
    clock_order = (hand + slot) % slots
    free = (slot < slots) & (tl.load(in_use + clock_order, mask=slot < slots, other=1) == 0)
    rank = tl.cumsum(free.to(tl.int32), 0) - 1
    tl.store(free_slots + rank, clock_order, mask=free)
    tl.debug_barrier()
    count = tl.sum(missing.to(tl.int32), 0)
    order = tl.cumsum(missing.to(tl.int32), 0) - 1
    taken = tl.load(free_slots + order, mask=missing, other=0)
    evicted = tl.load(held + taken, mask=missing, other=0)
    tl.store(place + evicted, tl.full([BLOCK_W], -1, tl.int32), mask=missing)
    tl.store(held + taken, chunk, mask=missing)
    tl.store(place + chunk, taken, mask=missing)
    tl.store(moves + order, taken, mask=missing)
    tl.store(moves + wanted_count + order, chunk, mask=missing)
    tl.store(counts_ptr + pair, count)
    last = tl.sum(tl.where(missing & (order == count - 1), taken, 0), 0)
    tl.store(hand_ptr + pair, tl.where(count > 0, (last + 1) % slots, hand))


def exchange_chunks(
    held: Tensor, place: Tensor, wanted: Tensor, hand: Tensor, moves: Tensor, counts: Tensor
) -> None:
    """See ``exchange.exchange_chunks``; all tensors must be dense."""
    batch, heads, slots = held.shape
    tensors = (held, place, wanted, hand, moves, counts)
    if any(t.dtype != torch.int32 or not t.is_contiguous() for t in tensors):
        raise ValueError("held, place, wanted, hand, moves and counts must be dense int32 tensors")
    if wanted.shape[2] > slots:
        raise ValueError(f"{wanted.shape[2]} wanted chunks do not fit {slots} slots")
    in_use, free_slots = torch.empty_like(held), torch.empty_like(held)
    block = triton.next_power_of_2(slots)
    options = {} if knobs.runtime.interpret else {"num_warps": max(1, min(8, block // 128))}
    _exchange_kernel[(batch * heads,)](
        held, place, wanted, hand, moves, counts, in_use, free_slots,
        slots, place.shape[2], wanted.shape[2],
        BLOCK_S=block, BLOCK_W=triton.next_power_of_2(wanted.shape[2]),
        **options,
    )  # fmt: skip


@triton.jit
def _copy_chunk(
    k_at,
    v_at,
    source,
    heads,
    head,
    row,
    column,
    v_column,
    there,
    v_there,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Copies the keys and values of a chunk; ``source`` points to its first row ``[H * D + H * D_v]``."""
    at = source + row.to(tl.int64) * heads * (DIM + VALUE_DIM)
    k = tl.load(at + head * DIM + column, mask=there)
    v = tl.load(at + heads * DIM + head * VALUE_DIM + v_column, mask=v_there)
    tl.store(k_at, k, mask=there)
    tl.store(v_at, v, mask=v_there)


@triton.jit
def _fetch_kernel(
    k_ptr,  # [H, positions, D] with strides
    v_ptr,  # [H, positions, D_v]
    on_device_ptr,  # [R, H * (D + D_v)]
    on_host_ptr,  # [F, H * (D + D_v)], host memory
    moves_ptr,  # int32 [H, 2, W]
    counts_ptr,  # int32 [H]
    k_h,
    k_s,
    v_h,
    v_s,
    heads,
    wanted_count,
    device_rows,
    HAS_DEVICE_PART: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FETCHERS: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    row, column = tl.arange(0, BLOCK_C)[:, None], tl.arange(0, BLOCK_D)[None, :]
    v_column = tl.arange(0, BLOCK_V)[None, :]
    there, v_there = (row < CHUNK) & (column < DIM), (row < CHUNK) & (v_column < VALUE_DIM)
    width = heads * (DIM + VALUE_DIM)
    count = tl.load(counts_ptr + head)
    at = tl.program_id(1)
    while at < count:
        slot = tl.load(moves_ptr + (head * 2) * wanted_count + at).to(tl.int64)
        first = tl.load(moves_ptr + (head * 2 + 1) * wanted_count + at).to(tl.int64) * CHUNK
        target = slot * CHUNK + row
        k_at = k_ptr + head * k_h + target * k_s + column
        v_at = v_ptr + head * v_h + target * v_s + v_column
        if HAS_DEVICE_PART:
            if first < device_rows:
                source = on_device_ptr + first * width
                _copy_chunk(
                    k_at, v_at, source, heads, head, row, column, v_column, there, v_there, DIM, VALUE_DIM
                )
            else:
                source = on_host_ptr + (first - device_rows) * width
                _copy_chunk(
                    k_at, v_at, source, heads, head, row, column, v_column, there, v_there, DIM, VALUE_DIM
                )
        else:
            source = on_host_ptr + first * width
            _copy_chunk(
                k_at, v_at, source, heads, head, row, column, v_column, there, v_there, DIM, VALUE_DIM
            )
        at += FETCHERS


def fetch_chunks(
    k: Tensor, v: Tensor, on_device: Tensor, on_host: Tensor, moves: Tensor, counts: Tensor, chunk: int
) -> None:
    """See ``exchange.fetch_chunks``; ``on_host`` is page-locked memory, whose address kernels can use."""
    (heads, _, dim), value_dim = k.shape, v.shape[2]
    width = heads * (dim + value_dim)
    if v.shape[:2] != k.shape[:2] or any(rows.shape[1:] != (width,) for rows in (on_device, on_host)):
        raise ValueError(
            f"k {tuple(k.shape)}, v {tuple(v.shape)}, on_device {tuple(on_device.shape)} and on_host "
            f"{tuple(on_host.shape)} do not fit; rows need {heads} x ({dim} + {value_dim}) = {width} elements"
        )
    if k.stride(2) != 1 or v.stride(2) != 1:
        raise ValueError("the last dimension of k and v must be dense")
    if not (on_device.is_contiguous() and on_host.is_contiguous() and moves.is_contiguous()):
        raise ValueError("on_device, on_host and moves must be dense")
    if not on_host.numel():
        on_host = on_device
    block_c, block_d = triton.next_power_of_2(chunk), triton.next_power_of_2(dim)
    block_v = triton.next_power_of_2(value_dim)
    # Registers hold the keys of a chunk, and then its values.
    warps = min(32, max(4, block_c * max(block_d, block_v) // _HELD))
    options = {} if knobs.runtime.interpret else {"num_warps": warps}
    _fetch_kernel[(heads, _FETCHERS)](
        k, v, on_device if on_device.numel() else k, on_host, moves, counts,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), heads, moves.shape[2], on_device.shape[0],
        HAS_DEVICE_PART=on_device.numel() > 0, CHUNK=chunk, BLOCK_C=block_c,
        DIM=dim, VALUE_DIM=value_dim, BLOCK_D=block_d, BLOCK_V=block_v, FETCHERS=_FETCHERS, **options,
    )  # fmt: skip


@triton.jit
def _words_kernel(
    target_ptr,  # int32 [n]
    source_ptr,  # int32 [n], host memory
    count,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target_ptr + at, tl.load(source_ptr + at, mask=at < count), mask=at < count)


def fetch_words(target: Tensor, source: Tensor) -> None:
    """See ``exchange.fetch_words``; ``source`` is page-locked memory, whose address kernels can use."""
    if target.dtype != torch.int32 or source.dtype != torch.int32 or target.shape != source.shape:
        raise ValueError("target and source must be int32 tensors of one size")
    if not (target.is_contiguous() and source.is_contiguous()):
        raise ValueError("target and source must be dense")
    count = target.numel()
    _words_kernel[(triton.cdiv(count, _WORDS),)](target, source, count, BLOCK=_WORDS)

"""Triton kernels of ``exchange``: one program a KV head settles who comes and goes, many fetch.

The fetches read host memory over the bus by themselves: chunks are too small for the copy engine, and a few
words would wait there for the large copies under way.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

# Programs a KV head that fetch: enough reads under way to fill the bus.
_FETCHERS = 16
_WORDS = 1024


@triton.jit
def _exchange_kernel(
    held_ptr,  # int32 [P, S]
    place_ptr,  # int32 [P, C]
    wanted_ptr,  # int32 [P, W]
    hand_ptr,  # int32 [P]
    moves_ptr,  # int32 [P, 2, W]
    counts_ptr,  # int32 [P]
    marks_ptr,  # int32 [P, S], scratch
    idle_ptr,  # int32 [P, S], scratch
    slots,
    chunks,
    asked,
    BLOCK_S: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    held, place = held_ptr + pair * slots, place_ptr + pair * chunks
    marks, idle = marks_ptr + pair * slots, idle_ptr + pair * slots
    moves = moves_ptr + pair * 2 * asked
    at = tl.arange(0, BLOCK_W)
    slot = tl.arange(0, BLOCK_S)
    chunk = tl.load(wanted_ptr + pair * asked + at, mask=at < asked, other=0)
    own = tl.load(place + chunk, mask=at < asked, other=0)
    missing = (at < asked) & (own < 0)
    tl.store(marks + slot, tl.zeros([BLOCK_S], tl.int32), mask=slot < slots)
    tl.debug_barrier()
    tl.store(marks + own, tl.full([BLOCK_W], 1, tl.int32), mask=(at < asked) & (own >= 0))
    tl.debug_barrier()
    # The slots in turn, from the hand on.
    hand = tl.load(hand_ptr + pair)
    turn = (hand + slot) % slots
    free = (slot < slots) & (tl.load(marks + turn, mask=slot < slots, other=1) == 0)
    rank = tl.cumsum(free.to(tl.int32), 0) - 1
    tl.store(idle + rank, turn, mask=free)
    tl.debug_barrier()
    count = tl.sum(missing.to(tl.int32), 0)
    order = tl.cumsum(missing.to(tl.int32), 0) - 1
    taken = tl.load(idle + order, mask=missing, other=0)
    gone = tl.load(held + taken, mask=missing, other=0)
    tl.store(place + gone, tl.full([BLOCK_W], -1, tl.int32), mask=missing)
    tl.store(held + taken, chunk, mask=missing)
    tl.store(place + chunk, taken, mask=missing)
    tl.store(moves + order, taken, mask=missing)
    tl.store(moves + asked + order, chunk, mask=missing)
    tl.store(counts_ptr + pair, count)
    last = tl.sum(tl.where(missing & (order == count - 1), taken, 0), 0)
    tl.store(hand_ptr + pair, tl.where(count > 0, (last + 1) % slots, hand))


def exchange_chunks(
    held: Tensor, place: Tensor, wanted: Tensor, hand: Tensor, moves: Tensor, counts: Tensor
) -> None:
    """See ``exchange.exchange_chunks``; all dense."""
    batch, heads, slots = held.shape
    tensors = (held, place, wanted, hand, moves, counts)
    if any(t.dtype != torch.int32 or not t.is_contiguous() for t in tensors):
        raise ValueError("held, place, wanted, hand, moves and counts must be dense int32 tensors")
    if wanted.shape[2] > slots:
        raise ValueError(f"{wanted.shape[2]} wanted chunks do not fit {slots} slots")
    marks, idle = torch.empty_like(held), torch.empty_like(held)
    block = triton.next_power_of_2(slots)
    options = {} if knobs.runtime.interpret else {"num_warps": max(1, min(8, block // 128))}
    _exchange_kernel[(batch * heads,)](
        held, place, wanted, hand, moves, counts, marks, idle,
        slots, place.shape[2], wanted.shape[2],
        BLOCK_S=block, BLOCK_W=triton.next_power_of_2(wanted.shape[2]),
        **options,
    )  # fmt: skip


@triton.jit
def _copy_chunk(k_at, v_at, source, heads, head, there, row, column, DIM: tl.constexpr):
    """One chunk's keys and values; ``source`` points to its first row ``[2, H, D]``."""
    at = source + row.to(tl.int64) * 2 * heads * DIM + head * DIM + column
    k = tl.load(at, mask=there)
    v = tl.load(at + heads * DIM, mask=there)
    tl.store(k_at, k, mask=there)
    tl.store(v_at, v, mask=there)


@triton.jit
def _fetch_kernel(
    k_ptr,  # [H, rows, D] with strides, as v
    v_ptr,
    near_ptr,  # [R, 2, H, D]
    far_ptr,  # [F, 2, H, D], host memory
    moves_ptr,  # int32 [H, 2, W]
    counts_ptr,  # int32 [H]
    k_h,
    k_s,
    v_h,
    v_s,
    heads,
    asked,
    near_rows,
    NEAR: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FETCHERS: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    row, column = tl.arange(0, BLOCK_C)[:, None], tl.arange(0, BLOCK_D)[None, :]
    there = (row < CHUNK) & (column < DIM)
    count = tl.load(counts_ptr + head)
    at = tl.program_id(1)
    while at < count:
        slot = tl.load(moves_ptr + (head * 2) * asked + at).to(tl.int64)
        first = tl.load(moves_ptr + (head * 2 + 1) * asked + at).to(tl.int64) * CHUNK
        target = slot * CHUNK + row
        k_at = k_ptr + head * k_h + target * k_s + column
        v_at = v_ptr + head * v_h + target * v_s + column
        if NEAR:
            if first < near_rows:
                source = near_ptr + first * 2 * heads * DIM
                _copy_chunk(k_at, v_at, source, heads, head, there, row, column, DIM)
            else:
                source = far_ptr + (first - near_rows) * 2 * heads * DIM
                _copy_chunk(k_at, v_at, source, heads, head, there, row, column, DIM)
        else:
            source = far_ptr + first * 2 * heads * DIM
            _copy_chunk(k_at, v_at, source, heads, head, there, row, column, DIM)
        at += FETCHERS


def fetch_chunks(
    k: Tensor, v: Tensor, near: Tensor, far: Tensor, moves: Tensor, counts: Tensor, chunk: int
) -> None:
    """See ``exchange.fetch_chunks``; ``far`` is page-locked host memory, which Triton takes as it is."""
    heads, _, dim = k.shape
    if k.stride(2) != 1 or v.stride(2) != 1:
        raise ValueError("the last dimension of k and v must be dense")
    if not (near.is_contiguous() and far.is_contiguous() and moves.is_contiguous()):
        raise ValueError("near, far and moves must be dense")
    if not far.numel():
        far = near
    _fetch_kernel[(heads, _FETCHERS)](
        k, v, near if near.numel() else k, far, moves, counts,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), heads, moves.shape[2], near.shape[0],
        NEAR=near.numel() > 0, CHUNK=chunk, BLOCK_C=triton.next_power_of_2(chunk),
        DIM=dim, BLOCK_D=triton.next_power_of_2(dim), FETCHERS=_FETCHERS,
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
    """See ``exchange.fetch_words``; ``source`` is page-locked host memory, which Triton takes as it is."""
    if target.dtype != torch.int32 or source.dtype != torch.int32 or target.shape != source.shape:
        raise ValueError("target and source must be int32 tensors of one size")
    if not (target.is_contiguous() and source.is_contiguous()):
        raise ValueError("target and source must be dense")
    count = target.numel()
    _words_kernel[(triton.cdiv(count, _WORDS),)](target, source, count, BLOCK=_WORDS)

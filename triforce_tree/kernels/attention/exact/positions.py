"""Near and far positions of queries, and the chunks of far ones, on the device; see ``far_kernel``."""

import triton
import triton.language as tl

DEPTH = tl.constexpr(64)
TILE = tl.constexpr(64)
NEAR = tl.constexpr(128)  # DEPTH + TILE positions at most
# Chunks of 512 positions up to the first bound, of 1,024 up to the second, then of 4,096: a short text is
# divided among many programs, and a long one has few partial results.
_FIRST, _SECOND = tl.constexpr(4096), tl.constexpr(16384)
_SHORT, _MIDDLE, _LONG = tl.constexpr(512), tl.constexpr(1024), tl.constexpr(4096)
_BEFORE_SECOND = tl.constexpr(8)
_BEFORE_THIRD = tl.constexpr(20)


@triton.jit
def near_start(position):
    """The first near position of a query; a multiple of TILE."""
    return tl.maximum(position - DEPTH, 0) // TILE * TILE


@triton.jit
def shared_start(length):
    """The first position of the last whole tile of committed ones, the first near one of most queries."""
    return length // TILE * TILE - TILE


@triton.jit
def chunk_start(chunk):
    """The first position of a chunk."""
    second = _FIRST + (chunk - _BEFORE_SECOND) * _MIDDLE
    third = _SECOND + (chunk - _BEFORE_THIRD) * _LONG
    return tl.where(chunk < _BEFORE_SECOND, chunk * _SHORT, tl.where(chunk < _BEFORE_THIRD, second, third))


@triton.jit
def chunk_of(position):
    """The chunk of a position."""
    second = _BEFORE_SECOND + (position - _FIRST) // _MIDDLE
    third = _BEFORE_THIRD + (position - _SECOND) // _LONG
    return tl.where(position < _FIRST, position // _SHORT, tl.where(position < _SECOND, second, third))


@triton.jit
def first_seen(position, window, CHUNKED: tl.constexpr):
    """The first position that a query sees within a window."""
    if CHUNKED:
        return position // window * window
    return tl.maximum(position - window + 1, 0)


@triton.jit(do_not_specialize=["tokens", "planned", "words"])
def near_slots_kernel(
    positions_ptr,  # int32 [B * T], written
    slots_ptr,  # int32 [B * T, NEAR], written: the slot of each near position
    lengths_ptr,  # int32 [B]
    mask_ptr,  # int64 [B, planned, words]
    tokens,
    planned,
    words,
    BLOCK: tl.constexpr,
):
    """Positions of all queries, and the slots of their near positions."""
    query = tl.program_id(0)
    sequence, token = query // tokens, query % tokens
    length = tl.load(lengths_ptr + sequence)
    slot = tl.arange(0, BLOCK)
    word_at = mask_ptr + (sequence * planned + token).to(tl.int64) * words + slot // 64
    word = tl.load(word_at, mask=slot < tokens, other=0)
    seen = ((word >> (slot % 64).to(tl.int64)) & 1).to(tl.int32)
    rank = tl.cumsum(seen, 0) - seen
    position = length + tl.sum(seen, 0) - 1
    start = near_start(position)
    near = start + tl.arange(0, NEAR)
    own = slots_ptr + query * NEAR
    tl.store(positions_ptr + query, position)
    tl.store(own + tl.arange(0, NEAR), near, mask=near < length)
    tl.store(own + length + rank - start, length + slot, mask=seen != 0)

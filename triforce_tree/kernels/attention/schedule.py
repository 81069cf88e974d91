"""The scheduler, on the device: which tiles a segment has, and which of them a slice takes.

Shared by the kernel that walks the tiles and the one that merges what it wrote.
"""

import triton
import triton.language as tl


@triton.jit
def spans(length, tail, low, high, BLOCK_N: tl.constexpr, EDGE: tl.constexpr, WINDOW: tl.constexpr):
    """Split a segment's rows: (first full row, full tiles, front, ragged and tail edge tiles, front
    row,
    ragged row). Without a window the first full row is 0 and there is no front."""
    full_end = length // BLOCK_N * BLOCK_N
    if WINDOW:
        front_row = tl.minimum(low // EDGE * EDGE, length)
        full_row = tl.minimum((high + BLOCK_N - 1) // BLOCK_N * BLOCK_N, full_end)
        front = tl.maximum(full_row - front_row, 0) // EDGE
        ragged_row = tl.maximum(front_row, full_end)
    else:
        front_row = length * 0
        full_row = length * 0
        front = length * 0
        ragged_row = full_end
    full = (full_end - full_row) // BLOCK_N
    ragged = (length - ragged_row + EDGE - 1) // EDGE
    edges = front + ragged + (tail + EDGE - 1) // EDGE
    # A unit with nothing to read still owns one edge tile, so that it writes its partial (0, -inf).
    edges = tl.where(full + edges > 0, edges, 1)
    return full_row, full, front, ragged, edges, front_row, ragged_row


@triton.jit
def cut_evenly(total, slices, KV_HEADS: tl.constexpr, ALIGN: tl.constexpr):
    """Cut the ``total`` tiles of one sequence: (groups, tiles and slices of a group, tiles of a
    slice, slices with one more).

    Where shares are small, a share that spans two heads costs more than an idle program does; then
    each head is a group of its own.
    """
    aligned = (total < ALIGN * slices) & (slices >= KV_HEADS)
    groups = tl.where(aligned, KV_HEADS, 1)
    size = total // groups
    cuts = tl.minimum(slices // groups, size)
    share = size // cuts
    return groups, size, cuts, share, size - share * cuts


@triton.jit
def share_of(part, total, slices, KV_HEADS: tl.constexpr, ALIGN: tl.constexpr):
    """Tiles [at, stop) of one slice. Where a group does not divide, its first slices take one more."""
    groups, size, cuts, share, spare = cut_evenly(total, slices, KV_HEADS, ALIGN)
    member = part // cuts
    place = part - member * cuts
    extra, more = tl.minimum(place, spare), place < spare
    at = member * size + place * share + extra
    stop = at + share + more.to(tl.int32)
    return at, tl.where(member < groups, stop, at)


@triton.jit
def slice_of(tile, share, spare):
    """The slice of an only group that holds a tile: ``share_of`` the other way round."""
    long = spare * (share + 1)
    return tl.where(tile < long, tile // (share + 1), spare + (tile - long) // tl.maximum(share, 1))

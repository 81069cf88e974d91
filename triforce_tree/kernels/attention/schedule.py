"""The scheduler, on the device: the tiles of a segment, and those of each slice.

Shared by the kernel that computes the tiles and the one that merges its partial results.
"""

import triton
import triton.language as tl


@triton.jit
def spans(length, tail, low, high, BLOCK_N: tl.constexpr, EDGE: tl.constexpr, WINDOW: tl.constexpr):
    """Split the KV positions of a segment into full tiles and edge tiles.

    Returns (start of the full tiles, number of full tiles, of front edge tiles, of ragged edge tiles, of all
    edge tiles, start of the front, start of the ragged end). Without a window full tiles start at 0 and there
    is no front.
    """
    full_end = length // BLOCK_N * BLOCK_N
    if WINDOW:
        front_start = tl.minimum(low // EDGE * EDGE, length)
        full_start = tl.minimum((high + BLOCK_N - 1) // BLOCK_N * BLOCK_N, full_end)
        front = tl.maximum(full_start - front_start, 0) // EDGE
        ragged_start = tl.maximum(front_start, full_end)
    else:
        front_start = length * 0
        full_start = length * 0
        front = length * 0
        ragged_start = full_end
    full = (full_end - full_start) // BLOCK_N
    ragged = (length - ragged_start + EDGE - 1) // EDGE
    edges = front + ragged + (tail + EDGE - 1) // EDGE
    # A unit without any KV still has one edge tile, so that it writes its partial result (0, -inf).
    edges = tl.where(full + edges > 0, edges, 1)
    return full_start, full, front, ragged, edges, front_start, ragged_start


@triton.jit
def cut_evenly(total, slices, KV_HEADS: tl.constexpr, ALIGN: tl.constexpr):
    """Cut the ``total`` tiles of one sequence: (groups, tiles and slices of a group, tiles of a slice, slices
    with one more).

    Where slices are short, one that spans two heads costs more than an idle program; then each head is a
    group of its own.
    """
    aligned = (total < ALIGN * slices) & (slices >= KV_HEADS)
    groups = tl.where(aligned, KV_HEADS, 1)
    size = total // groups
    cuts = tl.minimum(slices // groups, size)
    share = size // cuts
    return groups, size, cuts, share, size - share * cuts


@triton.jit
def share_of(part, total, slices, KV_HEADS: tl.constexpr, ALIGN: tl.constexpr):
    """Tiles [at, stop) of one slice. Where tiles do not divide evenly, the first slices take one more."""
    groups, size, cuts, share, spare = cut_evenly(total, slices, KV_HEADS, ALIGN)
    group = part // cuts
    group_slice = part - group * cuts
    extra, more = tl.minimum(group_slice, spare), group_slice < spare
    at = group * size + group_slice * share + extra
    stop = at + share + more.to(tl.int32)
    return at, tl.where(group < groups, stop, at)


@triton.jit
def slice_of(tile, share, spare):
    """The slice that holds a tile, where there is one group: the inverse of ``share_of``."""
    long = spare * (share + 1)
    return tl.where(tile < long, tile // (share + 1), spare + (tile - long) // tl.maximum(share, 1))

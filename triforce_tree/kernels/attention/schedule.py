"""Triton functions that divide the tiles of segments into slices, one for each program.

The kernel that computes the tiles and the kernel that merges its partial outputs call them.
"""

import triton
import triton.language as tl


@triton.jit
def spans(length, tail, low, high, BLOCK_N: tl.constexpr, EDGE: tl.constexpr, WINDOW: tl.constexpr):
    """Splits the KV positions of a segment into full tiles and edge tiles.

    Front edge tiles hold the start of a sliding window, ragged edge tiles the end of the unmasked positions.
    The tail has edge tiles too.

    Returns:
        first position of the full tiles; numbers of full tiles, front edge tiles, ragged edge tiles and all
        edge tiles; first position of the front edge tiles; first position of the ragged edge tiles. Without a
        window, full tiles start at 0 and there are no front edge tiles.
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
    # A unit without any KV position has one edge tile, so that it writes its partial output (0, -inf).
    edges = tl.where(full + edges > 0, edges, 1)
    return full_start, full, front, ragged, edges, front_start, ragged_start


@triton.jit
def cut_evenly(total, slices, KV_HEADS: tl.constexpr, ALIGN: tl.constexpr):
    """Divides ``total`` tiles into groups, and each group into slices.

    A short slice that spans two heads takes more time than an idle program costs. So with short slices each
    KV head is a group; otherwise all tiles are one group.

    Returns:
        number of groups, tiles of a group, slices of a group, tiles of a slice, and number of slices of a
        group that have one more tile.
    """
    aligned = (total < ALIGN * slices) & (slices >= KV_HEADS)
    groups = tl.where(aligned, KV_HEADS, 1)
    size = total // groups
    cuts = tl.maximum(tl.minimum(slices // groups, size), 1)
    share = size // cuts
    return groups, size, cuts, share, size - share * cuts


@triton.jit
def share_of(part, total, slices, KV_HEADS: tl.constexpr, ALIGN: tl.constexpr):
    """Returns the tiles [at, stop) of a slice; the first slices of a group may have one more tile."""
    groups, size, cuts, share, spare = cut_evenly(total, slices, KV_HEADS, ALIGN)
    group = part // cuts
    group_slice = part - group * cuts
    extra, more = tl.minimum(group_slice, spare), group_slice < spare
    at = group * size + group_slice * share + extra
    stop = at + share + more.to(tl.int32)
    return at, tl.where(group < groups, stop, at)


@triton.jit
def slice_of(tile, share, spare):
    """Returns the slice of a tile if there is one group; the inverse of ``share_of``."""
    long = spare * (share + 1)
    return tl.where(tile < long, tile // (share + 1), spare + (tile - long) // tl.maximum(share, 1))

"""What a program may ask into L2 while it waits for the kernel before its own: a prefetch reads nothing.

The kernels are programmatic dependent launches (Hopper), so their programs are set up, and get here,
while the last of that kernel's work still runs and memory has little to do.
"""

import triton
import triton.language as tl

from triforce_tree.kernels.schedule import share_of, spans


@triton.jit
def prefetch(pointer):
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // dummy $0", "=r,l", [pointer], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _fetch_rows(k_head, v_head, rows, last, stride_ks, stride_vs, BYTES: tl.constexpr):
    """K and V rows into L2, a row an instruction; they begin and end at multiples of 16 bytes."""
    rows = tl.maximum(tl.minimum(rows, last), 0).to(tl.int64)
    size = tl.zeros(rows.shape, tl.int32) + BYTES
    ask: tl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], $2; // dummy $0"
    k_rows, v_rows = k_head + rows * stride_ks, v_head + rows * stride_vs
    tl.inline_asm_elementwise(ask, "=r,l,r", [k_rows, size], tl.int32, is_pure=False, pack=1)
    tl.inline_asm_elementwise(ask, "=r,l,r", [v_rows, size], tl.int32, is_pure=False, pack=1)


@triton.jit
def fetch_ahead(
    k_ptr,
    v_ptr,
    lengths_ptr,
    segments_ptr,
    part,
    slices,
    capacity,
    stride_kh,
    stride_ks,
    stride_vh,
    stride_vs,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EDGE: tl.constexpr,
    ALIGN: tl.constexpr,
    LATE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Ask for this program's first tiles while the kernel before still runs.

    That kernel may change the length, so what is read here is a guess and is read again later; a
    wrong guess costs a little traffic and stays inside the storage.
    """
    length = tl.load(lengths_ptr, volatile=True)
    tail = tl.load(segments_ptr + 2, volatile=True)
    _, full, _, _, edges, _, ragged_row = spans(length, tail, 0, 0, BLOCK_N, EDGE, False)
    tiles = full + edges
    at, stop = share_of(part, tiles * KV_HEADS, slices, KV_HEADS, ALIGN, LATE)
    if at < stop:
        head = at // tiles
        begin = at - head * tiles
        end = tl.minimum(tiles, begin + stop - at)
        k_head = k_ptr + head.to(tl.int64) * stride_kh
        v_head = v_ptr + head.to(tl.int64) * stride_vh
        last = tl.minimum(length + tail, capacity) - 1
        rows = begin * BLOCK_N + tl.arange(0, AHEAD * BLOCK_N)
        stop_row = tl.minimum(end * BLOCK_N - 1, last)
        _fetch_rows(k_head, v_head, rows, stop_row, stride_ks, stride_vs, 2 * DIM)
        if end == tiles:
            edge_rows = ragged_row + tl.arange(0, 2 * EDGE)
            _fetch_rows(k_head, v_head, edge_rows, last, stride_ks, stride_vs, 2 * DIM)

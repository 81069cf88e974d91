"""Triton kernel of linear layers with few input rows, limited by reading the weights once.

A tile of the weight is the first operand of the product, so that its many rows fill the M dimension of the
tensor cores, and the few rows of x the N dimension. Packed weights (format: ``linear.reference``) are
unpacked to 16-bit values in registers. Scales multiply fp32 sums.

Several programs may share the input columns of a tile (split-K). Each writes its fp32 sums, and the last to
finish adds all of them in the order of columns, so results are deterministic.

Up to three weights that multiply the same x share one launch, in which their tiles are numbered
consecutively.
"""

import triton
import triton.language as tl

from triforce_tree.kernels.launching import wait_for_previous
from triforce_tree.kernels.linear.configs import SPLIT_WORDS
from triforce_tree.kernels.linear.unpack import four_planes, two_planes

_SPLIT_WORDS = tl.constexpr(SPLIT_WORDS)


@triton.jit
def _columns(
    x_ptr, x_view, column, stride, rows, ins, M: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr
):
    """Loads columns of x from ``column`` on, transposed to ``[WIDTH, M]``; zero out of bounds."""
    if TMA:
        return x_view.load([0, column]).T
    m, k = tl.arange(0, M), column + tl.arange(0, WIDTH)
    there = (m < rows)[:, None] & (k < ins)[None, :]
    return tl.load(x_ptr + m[:, None] * stride + k[None, :], mask=there, other=0.0).T


@triton.jit
def _scale(scales, P: tl.constexpr):
    """Returns the bf16 scale of plane P, one of four in an int64, as an fp32 column."""
    return ((scales >> (16 * P)).to(tl.int32) << 16).to(tl.float32, bitcast=True)[:, None]


@triton.jit
def _prefetch_rows(w_ptr, n, outs, stride, first, count, words):
    """Prefetches ``count`` words of each row of a tile into L2, from ``first`` on, or the last words."""
    count = tl.minimum(count, words)
    first = tl.minimum(first, words - count)
    rows = w_ptr + tl.minimum(n, outs - 1).to(tl.int64) * stride + first
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; // dummy $0", "=r,l,r", [rows, count * 2 + n * 0],
        tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _finish(out_ptr, bias_ptr, acc, m, n, outs, stride, there):
    """Adds the bias to the sums ``[N, M]`` and stores them as ``[M, N]``."""
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=n < outs, other=0.0).to(tl.float32)[:, None]
    tl.store(out_ptr + m[None, :] * stride + n[:, None], acc.to(out_ptr.dtype.element_ty), mask=there)


# Triton must not compile variants of the kernel for arguments that vary from call to call.
@triton.jit(do_not_specialize=["rows", "splits", "prefetch", "first_1", "first_2"])
def linear_kernel(
    out_ptr,  # [rows, outs], outputs of all weights, concatenated
    x_ptr,  # [rows, ins]
    x_view,  # descriptors of x and w when TMA, unused otherwise
    w_ptr,  # 16-bit [outs, words]
    w_view,
    scales_ptr,  # fp32 [outs] for 8 bits, int64 [blocks, outs] for 4
    bias_ptr,  # [outs]
    counters_ptr,  # int32 [tiles], zero before and after
    outs,
    w_ptr_1,  # second and third weight when FUSED, whose tiles begin at first_1 and first_2
    w_view_1,
    scales_ptr_1,
    bias_ptr_1,
    counters_ptr_1,
    outs_1,
    first_1,
    w_ptr_2,
    w_view_2,
    scales_ptr_2,
    bias_ptr_2,
    counters_ptr_2,
    outs_2,
    first_2,
    partial_ptr,  # fp32 [all tiles, splits, BLOCK_N, BLOCK_M]
    rows,
    ins,
    words,
    stride_out,
    stride_x,
    stride_w,
    splits,
    prefetch,  # words of each row of the weight to prefetch
    BITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
    FUSED: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    Kind: tl.constexpr = x_ptr.dtype.element_ty
    PLANES: tl.constexpr = 16 // BITS
    PARTS: tl.constexpr = 1 if BITS == 16 else 128 // WIDTH
    split = tl.program_id(0) % splits
    global_tile = tl.program_id(0) // splits
    tile = global_tile
    if FUSED:
        if global_tile >= first_1:
            tile = global_tile - first_1
            out_ptr += outs
            outs, w_ptr, w_view, counters_ptr = outs_1, w_ptr_1, w_view_1, counters_ptr_1
            if scales_ptr is not None:
                scales_ptr = scales_ptr_1
            if bias_ptr is not None:
                bias_ptr = bias_ptr_1
        if global_tile >= first_2:
            tile = global_tile - first_2
            out_ptr += outs
            outs, w_ptr, w_view, counters_ptr = outs_2, w_ptr_2, w_view_2, counters_ptr_2
            if scales_ptr is not None:
                scales_ptr = scales_ptr_2
            if bias_ptr is not None:
                bias_ptr = bias_ptr_2
    steps = tl.cdiv(words, WIDTH)
    # The bounds of a split do not depend on WIDTH, up to SPLIT_WORDS.
    EACH: tl.constexpr = 1 if WIDTH >= _SPLIT_WORDS else _SPLIT_WORDS // WIDTH
    units = tl.cdiv(steps, EACH)
    begin = split * units // splits * EACH
    end = tl.minimum((split + 1) * units // splits * EACH, steps)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    in_outs = n < outs
    w_rows = w_ptr + n.to(tl.int64)[:, None] * stride_w
    if BITS == 8:
        scale = tl.load(scales_ptr + n, mask=in_outs, other=0.0)[:, None]
    if BITS == 4:
        # Scales are loaded one step ahead, or each step would wait for its scales.
        next_scales = tl.load(scales_ptr + begin // PARTS * outs + n, mask=in_outs, other=0)
    if PDL:  # noqa: SIM102  a condition on a device value cannot be joined to one of the compiler
        # The previous kernel does not write weights, so their first tiles are prefetched while it ends.
        if prefetch > 0:
            _prefetch_rows(w_ptr, n, outs, stride_w, begin * WIDTH, prefetch, words)
    wait_for_previous(PDL)

    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    # Scales are applied in the loop even if they could be applied at its end. With a single accumulator for
    # products of unpacked operands, the assembler inserts a wait after each product.
    for step in tl.range(begin, end, num_stages=STAGES):
        if TMA:
            w = w_view.load([tile * BLOCK_N, step * WIDTH])
        else:
            k = step * WIDTH + tl.arange(0, WIDTH)
            w = tl.load(w_rows + k[None, :], mask=in_outs[:, None] & (k < words)[None, :], other=0)
        # A plane of a block has 128 columns, of which a step may cover a part.
        column = step // PARTS * (128 * PLANES) + step % PARTS * WIDTH
        if BITS == 16:
            x = _columns(x_ptr, x_view, step * WIDTH, stride_x, rows, ins, BLOCK_M, WIDTH, TMA)
            acc = tl.dot(w, x, acc)
        elif BITS == 8:
            a, b = two_planes(w, Kind, ASM)
            x = _columns(x_ptr, x_view, column, stride_x, rows, ins, BLOCK_M, WIDTH, TMA)
            acc += tl.dot(a, x) * scale
            x = _columns(x_ptr, x_view, column + 128, stride_x, rows, ins, BLOCK_M, WIDTH, TMA)
            acc += tl.dot(b, x) * scale
        else:
            scales = next_scales
            next_row = (step + 1) // PARTS * outs
            next_scales = tl.load(scales_ptr + next_row + n, mask=in_outs & (n * 0 + step + 1 < end), other=0)
            a, b, c, d = four_planes(w, Kind, ASM)
            x = _columns(x_ptr, x_view, column, stride_x, rows, ins, BLOCK_M, WIDTH, TMA)
            acc += tl.dot(a, x) * _scale(scales, 0)
            x = _columns(x_ptr, x_view, column + 128, stride_x, rows, ins, BLOCK_M, WIDTH, TMA)
            acc += tl.dot(b, x) * _scale(scales, 1)
            x = _columns(x_ptr, x_view, column + 256, stride_x, rows, ins, BLOCK_M, WIDTH, TMA)
            acc += tl.dot(c, x) * _scale(scales, 2)
            x = _columns(x_ptr, x_view, column + 384, stride_x, rows, ins, BLOCK_M, WIDTH, TMA)
            acc += tl.dot(d, x) * _scale(scales, 3)

    there = (m < rows)[None, :] & in_outs[:, None]
    if SPLIT:
        parts = partial_ptr + global_tile.to(tl.int64) * splits * (BLOCK_N * BLOCK_M)
        parts += (tl.arange(0, BLOCK_N) * BLOCK_M)[:, None] + m[None, :]
        tl.store(parts + split * (BLOCK_N * BLOCK_M), acc)
        # All threads must have written their sums before one thread increments the counter.
        tl.debug_barrier()
        done_before = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if done_before == splits - 1:
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for first in range(0, splits, 4):
                for part in tl.static_range(4):
                    each = parts + (first + part) * (BLOCK_N * BLOCK_M)
                    exists = (m * 0 + first + part < splits)[None, :]
                    total += tl.load(each, mask=exists, other=0.0, cache_modifier=".cg")
            tl.store(counters_ptr + tile, 0)
            _finish(out_ptr, bias_ptr, total, m, n, outs, stride_out, there)
    else:
        _finish(out_ptr, bias_ptr, acc, m, n, outs, stride_out, there)

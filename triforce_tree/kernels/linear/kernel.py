"""Triton kernel: linear layers of few rows, whose time is that of reading the weights once.

A tile of the weight is the first operand of the product, so that tensor cores take its many rows as theirs
and x as the few columns. Packed weights (``linear_reference`` says how) become 16-bit values in the
registers that feed the tensor cores. Scales multiply fp32 sums.

Several programs may share a tile's input columns. Each writes its fp32 sums; the last to arrive adds all of
them in order of the columns, so results repeat bit by bit.

Up to three weights that multiply the same x fit into one launch: their tiles are counted through.
"""

import triton
import triton.language as tl

from triforce_tree.kernels.linear.unpack import four_planes, two_planes


@triton.jit
def _columns(
    x_ptr, x_view, column, stride, rows, ins, M: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr
):
    """x transposed, ``[WIDTH, M]`` from ``column`` on; zero outside."""
    if TMA:
        return x_view.load([0, column]).T
    m, k = tl.arange(0, M), column + tl.arange(0, WIDTH)
    there = (m < rows)[:, None] & (k < ins)[None, :]
    return tl.load(x_ptr + m[:, None] * stride + k[None, :], mask=there, other=0.0).T


@triton.jit
def _scale(four, P: tl.constexpr):
    """Plane P's bf16 out of the four in an int64, as a column of fp32."""
    return ((four >> (16 * P)).to(tl.int32) << 16).to(tl.float32, bitcast=True)[:, None]


@triton.jit
def _send_for(w_ptr, n, outs, stride, first, count, words):
    """Bring ``count`` words from ``first`` on, or as many of the last, of each row of a tile into L2."""
    count = tl.minimum(count, words)
    first = tl.minimum(first, words - count)
    rows = w_ptr + tl.minimum(n, outs - 1).to(tl.int64) * stride + first
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; // dummy $0", "=r,l,r", [rows, count * 2 + n * 0],
        tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _finish(out_ptr, bias_ptr, acc, m, n, outs, stride, there):
    """Sums ``[N, M]`` to results ``[M, N]``."""
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=n < outs, other=0.0).to(tl.float32)[:, None]
    tl.store(out_ptr + m[None, :] * stride + n[:, None], acc.to(out_ptr.dtype.element_ty), mask=there)


# What varies from call to call must not make variants of the kernel.
@triton.jit(do_not_specialize=["rows", "splits", "prefetch", "first_1", "first_2"])
def linear_kernel(
    out_ptr,  # [rows, outs], or the outputs of all weights side by side
    x_ptr,  # [rows, ins]
    x_view,  # descriptors of x and w when TMA, unused otherwise
    w_ptr,  # 16-bit [outs, words]
    w_view,
    scales_ptr,  # fp32 [outs] for 8 bits, int64 [blocks, outs] for 4
    bias_ptr,  # [outs]
    counters_ptr,  # int32 [tiles], zero before and after
    outs,
    w_ptr_1,  # a second and a third weight, from these tiles on, when FUSED
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
    prefetch,  # first words of each row of the weight to send for early
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
    place = tl.program_id(0) // splits
    tile = place
    if FUSED:
        if place >= first_1:
            tile = place - first_1
            out_ptr += outs
            outs, w_ptr, w_view, counters_ptr = outs_1, w_ptr_1, w_view_1, counters_ptr_1
            if scales_ptr is not None:
                scales_ptr = scales_ptr_1
            if bias_ptr is not None:
                bias_ptr = bias_ptr_1
        if place >= first_2:
            tile = place - first_2
            out_ptr += outs
            outs, w_ptr, w_view, counters_ptr = outs_2, w_ptr_2, w_view_2, counters_ptr_2
            if scales_ptr is not None:
                scales_ptr = scales_ptr_2
            if bias_ptr is not None:
                bias_ptr = bias_ptr_2
    steps = tl.cdiv(words, WIDTH)
    begin = split * steps // splits
    end = (split + 1) * steps // splits
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    real = n < outs
    w_rows = w_ptr + n.to(tl.int64)[:, None] * stride_w
    if BITS == 8:
        scale = tl.load(scales_ptr + n, mask=real, other=0.0)[:, None]
    if BITS == 4:
        # A step ahead, or each step would wait for its scales.
        coming = tl.load(scales_ptr + begin // PARTS * outs + n, mask=real, other=0)
    if PDL:
        # Weights do not depend on the kernel before: their first tiles come while it ends.
        if prefetch > 0:
            _send_for(w_ptr, n, outs, stride_w, begin * WIDTH, prefetch, words)
        # In this order: a kernel behind may then take everything older than this one as written.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    # Scaled in the loop also where that could wait: products that chain one accumulator through packed
    # operands make the assembler wait for each of them.
    for step in tl.range(begin, end, num_stages=STAGES):
        if TMA:
            w = w_view.load([tile * BLOCK_N, step * WIDTH])
        else:
            k = step * WIDTH + tl.arange(0, WIDTH)
            w = tl.load(w_rows + k[None, :], mask=real[:, None] & (k < words)[None, :], other=0)
        # Planes of a block are 128 columns each, of which a step may take a part.
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
            four = coming
            after = (step + 1) // PARTS * outs
            coming = tl.load(scales_ptr + after + n, mask=real & (n * 0 + step + 1 < end), other=0)
            a, b, c, d = four_planes(w, Kind, ASM)
            x = _columns(x_ptr, x_view, column, stride_x, rows, ins, BLOCK_M, WIDTH, TMA)
            acc += tl.dot(a, x) * _scale(four, 0)
            x = _columns(x_ptr, x_view, column + 128, stride_x, rows, ins, BLOCK_M, WIDTH, TMA)
            acc += tl.dot(b, x) * _scale(four, 1)
            x = _columns(x_ptr, x_view, column + 256, stride_x, rows, ins, BLOCK_M, WIDTH, TMA)
            acc += tl.dot(c, x) * _scale(four, 2)
            x = _columns(x_ptr, x_view, column + 384, stride_x, rows, ins, BLOCK_M, WIDTH, TMA)
            acc += tl.dot(d, x) * _scale(four, 3)

    there = (m < rows)[None, :] & real[:, None]
    if SPLIT:
        parts = partial_ptr + place.to(tl.int64) * splits * (BLOCK_N * BLOCK_M)
        parts += (tl.arange(0, BLOCK_N) * BLOCK_M)[:, None] + m[None, :]
        tl.store(parts + split * (BLOCK_N * BLOCK_M), acc)
        # All threads have written before one of them says so.
        tl.debug_barrier()
        arrived = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == splits - 1:
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for first in range(0, splits, 4):
                for part in tl.static_range(4):
                    each = parts + (first + part) * (BLOCK_N * BLOCK_M)
                    there_is = (m * 0 + first + part < splits)[None, :]
                    total += tl.load(each, mask=there_is, other=0.0, cache_modifier=".cg")
            tl.store(counters_ptr + tile, 0)
            _finish(out_ptr, bias_ptr, total, m, n, outs, stride_out, there)
    else:
        _finish(out_ptr, bias_ptr, acc, m, n, outs, stride_out, there)

"""Triton kernel: linear layers of few rows, whose time is that of reading the weight once.

A tile of the weight is the first operand of the product, so that tensor cores take its many rows as theirs
and x as the few columns. Packed weights (``linear_reference`` says how) become 16-bit values in the
registers that feed the tensor cores. Scales multiply fp32 sums.

Several programs may share a tile's input columns. Each writes its fp32 sums; the last to arrive adds all of
them in order of the columns, so results repeat bit by bit.
"""

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from triforce_tree.kernels.linear_configs import LEAST_BLOCK, LinearConfig, choose, row_block
from triforce_tree.kernels.unpack import four_planes, two_planes


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
def _finish(out_ptr, bias_ptr, acc, m, n, outs, there):
    """Sums ``[N, M]`` to results ``[M, N]``."""
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=n < outs, other=0.0).to(tl.float32)[:, None]
    tl.store(out_ptr + m[None, :] * outs + n[:, None], acc.to(out_ptr.dtype.element_ty), mask=there)


# What varies from call to call must not make variants of the kernel.
@triton.jit(do_not_specialize=["rows", "splits", "prefetch"])
def linear_kernel(
    out_ptr,  # [rows, outs]
    x_ptr,  # [rows, ins]
    x_view,  # descriptors of x and w when TMA, unused otherwise
    w_ptr,  # 16-bit [outs, words]
    w_view,
    scales_ptr,  # fp32 [outs] for 8 bits, int64 [blocks, outs] for 4
    bias_ptr,  # [outs]
    partial_ptr,  # fp32 [tiles, splits, BLOCK_N, BLOCK_M]
    counters_ptr,  # int32 [tiles], zero before and after
    rows,
    outs,
    ins,
    words,
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
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    Kind: tl.constexpr = x_ptr.dtype.element_ty
    PLANES: tl.constexpr = 16 // BITS
    PARTS: tl.constexpr = 1 if BITS == 16 else 128 // WIDTH
    tile = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    steps = tl.cdiv(words, WIDTH)
    begin = split * steps // splits
    end = (split + 1) * steps // splits
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    real = n < outs
    if PDL:
        # Weights do not depend on the kernel before: their first tiles come while it ends.
        if prefetch > 0:
            _send_for(w_ptr, n, outs, stride_w, begin * WIDTH, prefetch, words)
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    w_rows = w_ptr + n.to(tl.int64)[:, None] * stride_w
    # Scaled in the loop also where that could wait: products that chain one accumulator through packed
    # operands make the assembler wait for each of them.
    if BITS == 8:
        scale = tl.load(scales_ptr + n, mask=real, other=0.0)[:, None]
    if BITS == 4:
        # A step ahead, or each step would wait for its scales.
        coming = tl.load(scales_ptr + begin // PARTS * outs + n, mask=real, other=0)
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
            coming = tl.load(scales_ptr + after + n, mask=real & (step + 1 < end), other=0)
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
        place = partial_ptr + tile.to(tl.int64) * splits * (BLOCK_N * BLOCK_M)
        place += (tl.arange(0, BLOCK_N) * BLOCK_M)[:, None] + m[None, :]
        tl.store(place + split * (BLOCK_N * BLOCK_M), acc)
        # All threads have written before one of them says so.
        tl.debug_barrier()
        arrived = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == splits - 1:
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for first in range(0, splits, 4):
                for part in tl.static_range(4):
                    each = place + (first + part) * (BLOCK_N * BLOCK_M)
                    total += tl.load(each, mask=first + part < splits, other=0.0, cache_modifier=".cg")
            tl.store(counters_ptr + tile, 0)
            _finish(out_ptr, bias_ptr, total, m, n, outs, there)
    else:
        _finish(out_ptr, bias_ptr, acc, m, n, outs, there)


def counters_for(outs: int, device: torch.device | str | None = None) -> Tensor:
    """Zeros that a weight of ``outs`` rows needs; its calls must follow one another on one stream."""
    return torch.zeros(triton.cdiv(outs, LEAST_BLOCK), dtype=torch.int32, device=device)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, counters: Tensor, config: LinearConfig | None = None
) -> Tensor:
    """See ``linear_reference.linear``; x and weight bf16 or fp16, 1 to ``MOST_ROWS`` rows.

    Args:
        counters: from ``counters_for``.
        config: None for the table's choice.
    """
    return _linear(x, weight, None, bias, counters, 16, _plain(config))


def low_bit_linear(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    bits: int,
    counters: Tensor,
    config: LinearConfig | None = None,
) -> Tensor:
    """See ``linear_reference.low_bit_linear``; x bf16 or fp16, 1 to ``MOST_ROWS`` rows."""
    return _linear(x, words, scales, bias, counters, bits, _plain(config))


def _plain(config: LinearConfig | None) -> list[int]:
    return [] if config is None else list(astuple(config))


@torch.library.custom_op("triforce_tree::few_row_linear", mutates_args=("counters",))
def _linear(
    x: Tensor,
    words: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    counters: Tensor,
    bits: int,
    config: Sequence[int],
) -> Tensor:
    outs, length = words.shape
    ins = x.shape[-1]
    flat = x.reshape(-1, ins)
    rows = flat.shape[0]
    cfg = LinearConfig(*cast(Any, config)) if config else choose(bits, rows, outs, ins)
    _check(flat, words, scales, counters, bits)
    block_m = row_block(rows)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    hopper = x.is_cuda and torch.cuda.get_device_capability(x.device)[0] >= 9
    tma = cfg.tma and (hopper or not x.is_cuda) and all(_has_view(t) for t in (flat, words))
    tiles = triton.cdiv(outs, cfg.block_n)
    out = torch.empty(rows, outs, dtype=x.dtype, device=x.device)
    partial = counters
    if cfg.splits > 1:
        size = tiles * cfg.splits * cfg.block_n * block_m
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
    interpreted = knobs.runtime.interpret
    options: dict[str, Any] = {"num_warps": cfg.warps}
    if hopper:
        options["launch_pdl"] = True
    aligned = words.data_ptr() % 16 == 0 and words.stride(0) % 8 == 0
    linear_kernel[(tiles * cfg.splits,)](
        out,
        flat, _view(flat, block_m, cfg.width) if tma else flat,
        words, _view(words, cfg.block_n, cfg.width) if tma else words,
        scales.view(torch.int64) if scales is not None and bits == 4 else scales,
        bias, partial, counters,
        rows, outs, ins, length, flat.stride(0), words.stride(0),
        cfg.splits, cfg.prefetch * cfg.width if aligned else 0,
        BITS=bits, BLOCK_M=block_m, BLOCK_N=cfg.block_n, WIDTH=cfg.width, SPLIT=cfg.splits > 1,
        STAGES=cfg.stages, TMA=tma, ASM=not interpreted, PDL=hopper,
        **({} if interpreted else options),
    )  # fmt: skip
    return out.view(*x.shape[:-1], outs)


@_linear.register_fake
def _(x: Tensor, words: Tensor, *args: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], words.shape[0])


def _check(x: Tensor, words: Tensor, scales: Tensor | None, counters: Tensor, bits: int) -> None:
    outs, length = words.shape
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"x is {x.dtype}; the kernel takes bf16 and fp16")
    if bits == 16 and (words.dtype != x.dtype or length != x.shape[1]):
        raise ValueError(f"weight is {words.dtype} [{outs}, {length}]; x is {x.dtype} [..., {x.shape[1]}]")
    if bits < 16 and (words.dtype != torch.int16 or scales is None or length * 16 < x.shape[1] * bits):
        raise ValueError(f"words {words.dtype} [{outs}, {length}] do not hold {x.shape[1]} columns")
    if words.stride(1) != 1:
        raise ValueError("the last dimension of the weight must be dense; call .contiguous() on it")
    if counters.numel() * LEAST_BLOCK < outs:
        raise ValueError(f"{counters.numel()} counters are too few for {outs} outputs; use counters_for")


def _has_view(matrix: Tensor) -> bool:
    """The bulk copy engine wants rows that begin at multiples of 16 bytes."""
    return matrix.data_ptr() % 16 == 0 and matrix.stride(0) % 8 == 0


def _view(matrix: Tensor, block_rows: int, block_columns: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], [block_rows, block_columns])

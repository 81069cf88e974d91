"""Triton kernel of linear layers of one input row in 16 bits, without tensor cores.

A program multiplies a few rows of the weight by x. So no sums are merged, and programs are so small that an
incomplete last wave takes little time. The first tile of the weight is loaded before the wait for the
previous kernel, which does not write weights: weights that are copied to the device arrive by copies for
which the stream has waited. Up to three weights of the same x share one launch, as in ``kernel``.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from triforce_tree.kernels.launching import launched_early, wait_for_previous, warps
from triforce_tree.kernels.linear.configs import MOST_FUSED, OneRowConfig


@triton.jit
def _tile(w_ptr, n, k, outs, ins, stride, EVEN: tl.constexpr):
    """Loads columns k of rows n of the weight; zero out of bounds."""
    at = w_ptr + n.to(tl.int64)[:, None] * stride + k[None, :]
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=(n < outs)[:, None] & (k < ins)[None, :], other=0.0)


@triton.jit
def _part(x_ptr, k, ins, EVEN: tl.constexpr):
    """Loads columns k of x as an fp32 row."""
    if EVEN:
        return tl.load(x_ptr + k).to(tl.float32)[None, :]
    return tl.load(x_ptr + k, mask=k < ins, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["first_1", "first_2"])
def one_row_kernel(
    out_ptr,  # [outs], outputs of all weights, concatenated
    x_ptr,  # [ins]
    w_ptr,  # [outs, ins]
    bias_ptr,  # [outs], or None
    outs,
    w_ptr_1,  # second and third weight when FUSED, whose programs begin at first_1 and first_2
    bias_ptr_1,
    outs_1,
    first_1,
    w_ptr_2,
    bias_ptr_2,
    outs_2,
    first_2,
    ins,
    stride_w,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    FUSED: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    block = program
    if FUSED:
        if program >= first_1:
            block = program - first_1
            out_ptr += outs
            outs, w_ptr = outs_1, w_ptr_1
            if bias_ptr is not None:
                bias_ptr = bias_ptr_1
        if program >= first_2:
            block = program - first_2
            out_ptr += outs
            outs, w_ptr = outs_2, w_ptr_2
            if bias_ptr is not None:
                bias_ptr = bias_ptr_2
    n, k = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, WIDTH)
    first = _tile(w_ptr, n, k, outs, ins, stride_w, EVEN)
    wait_for_previous(PDL)
    sums = first.to(tl.float32) * _part(x_ptr, k, ins, EVEN)
    for start in tl.range(WIDTH, ins, WIDTH, num_stages=STAGES):
        w = _tile(w_ptr, n, start + k, outs, ins, stride_w, EVEN)
        sums += w.to(tl.float32) * _part(x_ptr, start + k, ins, EVEN)
    total = tl.sum(sums, 1)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + n, mask=n < outs, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, total.to(out_ptr.dtype.element_ty), mask=n < outs)


def multiply_row(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], config: OneRowConfig
) -> Tensor:
    """Computes up to ``MOST_FUSED`` layers of one dense row ``[ins]``.

    Args:
        weights: ``[outs, ins]`` each, with equal strides, of which the last is 1.
        biases: ``[outs]`` each, or None for all layers.

    Returns:
        the outputs of all layers, concatenated to ``[sum of outs]``.
    """
    ins, outs = x.shape[0], [w.shape[0] for w in weights]
    out = torch.empty(sum(outs), dtype=x.dtype, device=x.device)
    programs = [triton.cdiv(count, config.block_n) for count in outs]
    sets = list(zip(weights, biases, outs, strict=True))
    # Unused arguments repeat the last weight, which no program computes twice.
    sets += sets[-1:] * (MOST_FUSED - len(sets))
    even = ins % config.width == 0 and all(count % config.block_n == 0 for count in outs)
    one_row_kernel[(sum(programs),)](
        out, x, *sets[0], *sets[1], programs[0], *sets[2], sum(programs[:2]), ins, weights[0].stride(0),
        BLOCK_N=config.block_n, WIDTH=config.width, STAGES=config.stages, EVEN=even,
        FUSED=len(weights) > 1, **launched_early(x.device), **warps(config.warps),
    )  # fmt: skip
    return out

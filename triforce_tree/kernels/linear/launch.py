"""Operators of linear layers with few input rows, which launch the Triton kernels."""

from collections.abc import Sequence
from typing import Any, cast

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from triforce_tree.kernels.device import Device, describe
from triforce_tree.kernels.fitting import fitted, within
from triforce_tree.kernels.launching import launched_early, matrix, warps
from triforce_tree.kernels.linear.configs import (
    LEAST_BLOCK,
    MOST_FUSED,
    LinearConfig,
    choose,
    choose_exact,
    choose_one_row,
    most_exact_rows,
    row_block,
    smaller,
)
from triforce_tree.kernels.linear.kernel import linear_kernel
from triforce_tree.kernels.linear.one_row import multiply_row
from triforce_tree.kernels.operators import fake, numbers, operator

# It replaces the numbers of a configuration and selects ``choose_exact``.
_EXACT = [0]


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, counters: Tensor, config: LinearConfig | None = None
) -> Tensor:
    """Computes ``linear.reference.linear`` for bf16 or fp16 and 1 to ``MOST_ROWS`` rows.

    Args:
        counters: result of ``configs.counters_for``.
        config: tile shapes; None takes them from the table.
    """
    return _linear(x, weight, None, bias, counters, 16, _config_numbers(config))


def pinned_linear(x: Tensor, weight: Tensor, bias: Tensor | None, counters: Tensor) -> Tensor:
    """Computes :func:`linear` with one order of sums for any number of rows.

    The bits of a row do not depend on the number of rows; see ``configs.choose_exact``.
    """
    return _linear(x, weight, None, bias, counters, 16, _EXACT)


def pinned_linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], counters: Sequence[Tensor]
) -> Tensor:
    """Computes :func:`linears` of 16 bits with one order of sums, as :func:`pinned_linear` does."""
    return _linears(x, weights, [], biases, counters, 16, _EXACT)


def low_bit_linear(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    bits: int,
    counters: Tensor,
    config: LinearConfig | None = None,
) -> Tensor:
    """Computes ``linear.reference.low_bit_linear`` for x in bf16 or fp16 and 1 to ``MOST_ROWS`` rows."""
    return _linear(x, words, scales, bias, counters, bits, _config_numbers(config))


def _config_numbers(config: LinearConfig | None) -> list[int]:
    return [] if config is None else numbers(config)


def linears(
    x: Tensor,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor],
    biases: Sequence[Tensor],
    counters: Sequence[Tensor],
    bits: int,
) -> Tensor:
    """Computes up to ``MOST_FUSED`` layers of the same x in one launch.

    Args:
        weights, counters: weight and counters of each layer.
        scales: scales of each packed weight; empty for 16 bits.
        biases: bias of each layer, or empty.
        bits: 16, 8 or 4.

    Returns:
        the outputs of all layers, concatenated to ``[..., sum of outs]``.
    """
    return _linears(x, weights, scales, biases, counters, bits, [])


@operator("few_row_linear", writes=("counters",))
def _linear(
    x: Tensor,
    words: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    counters: Tensor,
    bits: int,
    config: Sequence[int],
) -> Tensor:
    return _launch(x, [words], [scales], [bias], [counters], bits, config)


@fake("few_row_linear")
def _(x: Tensor, words: Tensor, *args: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], words.shape[0])


@operator("few_row_linears", writes=("counters",))
def _linears(
    x: Tensor,
    words: Sequence[Tensor],
    scales: Sequence[Tensor],
    biases: Sequence[Tensor],
    counters: Sequence[Tensor],
    bits: int,
    config: Sequence[int],
) -> Tensor:
    if not 0 < len(words) <= MOST_FUSED:
        raise ValueError(f"{len(words)} weights; a launch takes 1 to {MOST_FUSED}")
    if any(w.stride() != words[0].stride() or w.shape[1] != words[0].shape[1] for w in words):
        raise ValueError("the weights of a launch must have equal input columns and strides")
    none_each = [None] * len(words)
    if not describe(x.device).ptx and len(words) > 1 and not knobs.runtime.interpret:
        # AMD's compiler does not support pointers that a kernel selects at run time.
        each = zip(words, scales or none_each, biases or none_each, counters, strict=True)
        return torch.cat([_launch(x, [w], [s], [b], [c], bits, config) for w, s, b, c in each], -1)
    return _launch(x, words, scales or none_each, biases or none_each, counters, bits, config)


@fake("few_row_linears")
def _(x: Tensor, words: Sequence[Tensor], *args: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], sum(w.shape[0] for w in words))


def _launch(
    x: Tensor,
    words: Sequence[Tensor],
    scales: Sequence[Tensor | None],
    biases: Sequence[Tensor | None],
    counters: Sequence[Tensor],
    bits: int,
    config: Sequence[int],
) -> Tensor:
    ins, outs = x.shape[-1], [w.shape[0] for w in words]
    flat = matrix(x)
    rows = flat.shape[0]
    device = describe(x.device)
    if list(config) == _EXACT:
        if rows > (most := most_exact_rows(device)):
            parts = [
                _launch(part, words, scales, biases, counters, bits, config) for part in flat.split(most)
            ]
            return torch.cat(parts).view(*x.shape[:-1], sum(outs))
        cfg, block_m = choose_exact(rows, sum(outs), ins, device)
    else:
        block_m = row_block(rows)
        cfg = LinearConfig(*cast(Any, config)) if config else choose(bits, rows, sum(outs), ins, device)
    for each in zip(words, scales, counters, strict=True):
        _check(flat, *each, bits)
    if rows == 1 and bits == 16 and not config:
        one_row = choose_one_row(sum(outs), ins, device)
        if one_row is not None:
            return multiply_row(flat[0], words, biases, one_row).view(*x.shape[:-1], sum(outs))
    out = torch.empty(rows, sum(outs), dtype=x.dtype, device=x.device)
    viewable = device.tma and all(_has_view(t) for t in (flat, *words))
    aligned = all(w.data_ptr() % 16 == 0 for w in words) and words[0].stride(0) % 8 == 0
    early = launched_early(x.device)

    def multiply(cfg: LinearConfig) -> None:
        tma = cfg.tma and viewable
        tiles = [triton.cdiv(count, cfg.block_n) for count in outs]
        partial = counters[0]
        if cfg.splits > 1:
            size = sum(tiles) * cfg.splits * cfg.block_n * block_m
            partial = torch.empty(size, dtype=torch.float32, device=x.device)
        sets = [
            (
                w,
                _view(w, cfg.block_n, cfg.width) if tma else w,
                _packed_scales(s, bits),
                bias,
                count,
                w.shape[0],
            )
            for w, s, bias, count in zip(words, scales, biases, counters, strict=True)
        ]
        # Unused arguments repeat the last weight, whose tiles no program computes twice.
        sets += sets[-1:] * (MOST_FUSED - len(sets))
        made = linear_kernel[(sum(tiles) * cfg.splits,)](
            out,
            flat, _view(flat, block_m, cfg.width) if tma else flat,
            *sets[0], *sets[1], tiles[0], *sets[2], sum(tiles[:2]),
            partial,
            rows, ins, words[0].shape[1], sum(outs), flat.stride(0), words[0].stride(0),
            cfg.splits, cfg.prefetch * cfg.width if aligned and device.bulk_prefetch else 0,
            BITS=bits, BLOCK_M=block_m, BLOCK_N=cfg.block_n, WIDTH=cfg.width, SPLIT=cfg.splits > 1,
            STAGES=cfg.stages, TMA=tma, FUSED=len(words) > 1, ASM=_unpacking(device),
            **early, **warps(cfg.warps),
        )  # fmt: skip
        within(made, device)

    fitted(cfg, smaller, multiply)
    return out.view(*x.shape[:-1], sum(outs))


def _unpacking(device: Device) -> str:
    """Returns the instructions that ``unpack`` uses, its argument ``ASM``."""
    if not device.ptx:
        return "none"
    return "sub" if device.bf16_sub else "fma"


def _packed_scales(scales: Tensor | None, bits: int) -> Tensor | None:
    """Returns scales for the kernel; with 4 bits, four bf16 scales of a row and block become one int64."""
    return scales.view(torch.int64) if scales is not None and bits == 4 else scales


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
    """Returns whether the bulk copy engine can read the matrix, whose rows must be aligned to 16 bytes."""
    return matrix.data_ptr() % 16 == 0 and matrix.stride(0) % 8 == 0


def _view(matrix: Tensor, block_rows: int, block_columns: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], [block_rows, block_columns])

"""Defines linear layers with few input rows in plain torch, and the format of packed weights.

A packed weight is int16 words ``[N, 128 * blocks]``. A word holds ``planes = 16 / bits`` codes, and a block
of 128 words covers ``128 * planes`` input columns. Column ``128 * p + j`` of a block is plane p of word j,
from bit ``bits * p`` up. So a plane of a block is a contiguous range of columns. With 4 bits it is a group
with its own scale.

A weight is code times scale, without a zero point. The code is exact in bf16, and the scale multiplies the
fp32 sum.
"""

import torch
from torch import Tensor

GROUP = 128
"""Number of input columns of one plane of one block, and of one 4-bit scale."""

# Clipping ratios to try for each group of 4-bit codes. Clipping the extreme value gives the others finer
# steps.
_CLIP_RATIOS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
# Elements that are quantised together: on a GPU the host takes longer to launch smaller parts.
_TOGETHER = 1 << 24


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns ``x [..., K]`` times ``weight [N, K]`` transposed, plus ``bias [N]``."""
    return torch.nn.functional.linear(x, weight, bias)


def low_bit_linear(x: Tensor, words: Tensor, scales: Tensor, bias: Tensor | None, bits: int) -> Tensor:
    """Computes ``linear`` with a packed weight, multiplied in fp32.

    Args:
        x: ``[..., K]``.
        words: int16 ``[N, 128 * blocks]``.
        scales: result of ``quantise``.
        bias: ``[N]`` or None.
        bits: 8 or 4.

    Returns:
        ``[..., N]`` in x's dtype.
    """
    weight = dequantise(words, scales, bits, x.shape[-1])
    return torch.nn.functional.linear(x.float(), weight, None if bias is None else bias.float()).to(x.dtype)


def blocks_of(ins: int, bits: int) -> int:
    """Returns the number of blocks for ``ins`` input columns; the last block is padded with zeros."""
    return -(-ins // (GROUP * _planes(bits)))


def quantise(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantises ``[N, K]`` to 8 bits with a scale per row, or to 4 bits with a scale per row and 128 columns.

    Returns:
        int16 words ``[N, 128 * blocks]``, and scales: fp32 ``[N]`` for 8 bits, bf16 ``[blocks, N, 4]`` for 4
        bits (one scale for each plane of a block).
    """
    rows = max(1, _TOGETHER // weight.shape[1])
    parts = [_quantise_rows(part.float(), bits) for part in weight.detach().split(rows)]
    words = torch.cat([words for words, _ in parts])
    if bits == 8:
        return words, torch.cat([scales for _, scales in parts])
    return words, torch.cat([scales for _, scales in parts], 1).contiguous()


def dequantise(
    words: Tensor, scales: Tensor, bits: int, ins: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Returns the weight ``[N, ins]`` of packed words."""
    outs, planes = words.shape[0], _planes(bits)
    shifts = torch.arange(0, 16, bits, device=words.device, dtype=torch.int32)[:, None]
    blocks = words.view(outs, -1, 1, GROUP).to(torch.int32)
    codes = (blocks >> shifts) & (2**bits - 1)
    if bits == 8:
        weight = ((codes ^ 128) - 128) * scales[:, None, None, None]
    else:
        weight = (codes - 8) * scales.transpose(0, 1)[..., None].float()
    return weight.reshape(outs, words.shape[1] * planes)[:, :ins].to(dtype)


def _planes(bits: int) -> int:
    if bits not in (4, 8):
        raise ValueError(f"bits={bits} is not a packed format; use 8 or 4")
    return 16 // bits


def _quantise_rows(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantises fp32 rows ``[n, K]`` to words and scales."""
    outs, ins = weight.shape
    blocks, planes = blocks_of(ins, bits), _planes(bits)
    padded = torch.nn.functional.pad(weight, (0, blocks * planes * GROUP - ins))
    if bits == 8:
        scales = (weight.abs().amax(1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
        codes = (padded / scales[:, None]).round_().clamp_(-127, 127).to(torch.int32) & 255
    else:
        groups = padded.view(outs, -1, GROUP)
        steps = _best_steps(groups)
        codes = ((groups / steps[..., None]).round_().clamp_(-8, 7) + 8).to(torch.int32)
        scales = steps.to(torch.bfloat16).view(outs, blocks, planes).transpose(0, 1)
    shifts = torch.arange(0, 16, bits, device=weight.device, dtype=torch.int32)[:, None]
    words = (codes.view(outs, blocks, planes, GROUP) << shifts).sum(2, dtype=torch.int32)
    return words.to(torch.int16).view(outs, blocks * GROUP), scales


def _best_steps(groups: Tensor) -> Tensor:
    """Returns the step of least squared error for each group of ``[n, G, 128]``; bf16 in fp32 ``[n, G]``.

    A step is negative if the extreme value of the group is positive, because codes range from -8 to 7.
    """
    extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    tiny = torch.finfo(torch.bfloat16).tiny
    best = torch.full_like(extreme, torch.inf)
    steps = torch.ones_like(extreme)
    for ratio in _CLIP_RATIOS:
        step = (extreme * (ratio / -8)).to(torch.bfloat16).float()
        step = torch.where(step.abs() < tiny, tiny, step)
        error = ((groups / step).round_().clamp_(-8, 7) * step - groups).square_().sum(2, keepdim=True)
        better = error < best
        best, steps = torch.where(better, error, best), torch.where(better, step, steps)
    return steps[..., 0]

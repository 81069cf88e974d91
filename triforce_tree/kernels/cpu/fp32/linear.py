"""Products of few fp32 rows with weight matrices, which read each weight from memory once.

The result of a row does not depend on the other rows, bit for bit.
"""

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from triforce_tree.kernels.cpu.fp32.library import usable

MOST_ROWS = 48
"""Largest number of rows for which these products are faster than torch and oneDNN (AVX-512)."""

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
_SAMPLE = 4096
_LINEAR = struct.Struct("10q")
_GATED = struct.Struct("14q")


class Matrix(NamedTuple):
    """A weight matrix for the C kernel.

    Attributes:
        weight: ``[outs, ins]``, dense, in fp32, bf16, fp16 or int8.
        bias: fp32 ``[outs]``, or None.
        scales: fp32 ``[outs]``, factors of the rows of int8 weights; None for other weights.
        fields: values of the C struct ``Matrix``.
    """

    weight: Tensor
    bias: Tensor | None
    scales: Tensor | None
    fields: tuple[int, int, int, int]


def matrix(weight: Tensor, bias: Tensor | None = None, scales: Tensor | None = None) -> Matrix:
    """Returns a :class:`Matrix`, which describes the arguments."""
    assert weight.is_contiguous(), "weights must be dense"
    assert (scales is not None) == (weight.dtype == torch.int8), "int8 has scales, no other type has"
    bias_at, scales_at = (0 if each is None else each.data_ptr() for each in (bias, scales))
    return Matrix(weight, bias, scales, (weight.data_ptr(), bias_at, scales_at, _KINDS[weight.dtype]))


def in_8_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises a weight to the nearest int8 codes ``[outs, ins]`` with fp32 row scales ``[outs]``."""
    rows = weight.detach().float()
    scales = (rows.abs().amax(1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return (rows / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales


def narrowed(weight: Tensor) -> Tensor | None:
    """Returns a copy of fp32 weights in bf16 or fp16 if it has exactly the same values, else None.

    Most checkpoints are trained in bf16 or fp16, so half of the bits of their weights in fp32 are zeros.
    """
    for dtype in (torch.bfloat16, torch.float16):
        # A small sample usually shows that the values differ.
        for some in (weight.flatten()[:_SAMPLE], weight):
            copy = some.to(dtype)
            if not torch.equal(copy.float(), some):
                break
        else:
            return copy.contiguous()
    return None


def widened(by: Matrix) -> Tensor:
    """Returns the weight in fp32."""
    weight = by.weight.float()
    return weight if by.scales is None else weight * by.scales[:, None]


def linear(x: Tensor, by: Matrix) -> Tensor:
    """Returns ``x @ weight.T + bias`` for x ``[..., ins]``, equal to torch's ``linear`` up to rounding."""
    outs, ins = by.weight.shape
    library = usable(x)
    if library is None:
        return torch.nn.functional.linear(x, widened(by).to(x.dtype), by.bias)
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], outs)
    rows = x.numel() // ins
    if rows:
        sizes = rows, ins, outs, torch.get_num_threads()
        library.linear(_LINEAR.pack(x.data_ptr(), out.data_ptr(), *by.fields, *sizes))
    return out


def gated(x: Tensor, gate: Matrix, up: Matrix) -> Tensor:
    """Returns ``silu(x @ gate.T) * (x @ up.T)``, equal to torch up to rounding, and fused for few rows."""
    outs, ins = gate.weight.shape
    library, rows = usable(x), x.numel() // ins
    if library is None or rows > MOST_ROWS:
        return torch.nn.functional.silu(linear(x, gate)) * linear(x, up)
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], outs)
    if rows:
        sizes = rows, ins, outs, torch.get_num_threads()
        library.gated(_GATED.pack(x.data_ptr(), out.data_ptr(), *gate.fields, *up.fields, *sizes))
    return out

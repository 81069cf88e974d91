"""Products of few fp32 rows with weight matrices: each weight is read from memory once, whatever the rows.

A row's result does not depend on the rows beside it, bit for bit.
"""

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from triforce_tree.kernels.cpu.fp32.library import usable

MOST_ROWS = 48
"""Most rows for which this is faster than torch and oneDNN (AVX-512)."""

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
_SAMPLE = 4096
_LINEAR = struct.Struct("10q")
_GATED = struct.Struct("14q")


class Matrix(NamedTuple):
    """A weight matrix as the kernel reads it.

    Attributes:
        weight: ``[outs, ins]``, fp32, 16 bits that are converted to fp32 exactly, or int8; dense.
        bias: fp32 ``[outs]``, or None.
        scales: fp32 ``[outs]``, by which int8 rows are multiplied; None for other weights.
        fields: of the C struct.
    """

    weight: Tensor
    bias: Tensor | None
    scales: Tensor | None
    fields: tuple[int, int, int, int]


def matrix(weight: Tensor, bias: Tensor | None = None, scales: Tensor | None = None) -> Matrix:
    """Arguments as the attributes of :class:`Matrix`."""
    assert weight.is_contiguous(), "weights must be dense"
    assert (scales is not None) == (weight.dtype == torch.int8), "int8 has scales, no other type has"
    bias_at, scales_at = (0 if each is None else each.data_ptr() for each in (bias, scales))
    return Matrix(weight, bias, scales, (weight.data_ptr(), bias_at, scales_at, _KINDS[weight.dtype]))


def in_8_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest int8 codes ``[outs, ins]`` of a weight, and fp32 scales ``[outs]`` of their rows."""
    rows = weight.detach().float()
    scales = (rows.abs().amax(1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return (rows / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales


def narrowed(weight: Tensor) -> Tensor | None:
    """A copy of fp32 weights in 16 bits with exactly the same values; None where there is none.

    Most checkpoints are trained in bf16 or fp16: in fp32 half of the bytes of their weights are zeros.
    """
    for dtype in (torch.bfloat16, torch.float16):
        # A few of them tell most of the time.
        for some in (weight.flatten()[:_SAMPLE], weight):
            copy = some.to(dtype)
            if not torch.equal(copy.float(), some):
                break
        else:
            return copy.contiguous()
    return None


def widened(by: Matrix) -> Tensor:
    """The weight in fp32."""
    weight = by.weight.float()
    return weight if by.scales is None else weight * by.scales[:, None]


def linear(x: Tensor, by: Matrix) -> Tensor:
    """``x @ weight.T + bias`` for ``[..., ins]``, as torch's ``linear`` up to rounding."""
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
    """``silu(x @ gate.T) * (x @ up.T)`` as torch up to rounding, fused for few rows."""
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

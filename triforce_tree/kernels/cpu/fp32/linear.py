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
_UNPACK = struct.Struct("6q")
_CACHED = 1 << 17
"""Elements of the rows that one pass over the weights multiplies, so that a core's cache holds them."""
_MOST_INS = 1 << 15
"""Largest number of columns of a matrix in blocks, of which a thread unpacks four rows on its stack."""


class Blocks(NamedTuple):
    """A kind of blocks of GGUF files.

    Attributes:
        kind: the number of this kind in C.
        elements: elements of a block.
        bytes: bytes of a block.
    """

    kind: int
    elements: int
    bytes: int

    def fits(self, ins: int) -> bool:
        """Returns whether the kernel reads rows of ``ins`` columns."""
        return ins % self.elements == 0 and ins <= _MOST_INS

    def ins(self, weight: Tensor) -> int:
        """Returns the number of columns of packed rows uint8 ``[outs, bytes]``."""
        return weight.shape[1] // self.bytes * self.elements


BLOCKS = {
    "Q8_0": Blocks(4, 32, 34),
    "Q4_0": Blocks(5, 32, 18),
    "Q4_1": Blocks(6, 32, 20),
    "Q5_0": Blocks(7, 32, 22),
    "Q5_1": Blocks(8, 32, 24),
    "Q4_K": Blocks(9, 256, 144),
    "Q5_K": Blocks(10, 256, 176),
    "Q6_K": Blocks(11, 256, 210),
}
"""Kinds of blocks that the kernel reads, by their names in the package gguf."""


class Matrix(NamedTuple):
    """A weight matrix for the C kernel.

    Attributes:
        weight: ``[outs, ins]``, dense, in fp32, bf16, fp16 or int8; or packed rows uint8 ``[outs, bytes]``.
        bias: fp32 ``[outs]``, or None.
        scales: fp32 ``[outs]``, factors of the rows of int8 weights; None for other weights.
        blocks: kind of the packed rows; None for other weights.
        fields: values of the C struct ``Matrix``.
    """

    weight: Tensor
    bias: Tensor | None
    scales: Tensor | None
    blocks: Blocks | None
    fields: tuple[int, int, int, int]


def matrix(
    weight: Tensor, bias: Tensor | None = None, scales: Tensor | None = None, blocks: Blocks | None = None
) -> Matrix:
    """Returns a :class:`Matrix`, which describes the arguments."""
    assert weight.is_contiguous(), "weights must be dense"
    assert (scales is not None) == (weight.dtype == torch.int8), "int8 has scales, no other type has"
    assert (blocks is not None) == (weight.dtype == torch.uint8), "uint8 has blocks, no other type has"
    bias_at, scales_at = (0 if each is None else each.data_ptr() for each in (bias, scales))
    kind = _KINDS[weight.dtype] if blocks is None else blocks.kind
    return Matrix(weight, bias, scales, blocks, (weight.data_ptr(), bias_at, scales_at, kind))


def unpacked(weight: Tensor, blocks: Blocks) -> Tensor:
    """Returns packed rows uint8 ``[outs, bytes]`` as fp32 ``[outs, ins]``, the values of the package gguf."""
    outs, ins = weight.shape[0], blocks.ins(weight)
    out = torch.empty(outs, ins, dtype=torch.float32, device="cpu")
    own = usable(out)
    assert own is not None, "blocks are used only with the C library"
    assert weight.is_contiguous(), "weights must be dense"
    if outs:
        threads = torch.get_num_threads()
        own.unpack(_UNPACK.pack(weight.data_ptr(), out.data_ptr(), blocks.kind, outs, ins, threads))
    return out


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
    if by.blocks is not None:
        return unpacked(by.weight, by.blocks)
    weight = by.weight.float()
    return weight if by.scales is None else weight * by.scales[:, None]


def linear(x: Tensor, by: Matrix) -> Tensor:
    """Returns ``x @ weight.T + bias`` for x ``[..., ins]``, equal to torch's ``linear`` up to rounding."""
    outs, ins = by.weight.shape[0], x.shape[-1]
    own = usable(x)
    if own is None:
        return torch.nn.functional.linear(x, widened(by).to(x.dtype), by.bias)
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], outs)
    rows, threads = x.numel() // ins, torch.get_num_threads()
    together = max(MOST_ROWS, _CACHED // ins)
    for begin in range(0, rows, together):
        sizes = min(together, rows - begin), ins, outs, threads
        places = x.data_ptr() + 4 * begin * ins, out.data_ptr() + 4 * begin * outs
        own.linear(_LINEAR.pack(*places, *by.fields, *sizes))
    return out


def gated(x: Tensor, gate: Matrix, up: Matrix) -> Tensor:
    """Returns ``silu(x @ gate.T) * (x @ up.T)``, equal to torch up to rounding, and fused for few rows."""
    outs, ins = gate.weight.shape[0], x.shape[-1]
    own, rows = usable(x), x.numel() // ins
    if own is None or rows > MOST_ROWS:
        return torch.nn.functional.silu(linear(x, gate)) * linear(x, up)
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], outs)
    if rows:
        sizes = rows, ins, outs, torch.get_num_threads()
        own.gated(_GATED.pack(x.data_ptr(), out.data_ptr(), *gate.fields, *up.fields, *sizes))
    return out

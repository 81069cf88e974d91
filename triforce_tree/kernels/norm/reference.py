"""Norms over the last dimension in plain torch, which define the kernels.

A kernel sums each row in one program and in one order. Reductions of torch and of ``torch.compile`` on a GPU
divide a row among a number of threads or blocks that depends on the number of rows.
"""

import torch
from torch import Tensor

from triforce_tree.kernels.operators import fake, operator

MOST_COLUMNS = 32_768
"""Largest number of elements of a row."""


@operator("row_rms_norm", triton=".launch")
def row_rms_norm(x: Tensor, weight: Tensor, eps: float, shift: float, late: bool) -> Tensor:
    """Returns ``x / sqrt(mean(x ** 2) + eps)``, computed in fp32, times ``weight + shift``.

    Args:
        x: ``[..., D]``.
        weight: ``[D]``.
        shift: 1 where the weight is stored as its difference from 1 (Gemma).
        late: whether the product with the weight is in fp32 and then rounded. Otherwise the norm is rounded
            first, and multiplied in x's dtype (Llama).
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if late:
        return (normed * (weight.float() + shift)).to(x.dtype)
    return (weight + shift if shift else weight) * normed.to(x.dtype)


@fake("row_rms_norm")
def _(x: Tensor, weight: Tensor, *args: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@operator("add_rms_norm", triton=".launch")
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, shift: float, late: bool
) -> tuple[Tensor, Tensor]:
    """Computes ``x + residual``, rounded to their dtype, and its :func:`row_rms_norm`.

    Args:
        x, residual: ``[..., D]`` of one dtype.

    Returns:
        the sum and its norm, both contiguous.
    """
    total = (x + residual).contiguous()
    return total, row_rms_norm.definition(total, weight, eps, shift, late)


@fake("add_rms_norm")
def _(x: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    made = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2)]
    return made[0], made[1]


@operator("row_layer_norm")
def row_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Computes torch's ``layer_norm`` over the last dimension, whose GPU kernel sums each row in one block.

    It is an operator so that ``torch.compile`` does not replace it.
    """
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


@fake("row_layer_norm")
def _(x: Tensor, *args: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)

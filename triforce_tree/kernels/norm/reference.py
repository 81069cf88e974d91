"""Norms over the last dimension in plain torch: the definition of the kernels.

Each row is summed by one program in one order. torch's own reductions on a GPU, and those that
``torch.compile`` makes, divide a row among as many threads or blocks as the number of rows leaves free.
"""

import torch
from torch import Tensor

from triforce_tree.kernels.operators import fake, operator

MOST_COLUMNS = 32_768
"""Most elements of a row."""


@operator("row_rms_norm", triton=".launch")
def row_rms_norm(x: Tensor, weight: Tensor, eps: float, shift: float, late: bool) -> Tensor:
    """``x / sqrt(mean(x ** 2) + eps)`` in fp32, times ``weight + shift``.

    Args:
        x: ``[..., D]``.
        weight: ``[D]``.
        shift: 1 where the weight is stored as its difference from 1 (Gemma).
        late: multiply in fp32 and round the product; else round first, and multiply in x's dtype (Llama).
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
    """:func:`row_rms_norm` of ``x + residual``, which is rounded to their dtype before.

    Args:
        x, residual: ``[..., D]`` of one dtype.

    Returns:
        The sum and its norm, contiguous.
    """
    total = (x + residual).contiguous()
    return total, row_rms_norm.definition(total, weight, eps, shift, late)


@fake("add_rms_norm")
def _(x: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    made = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2)]
    return made[0], made[1]


@operator("row_layer_norm")
def row_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """torch's ``layer_norm`` over the last dimension; on a GPU its kernel gives each row to one block.

    An operator, so that ``torch.compile`` does not replace it.
    """
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


@fake("row_layer_norm")
def _(x: Tensor, *args: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)

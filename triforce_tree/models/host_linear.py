"""Linear layers for few fp32 rows on the CPU, through oneDNN.

A tree forward multiplies 2 to 64 rows by each weight matrix. torch's default GEMM is optimised for more rows;
oneDNN takes 0.6 to 0.7 of its time (AVX-512, 8 to 32 rows).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor, nn

from triforce_tree.kernels.cpu.host import ONEDNN

_MOST_ROWS = 64
# Of eight bits there are floating-point types too, which no product of torch takes without scales.
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is torch's own linear layer with floating-point weights, run by its own ``forward``.

    Quantisation libraries have layer classes of their own, or tensor classes in ``nn.Linear``, or replace the
    ``forward`` of single layers.
    """
    return (
        type(module) is nn.Linear
        and "forward" not in vars(module)
        and type(module.weight.data) is Tensor
        and module.weight.dtype in _DTYPES
    )


@contextmanager
def few_row_linears(model: nn.Module) -> Iterator[None]:
    """Inside, plain fp32 ``nn.Linear`` layers on the CPU run few rows through oneDNN.

    Layers whose ``forward`` another library has replaced are left alone.
    """
    replaced = use_few_row_linears(model)
    try:
        yield
    finally:
        for layer in replaced:
            vars(layer).pop("forward", None)


def use_few_row_linears(model: nn.Module) -> list[nn.Linear]:
    """Let plain fp32 ``nn.Linear`` layers on the CPU run few rows through oneDNN for good; returns them."""
    replaced = [
        layer
        for layer in model.modules()
        if ONEDNN
        and is_plain_linear(layer)
        and layer.weight.device.type == "cpu"
        and layer.weight.dtype == torch.float32
    ]
    for layer in replaced:
        layer.forward = partial(_linear, layer)  # type: ignore[method-assign]
    return replaced


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    if x.shape[-2] > _MOST_ROWS:
        return nn.functional.linear(x, layer.weight, layer.bias)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, "none", [], "")
    return out

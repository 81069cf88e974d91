"""Linear layers for few fp32 rows on the CPU, through oneDNN.

A tree forward multiplies 2 to 64 rows by each weight matrix. torch's default GEMM is optimised for more rows;
oneDNN takes 0.6 to 0.7 of its time (AVX-512, 8 to 32 rows).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from triforce_tree.kernels.cpu.host import ONEDNN

_MOST_ROWS = 64


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
        and type(layer) is nn.Linear
        and "forward" not in vars(layer)
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

"""Linear layers for few fp32 rows on the CPU, computed by our C kernel or by oneDNN.

A tree forward multiplies 1 to 64 rows by each weight matrix. torch's default GEMM is optimised for more rows,
and reads the weights at half of the memory's speed. The C kernel reads fp32 weights from 16-bit copies where
these have the same values (``host.matrices``), and 16-bit weights as they are (``host.widened``). Level 1 may
use other numbers, of 8 bits (:class:`Int8Linear`). Prompts have more rows, which oneDNN multiplies where it
is faster than torch's default.
"""

from collections.abc import Iterable
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor, nn

from triforce_tree.kernels.cpu import onednn
from triforce_tree.kernels.cpu.fp32 import linear as fp32
from triforce_tree.kernels.cpu.fp32.library import library
from triforce_tree.kernels.cpu.onednn import ONEDNN
from triforce_tree.models.host.gguf_linears import UNPACKED_ROWS, GgufLinear
from triforce_tree.models.host.matrices import matrix_of, narrow

_MOST_ROWS = 64
# 8-bit floating-point types are left out: no product of torch takes them without scales.
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Returns whether a module is torch's own linear layer with floating-point weights, run by its own
    ``forward``.

    Quantisation libraries have layer classes of their own, or tensor classes in ``nn.Linear``, or replace the
    ``forward`` of single layers. A pruned layer computes its weight before each call.
    """
    return (
        type(module) is nn.Linear
        and "forward" not in vars(module)
        and module._parameters.get("weight") is not None
        and type(module.weight.data) is Tensor
        and module.weight.dtype in _DTYPES
    )


class Int8Linear(nn.Linear):
    """An ``nn.Linear`` for fp32 inputs on the CPU with weights of 8 bits, and a scale for each of their rows.

    Args:
        linear: the layer to copy; its bias is shared, its weight is not kept.
    """

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        codes, scales = fp32.in_8_bits(linear.weight)
        self.codes: Tensor
        self.scales: Tensor
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.bias = linear.bias

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Returns the weight in fp32, ``[out_features, in_features]``; some families read it or its dtype."""
        return fp32.widened(matrix_of(self))

    def forward(self, x: Tensor) -> Tensor:
        return fp32.linear(x.float(), matrix_of(self)) if _few(x) else _many_rows(x, self.weight, self.bias)


def use_few_row_linears(model: nn.Module) -> list[nn.Linear]:
    """Lets plain fp32 ``nn.Linear`` layers on the CPU compute few rows by our kernel or oneDNN.

    Layers whose ``forward`` another library has replaced are left unchanged.

    Returns:
        These layers, those that did so before, and those of 8 bits or over blocks of a GGUF file.
    """
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    before = [each for each in linears if getattr(vars(each).get("forward"), "func", None) is _linear]
    found = [
        layer
        for layer in linears
        if is_plain_linear(layer)
        and layer.weight.device.type == "cpu"
        and layer.weight.dtype == torch.float32
    ]
    # The library is compiled where it is first asked for, which takes seconds.
    native = bool(found) and library() is not None
    replaced = found if native or ONEDNN else []
    if native:
        narrow(layer.weight for layer in replaced)
    for layer in replaced:
        layer.forward = partial(_linear, layer, native and layer.weight.is_contiguous())  # type: ignore[method-assign]
    return before + replaced + [layer for layer in linears if isinstance(layer, Int8Linear | GgufLinear)]


def use_half_linears(layers: Iterable[nn.Linear]) -> None:
    """Lets plain ``nn.Linear`` layers with dense weights of 16 bits on the CPU take and return fp32."""
    for layer in layers:
        layer.forward = partial(_linear, layer, True)  # type: ignore[method-assign]


def _linear(layer: nn.Linear, native: bool, x: Tensor) -> Tensor:
    """Computes a layer, few rows by the C kernel if ``native``."""
    if native and _few(x):
        return fp32.linear(x.float(), matrix_of(layer))
    if layer.weight.dtype != torch.float32:
        return _by_halves(layer, x)
    return _many_rows(x, layer.weight, layer.bias)


def _few(x: Tensor) -> bool:
    return x.numel() <= fp32.MOST_ROWS * x.shape[-1]


def _many_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if ONEDNN and (x.shape[-2] <= _MOST_ROWS or onednn.multiplies_many_rows()):
        return onednn.linear(x, weight, bias)
    return nn.functional.linear(x, weight, bias)


def _by_halves(layer: nn.Linear, x: Tensor) -> Tensor:
    """Returns the fp32 product of many rows with a weight of 16 bits.

    Where the processor multiplies bf16, rows are rounded to it, as in the model's own forward.
    """
    if layer.weight.dtype == torch.bfloat16 and onednn.multiplies_bf16():
        out = nn.functional.linear(x.bfloat16(), layer.weight).float()
        return out if layer.bias is None else out.add_(layer.bias)
    if x.numel() < UNPACKED_ROWS * x.shape[-1]:
        return fp32.linear(x.float(), matrix_of(layer))
    bias = None if layer.bias is None else layer.bias.float()
    return (onednn.linear if ONEDNN else nn.functional.linear)(x.float(), layer.weight.float(), bias)

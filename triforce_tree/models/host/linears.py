"""Linear layers for few fp32 rows on the CPU, computed by our C kernel or by oneDNN.

A tree forward multiplies 1 to 64 rows by each weight matrix. torch's default GEMM is optimised for more rows,
and reads the weights at half of the memory's speed. If all values of a weight can be represented in 16 bits,
as in most checkpoints, it is read from a 16-bit copy: the same numbers in half of the bytes. Level 1 may use
other numbers, of 8 bits (:class:`Int8Linear`). Prompts have more rows, which oneDNN multiplies where it is
faster than torch's default. Weights that are given in 16 bits are read as they are (``host.widened``).
"""

from collections.abc import Iterable
from functools import partial
from typing import Protocol, TypeGuard

import psutil
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from triforce_tree.kernels.cpu import onednn
from triforce_tree.kernels.cpu.fp32 import linear as fp32
from triforce_tree.kernels.cpu.fp32.library import library
from triforce_tree.kernels.cpu.onednn import ONEDNN
from triforce_tree.models.host.gguf_linears import UNPACKED_ROWS, GgufLinear

_MOST_ROWS = 64
# Share of the available memory that copies in 16 bits may take.
_MOST_MEMORY = 0.25
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


class FewRowMatrix(Protocol):
    """A weight in the form that the C kernel reads."""

    def matrix(self) -> fp32.Matrix: ...


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
        return fp32.widened(self.matrix())

    def matrix(self) -> fp32.Matrix:
        bias = None if self.bias is None else self.bias.detach()
        return fp32.matrix(self.codes, bias, self.scales)

    def forward(self, x: Tensor) -> Tensor:
        return _linear(self, self, x)


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
    copies = sum(layer.weight.nbytes for layer in replaced if layer.weight not in _narrowed) // 2
    narrow = copies <= _MOST_MEMORY * psutil.virtual_memory().available
    for layer in replaced:
        weight = FewRowWeight(layer, narrow) if native and layer.weight.is_contiguous() else None
        layer.forward = partial(_linear, layer, weight)  # type: ignore[method-assign]
    return before + replaced + [layer for layer in linears if isinstance(layer, Int8Linear | GgufLinear)]


def use_half_linears(layers: Iterable[nn.Linear]) -> None:
    """Lets plain ``nn.Linear`` layers with dense weights of 16 bits on the CPU take and return fp32."""
    for layer in layers:
        weight = FewRowWeight(layer, narrow=False)
        layer.forward = partial(_linear, layer, weight)  # type: ignore[method-assign]


class FewRowWeight:
    """A layer's weight in the form that the C kernel reads.

    Args:
        layer: has weights of 32 or 16 bits on the CPU.
        narrow: whether to use a 16-bit copy of fp32 weights if it has the same values.
    """

    def __init__(self, layer: nn.Linear, narrow: bool) -> None:
        self._layer, self._narrow = layer, narrow
        self._matrix: fp32.Matrix | None = None
        self._made_from: tuple[int, int] | None = None

    def matrix(self) -> fp32.Matrix:
        """Returns the matrix, which is made at the first call, and again after the weight was changed or
        replaced.
        """
        weight = self._layer.weight
        # These differ after every change of the values, as far as torch counts changes.
        source = weight.data_ptr(), -1 if weight.is_inference() else weight._version
        if self._matrix is None or source != self._made_from:
            copy = _in_16_bits(weight, source) if self._narrow else None
            bias = None if self._layer.bias is None else self._layer.bias.detach().float()
            self._matrix = fp32.matrix(weight.detach() if copy is None else copy, bias)
            self._made_from = source
        return self._matrix


def few_row_weight(layer: nn.Linear) -> FewRowMatrix:
    """Returns the weight of a layer that :func:`use_few_row_linears` returned."""
    if isinstance(layer, Int8Linear | GgufLinear):
        return layer
    weight: FewRowWeight | None = vars(layer)["forward"].args[1]
    return FewRowWeight(layer, narrow=False) if weight is None else weight


# Maps a weight to its copy (None if 16 bits cannot represent its values) and to the state that the copy was
# made from.
_narrowed = WeakTensorKeyDictionary()


def _in_16_bits(weight: Tensor, state: tuple[int, int]) -> Tensor | None:
    found = _narrowed.get(weight)
    if found is None or found[1] != state:
        found = fp32.narrowed(weight.detach()), state
        _narrowed[weight] = found
    copy: Tensor | None = found[0]
    return copy


def _linear(layer: nn.Linear, weight: FewRowMatrix | None, x: Tensor) -> Tensor:
    if weight is not None and x.numel() <= fp32.MOST_ROWS * x.shape[-1]:
        return fp32.linear(x.float(), weight.matrix())
    if layer.weight.dtype != torch.float32:
        return _by_halves(layer, weight, x)
    if ONEDNN and (x.shape[-2] <= _MOST_ROWS or onednn.multiplies_many_rows()):
        return onednn.linear(x, layer.weight, layer.bias)
    return nn.functional.linear(x, layer.weight, layer.bias)


def _by_halves(layer: nn.Linear, weight: FewRowMatrix | None, x: Tensor) -> Tensor:
    """Returns the fp32 product of many rows with a weight of 16 bits.

    Where the processor multiplies bf16, rows are rounded to it, as in the model's own forward.
    """
    if layer.weight.dtype == torch.bfloat16 and onednn.multiplies_bf16():
        out = nn.functional.linear(x.bfloat16(), layer.weight).float()
        return out if layer.bias is None else out.add_(layer.bias)
    if weight is not None and x.numel() < UNPACKED_ROWS * x.shape[-1]:
        return fp32.linear(x.float(), weight.matrix())
    bias = None if layer.bias is None else layer.bias.float()
    return (onednn.linear if ONEDNN else nn.functional.linear)(x.float(), layer.weight.float(), bias)

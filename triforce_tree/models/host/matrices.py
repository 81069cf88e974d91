"""Weights of linear layers in the form that the C kernel reads.

If all values of an fp32 weight can be represented in 16 bits, as in most checkpoints, the kernel reads a
16-bit copy: the same numbers in half of the bytes.
"""

from collections.abc import Iterable
from weakref import WeakKeyDictionary

import psutil
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from triforce_tree.kernels.cpu.fp32 import linear as fp32

# Share of the available memory that copies in 16 bits may take.
_MOST_MEMORY = 0.25
# The matrix of each layer, after the addresses and the version of the tensors that it was made from. An
# attribute of a user's layer would count as a change of the model.
_matrices: WeakKeyDictionary[nn.Linear, tuple[tuple[int, ...], fp32.Matrix]] = WeakKeyDictionary()
# Maps fp32 weights to None until they are first read, then to the address and version that were read, and to
# the 16-bit copy (None if 16 bits cannot represent the values). All copies of a model share these copies.
_narrowed = WeakTensorKeyDictionary()


def matrix_of(layer: nn.Linear) -> fp32.Matrix:
    """Returns the weight and bias of a layer on the CPU in the form that the C kernel reads.

    It is made at the first call, and again after one of the two was replaced or the weight was changed.

    Args:
        layer: has weights of 32 or 16 bits, or is an ``Int8Linear`` or a ``GgufLinear``.
    """
    # ``layer.weight`` would take longer, and those of an ``Int8Linear`` are made anew.
    weight = layer._buffers.get("codes", layer._parameters.get("weight"))
    bias = layer._parameters.get("bias")
    assert weight is not None, "a linear layer has weights"
    # These differ after every change of the values, as far as torch counts changes.
    values = weight.data_ptr(), -1 if weight.is_inference() else weight._version
    made_from = *values, 0 if bias is None else bias.data_ptr()
    found = _matrices.get(layer)
    if found is None or found[0] != made_from:
        dense = weight.detach().contiguous() if (copy := _in_16_bits(weight, values)) is None else copy
        others = None if bias is None else bias.detach().float()
        scales, blocks = getattr(layer, "scales", None), getattr(layer, "blocks", None)
        found = _matrices[layer] = made_from, fp32.matrix(dense, others, scales, blocks)
    return found[1]


def narrow(weights: Iterable[Tensor]) -> None:
    """Lets :func:`matrix_of` use 16-bit copies of fp32 weights, unless these would take too much memory."""
    new = [weight for weight in weights if weight not in _narrowed]
    if sum(weight.nbytes for weight in new) // 2 <= _MOST_MEMORY * psutil.virtual_memory().available:
        for weight in new:
            _narrowed[weight] = None


def _in_16_bits(weight: Tensor, values: tuple[int, int]) -> Tensor | None:
    """Returns a copy that :func:`narrow` permits; None if there is none."""
    if weight not in _narrowed:
        return None
    found: tuple[tuple[int, int], Tensor | None] | None = _narrowed[weight]
    if found is None or found[0] != values:
        found = _narrowed[weight] = values, fp32.narrowed(weight.detach())
    return found[1]

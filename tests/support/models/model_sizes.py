"""Sizes of common models, for memory plans, and of the layers that copies of a model own."""

from dataclasses import replace

from torch import nn

from triforce_tree.models.experts.few_row import LowBitExperts
from triforce_tree.models.few_row import FewRowLinear, LowBitLinear
from triforce_tree.models.host.linears import Int8Linear
from triforce_tree.planning.memory_map import Sizes

LLAMA_2_7B = Sizes(int(13.48e9), int(0.15e9), 32, 32, 32, 128, 4096, 11008, 32000)
LLAMA_3_1_8B = Sizes(int(16.06e9), int(0.15e9), 32, 32, 8, 128, 4096, 14336, 128256)
LLAMA_2_13B = Sizes(int(26.03e9), int(0.15e9), 40, 40, 40, 128, 5120, 13824, 32000)
_LAYER_13B = 2 * (4 * 5120 * 5120 + 3 * 13824 * 5120)
STREAMED_13B = replace(LLAMA_2_13B, streamed=40 * _LAYER_13B, slots=2 * _LAYER_13B)
LONG = 122_880


def extra_bytes(model: nn.Module) -> int:
    """Returns bytes that a copy's replaced layers hold in addition to what they share with the original."""
    owned = [
        tensor
        for module in model.modules()
        if isinstance(module, FewRowLinear | LowBitLinear | LowBitExperts | Int8Linear)
        for tensor in module.buffers()
    ]
    return sum(tensor.numel() * tensor.element_size() for tensor in {id(t): t for t in owned}.values())

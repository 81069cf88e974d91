"""Copies of a model for the CPU whose linear layers have 8-bit weights, for level 1.

A pass over a few tokens takes as long as reading its weights, and int8 weights have a quarter of fp32's
bytes. The head is copied too, because it is a fifth of the weights or more in small models with large
vocabularies.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from triforce_tree.kernels.cpu.fp32.library import library
from triforce_tree.models.experts.few_row import LowBitExperts
from triforce_tree.models.few_row import check_low_bits, with_linears
from triforce_tree.models.host.linears import Int8Linear, is_plain_linear
from triforce_tree.models.model_copy import hooked


def has_int8_kernel(model: nn.Module) -> bool:
    """Returns whether a copy of a model can have weights of 8 bits that the C kernel reads."""
    parameter = next(model.parameters())
    return parameter.device.type == "cpu" and parameter.dtype is torch.float32 and library() is not None


def int8_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a copy over the same embeddings and norms with linear layers, head and experts of 8 bits.

    Args:
        model: in fp32 on the CPU; it is not changed.

    Raises:
        ValueError: its linear layers cannot be replaced.
    """
    check_low_bits(model, 8)
    clone = with_linears(model, Int8Linear, lambda module: LowBitExperts(module, 8), with_hooks=True)
    head: Any = clone.get_output_embeddings()
    if head is not None and is_plain_linear(head) and not hooked(head):
        clone.set_output_embeddings(Int8Linear(head))
    return clone

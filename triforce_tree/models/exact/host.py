"""A model's modules on the CPU such that a row's bits do not depend on the rows beside it.

Linear layers read weights of 16 and 32 bits through our C kernel. torch's own elementwise functions take
another implementation for the last elements of a tensor, and its products and sums other orders by shape:
modules without children are given one row at a time.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from triforce_tree.kernels.cpu.fp32 import linear as fp32
from triforce_tree.kernels.cpu.fp32.library import library
from triforce_tree.models.host.layers import use_fused_layers
from triforce_tree.models.host.linears import is_plain_linear, use_few_row_linears
from triforce_tree.models.host.matrices import matrix_of
from triforce_tree.models.model_copy import text_decoder

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LEFT_ALONE = (nn.Embedding, nn.Identity, nn.Dropout)


def why_not_exact_on_host(model: PreTrainedModel) -> str | None:
    """Returns why a row's bits would depend on other rows for a model on the CPU, or None if they do not."""
    if library() is None:
        return "this machine has no AVX2, or no C compiler for our kernels (gcc or clang)"
    if model.dtype not in _DTYPES:
        return f"its dtype is {model.dtype}; use float32, bfloat16 or float16"
    if getattr(model.config.get_text_config(decoder=True), "final_logit_softcapping", None):
        return "its logits are capped by a function of torch whose bits depend on the shape; use a GPU"
    return None


@torch.no_grad()
def use_exact_modules(model: PreTrainedModel) -> PreTrainedModel:
    """Makes the rows of a model copy's modules independent of each other, permanently. Returns the copy.

    Args:
        model: from ``shallow_copy``, on the CPU.
    """
    replaced = use_few_row_linears(model)
    if replaced:
        use_fused_layers(model, replaced, exact=True)
    for layer in [*replaced, *(module for module in model.modules() if is_plain_linear(module))]:
        layer.forward = partial(_linear, layer)  # type: ignore[method-assign]
    decoder = text_decoder(model)
    for module in {*decoder.modules(), *model.children()}:
        leaf = not module._modules and "forward" not in vars(module)
        if leaf and not isinstance(module, (*_LEFT_ALONE, nn.Linear)):
            module.forward = partial(_by_rows, module.forward)
    return model


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return fp32.linear(x.float(), matrix_of(layer)).to(x.dtype)


def _by_rows(own: Callable[..., Any], x: Tensor, *args: Any, **keywords: Any) -> Any:
    """Returns a module's result, computed for each row ``[..., D]``, or each position ``[B, T]`` of a rotary
    embedding.
    """
    positions = args[0] if args else keywords.get("position_ids")
    if isinstance(positions, Tensor) and not positions.is_floating_point() and positions.dim() == 2:
        rest = {name: value for name, value in keywords.items() if name != "position_ids"}
        angles = [
            [own(x, positions[b : b + 1, t : t + 1], *args[1:], **rest) for t in range(positions.shape[1])]
            for b in range(positions.shape[0])
        ]
        return tuple(
            torch.cat([torch.cat([each[part] for each in row], 1) for row in angles])
            for part in range(len(angles[0][0]))
        )
    if args or keywords or x.dim() < 2:
        return own(x, *args, **keywords)
    rows = x.reshape(-1, *[1] * (x.dim() - 2), x.shape[-1])
    outs = [own(rows[i : i + 1]) for i in range(len(rows))]
    return torch.cat(outs).reshape(*x.shape[:-1], outs[0].shape[-1]) if outs else own(x)

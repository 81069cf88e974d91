"""Models with weights of 16 bits that compute in fp32 on the CPU.

Most checkpoints are in bf16. A forward of few tokens takes as long as reading its weights, which our C
kernels for fp32 do at twice the speed of torch's products in bf16. They also compute whole layers in a call.
So the weights of linear layers and embeddings stay in their 16 bits, and everything else becomes fp32.
Activations are rounded less than in the model's own forward.
"""

import copy
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from triforce_tree.kernels.cpu.fp32.library import library
from triforce_tree.models.few_row import quantisation
from triforce_tree.models.host.linears import is_plain_linear, use_half_linears
from triforce_tree.models.model_copy import modules_of, parameters_of

_HALVES = (torch.bfloat16, torch.float16)
# Largest share of a model's bytes that may be weights of other modules, of which fp32 copies are made.
_MOST_COPIED = 1 / 8
# Ids whose embeddings are compared, and how much bf16 rounds.
_TRIED_IDS, _ROUNDING = 8, 2.0**-6


def widens(model: PreTrainedModel) -> bool:
    """Returns whether :func:`widen` serves a model on the CPU, or one on the meta device when it is there."""
    if model.device.type not in ("cpu", "meta") or library() is None or quantisation(model) is not None:
        return False
    weights = parameters_of(model)
    if not all(weight.dtype in (*_HALVES, torch.float32) and _dense(weight) for weight in weights):
        return False
    embedding: Any = model.get_input_embeddings()
    kept = {id(module.weight) for module in modules_of(model) if _multiplies(module)}
    kept |= {id(embedding.weight)} if _embeds(embedding) else set()
    halves = {id(weight): weight.nbytes for weight in weights if weight.dtype in _HALVES}
    copied = sum(nbytes for name, nbytes in halves.items() if name not in kept)
    return bool(kept) and copied <= _MOST_COPIED * sum(halves.values())


@torch.no_grad()
def widen(copied: PreTrainedModel) -> PreTrainedModel:
    """Lets a model copy take, compute and return fp32, permanently. Returns the copy.

    Args:
        copied: from ``shallow_copy`` of a model that :func:`widens` names.
    """
    linears = [module for module in modules_of(copied) if _multiplies(module)]
    embedding: Any = copied.get_input_embeddings()
    kept = {id(module.weight) for module in linears}
    if _embeds(embedding):
        kept.add(id(embedding.weight))
        embedding.padding_idx = None  # It matters for gradients only, and might exceed the rows.
        embedding.forward = partial(_embedded, embedding)
    use_half_linears(linears)
    for module in modules_of(copied):
        for name, weight in module._parameters.items():
            if weight is not None and weight.dtype in _HALVES and id(weight) not in kept:
                module._parameters[name] = nn.Parameter(weight.float(), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype in _HALVES:
                module._buffers[name] = buffer.float()
    return copied


@torch.no_grad()
def renew_widened(widened: PreTrainedModel, model: PreTrainedModel) -> None:
    """Copies the weights of a model that were changed in place to its copy from :func:`widen`, which other
    copies share.
    """
    for own, copied in zip(modules_of(model), modules_of(widened), strict=True):
        for theirs, mine in ((own._parameters, copied._parameters), (own._buffers, copied._buffers)):
            for name, tensor in theirs.items():
                kept = mine.get(name)
                if tensor is not None and kept is not None and kept is not tensor:
                    kept.copy_(tensor)


def _dense(weight: Tensor) -> bool:
    return type(weight.data) is Tensor and weight.is_contiguous()


def _multiplies(module: nn.Module) -> TypeGuard[nn.Linear]:
    return is_plain_linear(module) and module.weight.dtype in _HALVES


def _embeds(module: Any) -> bool:
    """Returns whether :func:`_embedded` computes what a module of embeddings does."""
    if not isinstance(module, nn.Embedding) or "forward" in vars(module) or module.max_norm is not None:
        return False
    if module.weight.dtype not in _HALVES:
        return False
    if module.weight.is_meta:
        return True
    ids = torch.arange(min(_TRIED_IDS, module.num_embeddings), device="cpu").flip(0)
    # The user's model is never changed, as others may use it now.
    tried = copy.copy(module)
    tried._parameters, tried.padding_idx = dict(module._parameters), None
    expected, found = type(tried).forward(tried, ids), _embedded(tried, ids)
    return bool((found - expected.float()).abs().max() <= _ROUNDING * expected.float().abs().max())


def _embedded(module: nn.Embedding, ids: Tensor) -> Tensor:
    """Returns a module's embeddings, computed from fp32 copies of the rows of these ids."""
    own = module._parameters["weight"]
    assert own is not None, "a table of embeddings"
    rows = own.detach().index_select(0, ids.flatten()).float()
    module._parameters["weight"] = nn.Parameter(rows, requires_grad=False)
    try:
        out: Tensor = type(module).forward(module, torch.arange(ids.numel(), device="cpu").view(ids.shape))
        return out
    finally:
        module._parameters["weight"] = own

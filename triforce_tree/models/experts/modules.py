"""Modules that hold the experts of a layer as fused weights ``[E, ...]``, as transformers makes them."""

from typing import Any

import torch
from torch import Tensor, nn

# Attributes that transformers' `use_experts_implementation` sets on each module of experts.
_INTERFACE = ("has_gate", "has_bias", "is_transposed")
_DOWN = "down_proj"


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the modules below ``model`` that hold fused expert weights and are called with the routing.

    Families without transformers' experts interface (Llama 4, DBRX, JetMoE) have none.
    """
    return [module for module in model.modules() if is_fused(module)]


def is_fused(module: nn.Module) -> bool:
    """Returns whether a module holds fused expert weights and uses transformers' experts interface."""
    own = module._parameters
    return (
        all(hasattr(module, name) for name in _INTERFACE)
        and own.get(_DOWN) is not None
        and own.get(first_name(module)) is not None
    )


def first_name(module: Any) -> str:
    """Returns the name of the weight that multiplies the hidden states: gate and up together, or up alone."""
    return "gate_up_proj" if module.has_gate else "up_proj"


def fused_weights(module: nn.Module) -> list[nn.Parameter]:
    """Returns the weights ``[E, ...]`` of all experts of a module, without biases."""
    found = [module._parameters[first_name(module)], module._parameters[_DOWN]]
    return [weight for weight in found if weight is not None]


def routing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Returns the expert ids of each token, found among the arguments of a call of such a module.

    Raises:
        TypeError: the arguments have no expert ids.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32):
            return value
    raise TypeError("an experts module was called without the indices of each token's experts")


def distinct(experts: int, per_token: int, tokens: int) -> float:
    """Returns the expected number of different experts for ``tokens`` tokens, if routing is uniformly
    random.
    """
    return experts * (1 - (1 - per_token / experts) ** tokens)


def experts_per_token(config: Any) -> int | None:
    """Returns how many experts a token is routed to, by a text configuration, or None if it does not say."""
    for name in ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"):
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
        if isinstance(value, list | tuple) and value:
            return int(max(value))
    return None

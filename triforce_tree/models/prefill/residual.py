"""Decoder layers whose residual addition after attention is computed with the norm that follows it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_NORMS = ("input_layernorm", "post_attention_layernorm")
_CHILDREN = {*_NORMS, "self_attn", "mlp"}
AddNorm = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def may_be_layer(module: nn.Module) -> bool:
    """Whether a module has the parts of such a layer, and no others but dropout."""
    parts = {name for name, child in module._modules.items() if not isinstance(child, nn.Dropout)}
    return parts == _CHILDREN and not module._parameters


def forward_by(add_norm: AddNorm, layer: Any) -> Callable[..., Tensor]:
    """The layer's forward with ``add_norm``, of attention and residual to their sum and its norm."""

    def forward(hidden_states: Tensor, **keywords: Any) -> Tensor:
        normed = layer.input_layernorm(hidden_states)
        attended, _ = layer.self_attn(hidden_states=normed, **keywords)
        total, normed = add_norm(attended, hidden_states)
        out: Tensor = total + layer.mlp(normed)
        return out

    return forward


class _Part(nn.Module):
    """A part of a stand-in: some function, with what it was given."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function, self.given = function, dict[str, Any]()

    def forward(self, hidden_states: Tensor, **keywords: Any) -> Any:
        self.given = keywords
        return self.function(hidden_states)


@torch.no_grad()
def is_layer(module: nn.Module, stand_in: Callable[..., Any]) -> bool:
    """Whether :func:`forward_by` computes what a module's own forward does, and tells attention as much.

    Args:
        stand_in: makes a module of the same class with other children.
    """
    norms = {name: _Part(function) for name, function in zip(_NORMS, (torch.sin, torch.cos), strict=True)}
    attention, mlp = _Part(lambda x: (torch.exp(x), None)), _Part(torch.tanh)
    made = stand_in(module, **norms, self_attn=attention, mlp=mlp)
    x, told = torch.linspace(-2, 2, 40, device="cpu").view(1, 5, 8), torch.arange(5, device="cpu")[None]
    keywords = {
        "attention_mask": None,
        "position_ids": told,
        "past_key_values": object(),
        "use_cache": True,
        "position_embeddings": (x, x),
        "triforce_positions": told,
    }

    def add_norm(attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = attended + residual
        return total, torch.cos(total)

    try:
        expected = type(module).forward(made, x, **keywords)
        given = attention.given
        found = forward_by(add_norm, made)(x, **keywords)
    except (TypeError, AttributeError, RuntimeError, ValueError):
        return False
    same = isinstance(expected, Tensor) and torch.equal(expected, found)
    return same and all(given.get(name) is value for name, value in attention.given.items())

"""Decoder layers whose residual addition after attention is computed with the norm that follows it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from triforce_tree.models.recurrent.pass_through import CACHE

AddNorm = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Structure(NamedTuple):
    """Holds the attribute names of a layer's norms, beside ``self_attn`` and ``mlp``.

    Attributes:
        before: the norm of attention's input.
        middle: the norm of the sum of attention and residual.
        after_attention, after_mlp: the norms of their outputs; None without such a norm.
    """

    before: str
    middle: str
    after_attention: str | None = None
    after_mlp: str | None = None


# Llama, Gemma 2, GLM-4.
_STRUCTURES = (
    Structure("input_layernorm", "post_attention_layernorm"),
    Structure(
        "input_layernorm",
        "pre_feedforward_layernorm",
        "post_attention_layernorm",
        "post_feedforward_layernorm",
    ),
    Structure(
        "input_layernorm",
        "post_attention_layernorm",
        "post_self_attn_layernorm",
        "post_mlp_layernorm",
    ),
)


def forward_by(add_norm: AddNorm, layer: Any, structure: Structure) -> Callable[..., Tensor]:
    """Returns the layer's forward with ``add_norm``, which maps attention and residual to their sum and its
    norm.
    """
    before, _, after_attention, after_mlp = structure

    def forward(hidden_states: Tensor, **keywords: Any) -> Tensor:
        normed = getattr(layer, before)(hidden_states)
        attended, _ = layer.self_attn(hidden_states=normed, **keywords)
        if after_attention is not None:
            attended = getattr(layer, after_attention)(attended)
        total, normed = add_norm(attended, hidden_states)
        out: Tensor = layer.mlp(normed)
        return total + (out if after_mlp is None else getattr(layer, after_mlp)(out))

    return forward


class Part(nn.Module):
    """A part of a stand-in: it applies a given function and records its arguments."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function, self.given = function, dict[str, Any]()

    def forward(self, hidden_states: Tensor, **keywords: Any) -> Any:
        self.given = keywords
        return self.function(hidden_states)


@torch.no_grad()
def structure_of(module: nn.Module, stand_in: Callable[..., Any]) -> Structure | None:
    """Returns the structure with which :func:`forward_by` computes the same as a module, or None if there is
    none.

    Attention must receive the same arguments as from the module's own forward.

    Args:
        stand_in: makes a module of the same class with other children.
    """
    parts = {name for name, child in module._modules.items() if not isinstance(child, nn.Dropout)}
    for structure in () if module._parameters else _STRUCTURES:
        if parts == {"self_attn", "mlp"} | set(filter(None, structure)) and _computes(
            module, structure, stand_in
        ):
            return structure
    return None


def _computes(module: nn.Module, structure: Structure, stand_in: Callable[..., Any]) -> bool:
    functions = (torch.sin, torch.cos, torch.atan, torch.erf)
    norms = {name: Part(f) for name, f in zip(structure, functions, strict=True) if name is not None}
    attention, mlp = Part(lambda x: (torch.exp(x), None)), Part(torch.tanh)
    made = stand_in(module, **norms, self_attn=attention, mlp=mlp)
    x, positions = (
        torch.linspace(-2, 2, 40, dtype=torch.float32, device="cpu").view(1, 5, 8),
        torch.arange(5, device="cpu")[None],
    )
    keywords = {
        "attention_mask": None,
        "position_ids": positions,
        CACHE: object(),
        "use_cache": True,
        "position_embeddings": (x, x),
        "triforce_positions": positions,
    }

    def add_norm(attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = attended + residual
        return total, torch.cos(total)

    try:
        expected = type(module).forward(made, x, **keywords)
        given = attention.given
        found = forward_by(add_norm, made, structure)(x, **keywords)
    except (TypeError, AttributeError, RuntimeError, ValueError):
        return False
    same = isinstance(expected, Tensor) and torch.equal(expected, found)
    return same and all(given.get(name) is value for name, value in attention.given.items())

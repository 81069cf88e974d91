"""Decoder layers on the CPU in two calls for few tokens, one before attention and one after it.

If each module is a call of its own, Python and torch take longer than the products of a few tokens. The class
of a layer does not decide: our functions replace its forward only if both give the same results.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from triforce_tree.kernels.attention.plan import AttentionParams
from triforce_tree.kernels.cpu.fp32.decoder import Norm, finish, project
from triforce_tree.kernels.cpu.fp32.library import library
from triforce_tree.models.host.layers import equal, gated_parts, norm_epsilon
from triforce_tree.models.host.matrices import matrix_of
from triforce_tree.models.model_copy import hooked
from triforce_tree.models.running_forward import running, running_forward

_TRIED = 2, 3  # sequences and tokens
# Factors of the norms' weights in trials: with the second, limits on queries, keys and values take effect.
_FACTORS = 1.0, 1e4


@dataclass(frozen=True)
class _Parts:
    """The modules of a layer of this kind."""

    norms: tuple[nn.Module, nn.Module]
    eps: tuple[float, float]
    projections: Sequence[nn.Linear]
    output: nn.Linear
    mlp: Sequence[nn.Linear]


def use_fused_decoder_layers(
    layers: Iterable[nn.Module],
    linears: Collection[nn.Linear],
    fused: Collection[nn.Module],
) -> None:
    """Lets the C library compute those decoder layers of a model copy whose results it reproduces,
    permanently.

    Args:
        layers: after ``use_fused_layers``; their attention is that of a ``StepModel``.
        linears: those whose forwards ``use_few_row_linears`` has replaced.
        fused: the modules whose forwards ``use_fused_layers`` has replaced.
    """
    if library() is None or torch.get_default_device().type == "meta":
        return
    few_row = set(linears)
    for layer in layers:
        if "forward" in vars(layer) or (parts := _parts(layer, few_row, fused)) is None:
            continue
        params = _same(layer, parts)
        if params is not None:
            layer.forward = partial(_forward, layer, parts, params)


def _parts(layer: nn.Module, few_row: Collection[nn.Linear], fused: Collection[nn.Module]) -> _Parts | None:
    names = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    modules = [module for name in names if (module := layer._modules.get(name)) is not None]
    if len(modules) != len(names) or len(layer._modules) != len(names) or any(map(hooked, modules)):
        return None
    if any("forward" in vars(module) and module not in fused for module in modules):
        return None
    first, attention, second, mlp = modules
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    found = [attention._modules.get(name) for name in names]
    linears = [own for own in found if isinstance(own, nn.Linear) and own in few_row and not hooked(own)]
    eps = norm_epsilon(first), norm_epsilon(second)
    gated = gated_parts(mlp, few_row)
    if len(linears) != len(names) or len(attention._modules) != len(names) or gated is None:
        return None
    if eps[0] is None or eps[1] is None or len(mlp._modules) > len(gated) + 1:
        return None
    *projections, output = linears
    return _Parts((first, second), (eps[0], eps[1]), projections, output, gated)


@torch.no_grad()
def _same(layer: nn.Module, parts: _Parts) -> AttentionParams | None:
    """Returns how the layer attends if our functions give the same results, else None."""
    weights = [norm._parameters["weight"] for norm in parts.norms]
    params = None
    try:
        for factor in _FACTORS:
            for norm, weight in zip(parts.norms, weights, strict=True):
                assert weight is not None, "norms have weights"
                norm._parameters["weight"] = nn.Parameter(weight * factor, requires_grad=False)
            if (params := _tried(layer, parts)) is None:
                return None
    finally:
        for norm, weight in zip(parts.norms, weights, strict=True):
            norm._parameters["weight"] = weight
    return params


def _tried(layer: nn.Module, parts: _Parts) -> AttentionParams | None:
    """Returns how the layer attends if our functions give the same results for random inputs, else None."""
    generator = torch.Generator().manual_seed(0)
    heads = [projection.out_features for projection in parts.projections]
    dim = getattr(layer.self_attn, "head_dim", None)
    if not isinstance(dim, int) or any(outs % dim for outs in heads):
        return None
    drawn = partial(torch.randn, generator=generator, dtype=torch.float32)
    x = drawn(*_TRIED, len(parts.norms[0].weight))  # type: ignore[arg-type]
    angles, attended = drawn(2, *_TRIED, dim), drawn(*_TRIED, heads[0] // dim, dim)
    seen: list[tuple[Tensor, Tensor, Tensor, AttentionParams]] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        seen.append((q, k, v, params))
        return attended

    keywords = {"position_embeddings": (angles[0], angles[1]), "attention_mask": None}
    try:
        with running_forward(attend, range(2)):
            expected = type(layer).forward(layer, x, **keywords)
            if len(seen) != 1 or not isinstance(expected, Tensor):
                return None
            params = seen[0][3]
            found = _forward(layer, parts, params, x, **keywords)
    except (TypeError, AttributeError, RuntimeError, ValueError, KeyError):
        return None
    if len(seen) != 2:
        return None
    pairs = [(found, expected), *zip(seen[1][:3], seen[0][:3], strict=True)]
    return params if all(equal(a, b) for a, b in pairs) else None


def _forward(
    layer: Any,
    parts: _Parts,
    params: AttentionParams,
    hidden_states: Tensor,
    *args: Any,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **keywords: Any,
) -> Any:
    """Computes the layer in two calls for few rows, and by its own forward for more."""
    x, made = hidden_states, None
    dim = layer.self_attn.head_dim
    # Families that rotate a part of each head have narrower cosines and sines.
    if not args and position_embeddings is not None and position_embeddings[0].shape[-1] == dim:
        q, k, v = map(matrix_of, parts.projections)
        norm = Norm(parts.norms[0]._parameters["weight"], parts.eps[0])  # type: ignore[arg-type]
        made = project(x, norm, (q, k, v), *position_embeddings)
    if made is None:
        return type(layer).forward(layer, x, *args, position_embeddings=position_embeddings, **keywords)
    attended = running.attention(*made, params).flatten(2)
    norm = Norm(parts.norms[1]._parameters["weight"], parts.eps[1])  # type: ignore[arg-type]
    gate, up, down = map(matrix_of, parts.mlp)
    out = finish(attended.contiguous(), x, norm, matrix_of(parts.output), gate, up, down)
    assert out is not None, "arguments that fitted before the attention fit after it"
    return out

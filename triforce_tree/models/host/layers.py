"""Norms, gated MLPs and rotary embeddings of a model on the CPU, each computed in one call for few tokens.

A decoder layer of transformers makes about 60 calls of torch, which take longer than its products if a pass
has few tokens. The class of a module does not decide: our function replaces a forward only if both give the
same results.
"""

import inspect
from collections.abc import Callable, Collection
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from triforce_tree.kernels.cpu.fp32 import layers as fp32
from triforce_tree.kernels.cpu.fp32.library import library
from triforce_tree.kernels.cpu.fp32.linear import MOST_ROWS, gated
from triforce_tree.models.host.matrices import matrix_of
from triforce_tree.models.model_copy import ROTARY, class_forward, hooked, rotary_of, with_rotary

_EPSILONS = ("variance_epsilon", "eps")
_TRIED_ROWS, _TRIED_DIM = 3, 8
_TOLERANCE = 1e-5


@torch.no_grad()
def use_fused_layers(model: nn.Module, linears: Collection[nn.Linear], exact: bool = False) -> set[nn.Module]:
    """Lets the C library compute those modules of a model copy whose results it reproduces, permanently.

    Args:
        model: from ``shallow_copy``.
        linears: linear layers whose forwards ``use_few_row_linears`` has replaced.
        exact: whether the C library computes any number of rows, so that a row's bits do not depend on it.

    Returns:
        The modules whose forwards were replaced.
    """
    if library() is None or torch.get_default_device().type == "meta":
        return set()
    theirs = {module for module in model.modules() if "forward" in vars(module)}
    few_row = set(linears)
    rotaries: dict[type, FunctionType | None] = {}
    for module in model.modules():
        if "forward" in vars(module):
            continue
        own = class_forward(module)
        if (eps := norm_epsilon(module)) is not None:
            _replace(module, partial(_norm, module, eps), module._parameters["weight"].shape[0])  # type: ignore[union-attr]
        elif (parts := gated_parts(module, few_row)) is not None:
            gate, up, down = parts
            many = None if exact else MethodType(own, module)
            forward = partial(_mlp, many, down, gate, up)
            _replace(module, forward, gate.in_features)
        elif ROTARY in getattr(getattr(own, "__code__", None), "co_names", ()):
            if type(module) not in rotaries:
                rotaries[type(module)] = _with_rotary(own)
            if (replaced := rotaries[type(module)]) is not None:
                module.forward = MethodType(replaced, module)
    return {module for module in model.modules() if "forward" in vars(module)} - theirs


def _replace(module: nn.Module, forward: Callable[[Tensor], Tensor], size: int) -> None:
    """Replaces a module's forward by one that gives the same results for rows ``[..., size]``."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, _TRIED_ROWS, size, generator=generator, dtype=torch.float32, device="cpu")
    # Small numbers show where an epsilon is added.
    for tried in (x, 1e-3 * x):
        try:
            expected, found = type(module).forward(module, tried), forward(tried)
        except (TypeError, AttributeError, RuntimeError):
            return
        if not isinstance(expected, Tensor) or not equal(found, expected):
            return
    module.forward = forward


def equal(found: Tensor, expected: Tensor) -> bool:
    largest = max(float(expected.abs().max()), torch.finfo(torch.float32).tiny)
    return found.shape == expected.shape and bool((found - expected).abs().max() <= _TOLERANCE * largest)


def norm_epsilon(module: nn.Module) -> float | None:
    """Returns the epsilon of a module that may be an RMS norm in fp32 on the CPU, or None for other
    modules.
    """
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 1 or len(module._parameters) > 1 or module._modules:
        return None
    if len(inspect.signature(type(module).forward).parameters) != 2:
        return None  # A gated norm takes a gate beside its input.
    on_host = weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.is_contiguous()
    eps = next((getattr(module, name) for name in _EPSILONS if hasattr(module, name)), None)
    return eps if on_host and isinstance(eps, float) else None


def _norm(module: Any, eps: float, x: Tensor) -> Tensor:
    return fp32.rms_norm(x, module.weight, eps)


def gated_parts(
    module: nn.Module, few_row: Collection[nn.Linear]
) -> tuple[nn.Linear, nn.Linear, nn.Linear] | None:
    """Returns the gate, up and down projections of a module that may be a gated MLP, or None for other
    modules.
    """
    parts = [module._modules.get(name) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(isinstance(part, nn.Linear) and part in few_row and not hooked(part) for part in parts):
        return None
    activations = [
        module for module in module._modules.values() if module is not None and module not in parts
    ]
    if any(hooked(activation) or "forward" in vars(activation) for activation in activations):
        return None
    gate, up, down = parts
    return gate, up, down  # type: ignore[return-value]


def _mlp(
    many: Callable[[Tensor], Tensor] | None, down: nn.Linear, gate: nn.Linear, up: nn.Linear, x: Tensor
) -> Tensor:
    """Computes a gated MLP. More than ``MOST_ROWS`` rows are computed by ``many`` or, if it is None, by our
    function in parts.
    """
    if x.numel() > MOST_ROWS * x.shape[-1]:
        if many is not None:
            return many(x)
        parts = [gated(rows, matrix_of(gate), matrix_of(up)) for rows in x.flatten(0, -2).split(MOST_ROWS)]
        return down(torch.cat(parts).view(*x.shape[:-1], -1))  # type: ignore[no-any-return]
    out: Tensor = down(gated(x, matrix_of(gate), matrix_of(up)))
    return out


def _with_rotary(forward: Any) -> FunctionType | None:
    """Returns an attention module's forward that calls our rotary embedding in place of transformers'
    function.

    Returns None if the family's own function computes something else, or if the forward is wrapped.
    """
    if (own := rotary_of(forward)) is None:
        return None
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, _TRIED_ROWS), (1, _TRIED_ROWS), (_TRIED_ROWS,), (_TRIED_ROWS,))
    tried = [
        torch.randn(1, *shape, _TRIED_DIM, generator=generator, dtype=torch.float32, device="cpu")
        for shape in shapes
    ]
    try:
        expected, found = own(*tried), fp32.rotary(*tried)
    except (TypeError, RuntimeError, ValueError):
        return None
    if found is None or not all(map(equal, found, expected)):
        return None

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **keywords: Any) -> Any:
        fused = None if args or keywords else fp32.rotary(q, k, cos, sin)
        return own(q, k, cos, sin, *args, **keywords) if fused is None else fused

    return with_rotary(forward, rotary)

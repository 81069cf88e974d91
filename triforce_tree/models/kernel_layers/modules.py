"""Norms, gated MLPs and rotary embeddings of a model on a GPU, each computed by one kernel.

transformers computes them by about thirty elementwise operations per layer, each of which reads and writes
device memory. The class of a module does not decide. A module is replaced if our kernel gives the same bits
on a CPU for a stand-in: a module of the same class with a few weights. Other modules keep their own forwards.
Prefill uses the replacements wherever there are some, passes only if they are complete: ``torch.compile``
also fuses what is left.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from triforce_tree.kernels.norm.reference import add_rms_norm, row_rms_norm
from triforce_tree.kernels.pointwise.reference import ACTIVATIONS, gated, rotary
from triforce_tree.models.exact.device import NORM_KINDS, norm_epsilon
from triforce_tree.models.few_row import FewRow
from triforce_tree.models.kernel_layers.residual import Part, Structure, forward_by, structure_of
from triforce_tree.models.model_copy import (
    ROTARY,
    class_forward,
    hooked,
    listed_layers,
    rotary_of,
    text_decoder,
    with_rotary,
)

# Sizes of stand-ins: rows, features, and elements of a head.
_ROWS, _WIDTH, _HEAD = 5, 64, 16
_SEPARATE, _TOGETHER = ("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj")
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class _Replacement:
    """The replacement of a module, found by its own type and the types of its children."""

    types: tuple[type, ...]
    make: Callable[[Any], Callable[..., Any]]


class KernelLayers:
    """The modules of a model that kernels can replace, found once, and their replacement in copies.

    Args:
        model: it is not changed.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module) -> None:
        self._found: dict[str, _Replacement] = {}
        rotaries: dict[Any, FunctionType | None] = {}
        dtype = getattr(model, "dtype", torch.float32)
        inside = set(text_decoder(model).modules())
        for name, module in model.named_modules():
            if module not in inside or "forward" in vars(module) or dtype not in _FLOATS:
                continue
            own = class_forward(module)
            make: Callable[[Any], Callable[..., Any]] | None = None
            if (eps := norm_epsilon(module)) is not None:
                kind = _norm_kind(module)
                make = None if kind is None else partial(_norm_forward, eps, kind)
            elif (activation := _activation(module, dtype)) is not None:
                make = partial(_mlp_forward, activation)
            elif ROTARY in getattr(getattr(own, "__code__", None), "co_names", ()):
                if own not in rotaries:
                    rotaries[own] = _with_rotary(own, dtype)
                if (replaced := rotaries[own]) is not None:
                    make = partial(MethodType, replaced)
            elif (structure := structure_of(module, _stand_in)) is not None:
                make = _layer_maker(module, structure)
            if make is not None:
                self._found[name] = _Replacement(_types(module), make)

    def attach(self, copy: nn.Module) -> None:
        """Replaces the modules of a copy, except modules that were exchanged since or have forwards of their
        own.

        Args:
            copy: from ``shallow_copy`` of the model.
        """
        for name, module in copy.named_modules():
            if (replacement := self._replacement(name, module)) is not None:
                vars(module)["forward"] = replacement.make(module)

    def complete(self, copy: PreTrainedModel, few_rows: bool = True) -> bool:
        """Returns whether kernels compute everything in the decoder layers of a copy, so that
        ``torch.compile`` would find nothing to fuse.

        Args:
            few_rows: whether its linear layers must be few-row linears; else they must be torch's own.
        """
        layers = listed_layers(copy)
        names = {module: name for name, module in copy.named_modules()}

        def covers(module: nn.Module) -> bool:
            linear = isinstance(module, FewRow) if few_rows else type(module) is nn.Linear
            if linear or isinstance(module, nn.Dropout):
                return True
            if self._replacement(names[module], module) is None:
                return False
            # The kernel of a gated MLP computes its activation.
            return "down_proj" in module._modules or all(map(covers, module.children()))

        return layers is not None and all(map(covers, layers))

    def _replacement(self, name: str, module: nn.Module) -> _Replacement | None:
        found = self._found.get(name)
        same = found is not None and "forward" not in vars(module) and _types(module) == found.types
        return found if same else None


def _types(module: nn.Module) -> tuple[type, ...]:
    # Few-row linears stand for those of the model.
    children = module._modules.values()
    return type(module), *(nn.Linear if isinstance(each, FewRow) else type(each) for each in children)


def _stand_in(module: nn.Module, **changed: Any) -> Any:
    """Returns a module of the same class and settings with other parameters and children."""
    made = object.__new__(type(module))
    children, parameters = dict(module._modules), dict(module._parameters)
    for name, value in changed.items():
        (children if name in children else parameters)[name] = value
    vars(made).update(vars(module))
    made._modules, made._parameters = children, parameters
    for hooks in ("_forward_hooks", "_forward_pre_hooks"):
        vars(made)[hooks] = type(vars(module)[hooks])()
    return made


def _same(expected: object, found: Tensor) -> bool:
    if not isinstance(expected, Tensor) or (expected.shape, expected.dtype) != (found.shape, found.dtype):
        return False
    return torch.equal(expected, found)


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)


def _norm_kind(module: nn.Module) -> tuple[float, bool] | None:
    """Returns ``shift`` and ``late`` of ``row_rms_norm`` if a module computes an RMS norm, else None."""
    weight = module._parameters["weight"]
    assert weight is not None
    dtype, eps = weight.dtype, norm_epsilon(module)
    if dtype not in _FLOATS or eps is None:
        return None
    tried = _random(_WIDTH, dtype=dtype, seed=1)
    stand_in = _stand_in(module, weight=nn.Parameter(tried, requires_grad=False))
    x = _random(1, _ROWS, _WIDTH, dtype=dtype)
    for shift, late in NORM_KINDS:
        # Small numbers show where an epsilon is added.
        if all(_same_norm(stand_in, scale * x, tried, eps, shift, late) for scale in (1.0, 1e-3)):
            return shift, late
    return None


def _same_norm(module: nn.Module, x: Tensor, weight: Tensor, eps: float, shift: float, late: bool) -> bool:
    try:
        expected = type(module).forward(module, x)
    except (TypeError, AttributeError, RuntimeError):
        return False
    return _same(expected, row_rms_norm.definition(x, weight, eps, shift, late))


def _norm_forward(eps: float, kind: tuple[float, bool], module: Any) -> Callable[..., Any]:
    own = MethodType(type(module).forward, module)

    def forward(x: Tensor) -> Tensor:
        # Weights that a library keeps in fp32 make an fp32 result.
        if x.dtype != module.weight.dtype:
            return own(x)  # type: ignore[no-any-return]
        return row_rms_norm(x, module.weight, eps, *kind)

    return forward


def _layer_maker(layer: nn.Module, structure: Structure) -> Callable[[Any], Callable[..., Any]] | None:
    """Returns a function that makes the forward of a decoder layer, or None if its middle norm is not
    replaced.
    """
    norm = getattr(layer, structure.middle)
    if "forward" in vars(norm) or (eps := norm_epsilon(norm)) is None or (kind := _norm_kind(norm)) is None:
        return None
    return partial(_layer_forward, eps, kind, structure)


def _layer_forward(
    eps: float, kind: tuple[float, bool], structure: Structure, layer: Any
) -> Callable[..., Any]:
    norm = getattr(layer, structure.middle)
    own = MethodType(type(layer).forward, layer)

    def add_norm(attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        # Hooks on the norm, and weights that a library keeps in fp32.
        if hooked(norm) or not _alike(attended, residual, norm.weight):
            total = residual + attended
            return total, norm(total)
        return add_rms_norm(attended, residual, norm.weight, eps, *kind)

    fused = forward_by(add_norm, layer, structure)

    def forward(hidden_states: Tensor, *args: Any, **keywords: Any) -> Any:
        return own(hidden_states, *args, **keywords) if args else fused(hidden_states, **keywords)

    return forward


def _alike(x: Tensor, residual: Tensor, weight: Tensor) -> bool:
    return x.dtype == residual.dtype == weight.dtype and x.shape == residual.shape


def _activation(module: nn.Module, dtype: torch.dtype) -> str | None:
    """Returns the activation of a gated MLP by its name in ``gated``, or None for other modules."""
    children = module._modules
    separate = all(name in children for name in _SEPARATE)
    if not separate and not all(name in children for name in _TOGETHER):
        return None
    if len(inspect.signature(type(module).forward).parameters) != 2 or _hooked_activation(module):
        return None

    def both(x: Tensor) -> Tensor:
        return torch.cat([x, torch.cos(x)], -1)

    parts: dict[str, Callable[[Tensor], Any]] = {"gate_up_proj": both}
    if separate:
        parts = {"gate_proj": torch.positive, "up_proj": torch.cos}
    made = {name: Part(function) for name, function in {**parts, "down_proj": torch.tanh}.items()}
    stand_in, x = _stand_in(module, **made), 4 * _random(1, _ROWS, _WIDTH, dtype=dtype, seed=9)
    try:
        expected = type(module).forward(stand_in, x)
    except (TypeError, AttributeError, RuntimeError):
        return None
    for name in ACTIVATIONS:
        if _same(expected, _mlp(stand_in, separate, partial(gated.definition, activation=name), x)):
            return name
    return None


def _mlp(module: Any, separate: bool, gate_by: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> Tensor:
    gate, up = (module.gate_proj(x), module.up_proj(x)) if separate else module.gate_up_proj(x).chunk(2, -1)
    inner = gate_by(gate, up)
    # This frees their memory before the next product is allocated.
    del gate, up
    out: Tensor = module.down_proj(inner)
    return out


def _hooked_activation(module: nn.Module) -> bool:
    """Returns whether a module that the kernel would compute has a hook or a forward of its own."""
    computed = [child for name, child in module._modules.items() if name not in (*_SEPARATE, *_TOGETHER)]
    return any(child and (hooked(child) or "forward" in vars(child)) for child in computed)


def _mlp_forward(activation: str, module: Any) -> Callable[[Tensor], Tensor]:
    if _hooked_activation(module):
        return MethodType(type(module).forward, module)
    separate = "gate_proj" in module._modules
    return partial(_mlp, module, separate, partial(gated, activation=activation))


def _with_rotary(forward: Any, dtype: torch.dtype) -> FunctionType | None:
    """Returns an attention module's forward that calls our rotary embedding in place of transformers'
    function.

    Returns None if the family's own function computes something else, or if the forward is wrapped.
    """
    if (own := rotary_of(forward)) is None:
        return None
    # The keys are the dtypes that cos and sin may have: that of q, or a wider one.
    fits = {kind: _rotates(own, dtype, kind, _HEAD) for kind in {dtype, torch.float32}}
    partly = {kind: _rotates(own, dtype, kind, _HEAD // 2) for kind in fits}
    if not any(fits.values()):
        return None

    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **keywords: Any) -> Any:
        plain = not args and not keywords and q.dtype == k.dtype == dtype and cos.dim() == 3
        plain = plain and cos.shape[0] in (1, q.shape[0])
        same = partly if plain and cos.shape[-1] != q.shape[-1] else fits
        if plain and same.get(cos.dtype):
            return rotary(q, k, cos, sin)
        return own(q, k, cos, sin, *args, **keywords)

    return with_rotary(forward, rotated)


def _rotates(own: Any, dtype: torch.dtype, kind: torch.dtype, width: int) -> bool:
    """Returns whether a family's rotary embedding of ``width`` elements of a head equals ``rotary``."""
    q, k = (_random(2, heads, _ROWS, _HEAD, dtype=dtype, seed=heads) for heads in (2, 1))
    cos, sin = (_random(2, _ROWS, width, dtype=kind, seed=seed) for seed in (3, 4))
    try:
        expected = own(q, k, cos, sin)
        found = rotary.definition(q, k, cos, sin)
        return len(expected) == 2 and all(map(_same, expected, found))
    except (TypeError, RuntimeError, ValueError):
        return False

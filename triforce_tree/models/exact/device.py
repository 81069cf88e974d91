"""A copy of a model on a GPU such that a row's bits do not depend on the rows beside it.

Linear layers, the head too, go through our kernel with one order of sums for every number of rows, and norms
through one that gives each row to one program. Elementwise operations do not depend on the shape; compiled
layers round between them as uncompiled ones do (``fused_linears.fused_exactly``), and so do our kernels.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from triforce_tree.kernels.norm.reference import MOST_COLUMNS, row_layer_norm, row_rms_norm
from triforce_tree.models.few_row import FewRowLinear, biases_and_counters, with_head, with_linears
from triforce_tree.models.model_copy import hooked

_EPSILONS = ("variance_epsilon", "eps", "epsilon")
# Llama, Gemma, OLMo 2.
NORM_KINDS = ((0.0, False), (1.0, True), (0.0, True))
"""``shift`` and ``late`` of ``row_rms_norm`` in the families."""
_TRIED_ROWS = 3


class ExactLinear(FewRowLinear):
    """An ``nn.Linear`` of bf16 or fp16 on a GPU, for any number of rows, with one order of sums."""

    def few(self, x: Tensor) -> bool:
        return True

    def forward(self, x: Tensor) -> Tensor:
        from triforce_tree.kernels.linear.launch import pinned_linear

        return pinned_linear(x, self.weight, self.bias, self.counters)

    @staticmethod
    def together(x: Tensor, layers: Sequence[Any]) -> Tensor:
        from triforce_tree.kernels.linear.launch import pinned_linears

        return pinned_linears(x, [each.weight for each in layers], *biases_and_counters(layers))


def exact_linears_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a copy over the same weights with exact linear layers and an exact head. Modules that it cannot
    replace stay, and ``verify.row_bits`` finds them.
    """
    return with_head(with_linears(model, ExactLinear), ExactLinear)


class ExactNorm(nn.Module):
    """An RMS norm, row by row; it shares the weight.

    Args:
        norm: the module to replace.
        eps: added to the mean square.
        shift, late: see ``row_rms_norm``.
    """

    def __init__(self, norm: nn.Module, eps: float, shift: float, late: bool) -> None:
        super().__init__()
        self.weight = norm._parameters["weight"]
        self.eps = self.variance_epsilon = eps
        self._kind = (shift, late)

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        return row_rms_norm(x, self.weight, self.eps, *self._kind)


class ExactLayerNorm(nn.LayerNorm):
    """A layer norm that computes each row alone, so that its bits do not depend on the number of rows."""

    def forward(self, x: Tensor) -> Tensor:
        return row_layer_norm(x, self.weight, self.bias, self.eps)


@torch.no_grad()
def use_exact_norms(model: nn.Module) -> None:
    """Replaces those norms of a model copy whose results our norms reproduce."""
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            if "forward" in vars(norm) or hooked(norm):
                continue
            if type(norm) is nn.LayerNorm and len(norm.normalized_shape) == 1:
                norm.__class__ = ExactLayerNorm
            elif (eps := norm_epsilon(norm)) is not None and (kind := _kind(norm, eps)) is not None:
                setattr(parent, name, ExactNorm(norm, eps, *kind))


def norm_epsilon(module: nn.Module) -> float | None:
    """Returns the epsilon of a module that may be an RMS norm, or None for other modules."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 1 or len(module._parameters) > 1 or module._modules:
        return None
    one_input = len(inspect.signature(type(module).forward).parameters) == 2
    eps = next((getattr(module, name) for name in _EPSILONS if hasattr(module, name)), None)
    return eps if one_input and isinstance(eps, float) and weight.numel() <= MOST_COLUMNS else None


def _kind(module: nn.Module, eps: float) -> tuple[float, bool] | None:
    """Returns how a module applies its weight, found from its results on random rows, or None if it is not an
    RMS norm.
    """
    weight = module._parameters["weight"]
    assert weight is not None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, _TRIED_ROWS, weight.numel(), generator=generator, device="cpu").to(
        weight.device, weight.dtype
    )
    errors = []
    for shift, late in NORM_KINDS:
        worst = 0.0
        # Small numbers show where an epsilon is added.
        for tried in (x, 1e-3 * x):
            try:
                expected = type(module).forward(module, tried)
            except (TypeError, AttributeError, RuntimeError):
                return None
            if not isinstance(expected, Tensor) or expected.shape != tried.shape:
                return None
            found = row_rms_norm(tried, weight, eps, shift, late)
            largest = expected.float().abs().max().clamp_min(torch.finfo(torch.float32).tiny)
            worst = max(worst, float((found.float() - expected.float()).abs().max() / largest))
        errors.append(worst)
    least = min(errors)
    return NORM_KINDS[errors.index(least)] if least <= torch.finfo(weight.dtype).eps else None

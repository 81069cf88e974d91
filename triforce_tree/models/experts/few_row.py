"""Experts for inputs of few rows: an implementation of transformers' experts interface, and low-bit copies.

Both read the weights of each routed expert once (``kernels/linear/experts.py``), wait for nothing, and gather
no weights.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import (
    ExpertsInterface,
    batched_mm_experts_forward,
    grouped_mm_experts_forward,
)

from triforce_tree.kernels.device import describe
from triforce_tree.kernels.linear.configs import MOST_ROWS
from triforce_tree.kernels.linear.experts import expert_linear, quantise_experts
from triforce_tree.models.experts.modules import first_name, fused_weights

FEW_ROW_EXPERTS = "triforce_tree_few_rows"
"""Name of the implementation, for 16-bit weights on a GPU."""

FEW_ROW_OR_GROUPED = "triforce_tree_few_rows_or_grouped"
"""The same, with torch's grouped products for many rows, where a CUDA graph can capture these."""

_Linear = Callable[[Tensor, Tensor], Tensor]


def grouped_products_capture(device: torch.device) -> bool:
    """Returns whether a CUDA graph can capture torch's grouped product of bf16 matrices on this device."""
    # torch has a kernel for these two architectures; on others it copies the group sizes to the host.
    return device.type != "cuda" or describe(device).capability[0] in (9, 10)


def use_capturable_experts(clone: PreTrainedModel, device: torch.device) -> None:
    """Gives a clone an experts implementation that never waits for the host, unless it has one."""
    if not clone._can_set_experts_implementation():
        return
    before = getattr(clone.config.get_text_config(decoder=True), "_experts_implementation", None)
    after = capturable_experts(before, clone.dtype, device)
    if after is not None and after != before:
        clone.set_experts_implementation(after)


def capturable_experts(before: str | None, dtype: torch.dtype, device: torch.device) -> str | None:
    """Returns the experts implementation that takes the place of ``before``, so that a forward never waits
    for the host.

    Grouped products read the group sizes on the host, except for bf16 on some architectures; the eager loop
    over experts does so everywhere. Batched products gather each token's experts and never do; our own
    neither gather nor wait, but take 16-bit weights only.
    """
    if device.type == "cuda" and before in ("grouped_mm", "eager"):
        grouped = dtype == torch.bfloat16 and grouped_products_capture(device)
        few_rows = FEW_ROW_OR_GROUPED if grouped else FEW_ROW_EXPERTS
        return few_rows if dtype in (torch.bfloat16, torch.float16) else "batched_mm"
    if before == "grouped_mm" and not grouped_products_capture(device):
        return "batched_mm"
    return before


def _few_row_or_grouped(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    if hidden.shape[0] > MOST_ROWS:
        out: Tensor = grouped_mm_experts_forward(module, hidden, ids, weights)
        return out
    return _few_row_experts(module, hidden, ids, weights)


def _few_row_experts(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    first, last = fused_weights(module)
    if getattr(module, "_is_expert_parallel", False) or hidden.dtype != first.dtype:
        out: Tensor = batched_mm_experts_forward(module, hidden, ids, weights)
        return out

    def linear(weight: Tensor, bias: Tensor | None) -> _Linear:
        own = weight.transpose(1, 2) if module.is_transposed else weight
        return lambda x, experts: expert_linear(x, experts, own, None, bias, 16)

    biases = _biases(module)
    return _combined(module, linear(first, biases[0]), linear(last, biases[1]), hidden, ids, weights)


ExpertsInterface.register(FEW_ROW_EXPERTS, _few_row_experts)
ExpertsInterface.register(FEW_ROW_OR_GROUPED, _few_row_or_grouped)


def _biases(module: Any) -> tuple[Tensor | None, Tensor | None]:
    """Returns the biases of the first and the last product; None for a product without bias."""
    if not module.has_bias:
        return None, None
    return getattr(module, first_name(module) + "_bias"), module.down_proj_bias


def _combined(
    module: Any, first: _Linear, last: _Linear, hidden: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    """Returns the experts' outputs ``[R, D]``, weighted by the router, for hidden states ``[R, D]``."""
    inner = first(hidden, ids)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    out = last(inner, ids)
    if getattr(module, "has_post_expert_norm", False):
        out = module.post_expert_norm(out)
    weighted = out.view(*ids.shape, -1) * weights[..., None]
    # The outputs are added in the order of transformers, which does not depend on other tokens.
    return weighted.sum(1).to(hidden.dtype)


class LowBitExperts(nn.Module):
    """Holds experts with weights of 8 bits (a scale per row) or 4 (one per 128 columns of a row).

    Args:
        module: fused experts; biases and activation are shared, the weights are not kept.
        bits: 8 or 4.
        before: called with each weight before it is read.

    Attributes:
        inner: columns of the last product.
    """

    def __init__(self, module: nn.Module, bits: int, before: Callable[[Tensor], None] | None = None) -> None:
        super().__init__()
        self.bits, self.inner = bits, 0
        for name, weight in zip(("first", "last"), fused_weights(module), strict=True):
            if before is not None:
                before(weight)
            own: Any = module
            stored = weight.detach().transpose(1, 2) if own.is_transposed else weight.detach()
            words, scales = quantise_experts(stored, bits)
            self.inner = stored.shape[2]
            self.register_buffer(f"{name}_words", words)
            self.register_buffer(f"{name}_scales", scales)
        # Computes between the products; it is never called itself, so its hooks do not matter.
        self.shell = copy.copy(module)
        names = {first_name(module), "down_proj"}
        self.shell._parameters = {n: p for n, p in module._parameters.items() if n not in names}

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Returns ``[R, D]`` for hidden states ``[R, D]``, expert ids ``[R, k]`` and their router weights
        ``[R, k]``.
        """

        def linear(name: str, bias: Tensor | None) -> _Linear:
            words, scales = getattr(self, f"{name}_words"), getattr(self, f"{name}_scales")
            return lambda x, experts: expert_linear(x, experts, words, scales, bias, self.bits)

        biases = _biases(self.shell)
        return _combined(
            self.shell, linear("first", biases[0]), linear("last", biases[1]), hidden, ids, weights
        )

    def extra_repr(self) -> str:
        return f"bits={self.bits}"

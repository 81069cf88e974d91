"""Linear layers of the same input, which one launch computes.

A launch costs microseconds in addition to the bytes that it reads. Queries, keys and values, or gate and up,
have the same input.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from triforce_tree.models.few_row import FewRow

_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def share_inputs(model: nn.Module) -> None:
    """Lets those linear layers of a copy that usually have the same input be computed by one launch.

    Args:
        model: with ``FewRowLinear`` or ``LowBitLinear`` layers.
    """
    for module in model.modules():
        for names in _GROUPS:
            group = [module._modules.get(name) for name in names]
            if all(isinstance(each, FewRow) for each in group) and _fit(group):
                _Shared(group)


def _fit(group: Sequence[Any]) -> bool:
    """Returns whether layers can be computed together, and have no hooks, which must run before each one."""
    alike = all(
        (type(a), a.in_features, a.bias is None, a.bits) == (type(b), b.in_features, b.bias is None, b.bits)
        for a, b in pairwise(group)
    )
    return alike and not any(each._forward_pre_hooks or each._forward_hooks for each in group)


class _Shared:
    """Computes all layers when the first is called. The others return their outputs if they are called with
    the same tensor, else they compute on their own.
    """

    def __init__(self, group: Sequence[Any]) -> None:
        self._group = group
        self._input: Tensor | None = None
        self._outs: Sequence[Tensor] = ()
        for at, layer in enumerate(group):
            layer.forward = partial(self._call, at, type(layer).forward.__get__(layer))

    def _call(self, at: int, alone: Any, x: Tensor) -> Tensor:
        if at == 0:
            self._input = x if self._group[0].few(x) else None
            if self._input is not None:
                outs = self._group[0].together(x, self._group)
                self._outs = torch.split(outs, [each.out_features for each in self._group], -1)
        if x is not self._input:
            return alone(x)  # type: ignore[no-any-return]
        out = self._outs[at]
        if at == len(self._group) - 1:
            self._input, self._outs = None, ()
        return out

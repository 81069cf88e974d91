"""A KV cache that stores nothing and records how each layer of a model calls attention."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from triforce_tree.kernels.attention.plan import Heads
from triforce_tree.models.attention import AttentionParams


@dataclass(frozen=True)
class LayerCall:
    """How one layer calls attention: its module, the parameters, and its attention heads."""

    module: torch.nn.Module
    how: AttentionParams
    heads: Heads


class Recorder:
    """A ``KVCache`` that records each layer's call, by layer index."""

    def __init__(self) -> None:
        self.calls: dict[int, LayerCall] = {}

    def positions(self, count: int) -> Tensor:
        return torch.arange(count)

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, how: AttentionParams) -> Tensor:
        heads = Heads(q.shape[1], k.shape[1], k.shape[3], v.shape[3])
        self.calls[layer.layer_idx] = LayerCall(layer, how, heads)
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)

    def advance(self, count: int) -> None: ...

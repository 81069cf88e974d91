"""A KV cache that stores nothing and records how each layer of a model calls attention."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from triforce_tree.models.attention import AttentionParams


@dataclass(frozen=True)
class LayerCall:
    """How one layer calls attention: its module, the parameters, the shapes of its keys and queries."""

    module: torch.nn.Module
    how: AttentionParams
    kv_heads: int
    dim: int
    query_heads: int


class Recorder:
    """A ``KVCache`` that records the arguments of each layer's call; all dictionaries are by layer index."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.modules: dict[int, Any] = {}
        self.params: dict[int, AttentionParams] = {}
        self.widths: dict[int, tuple[int, int]] = {}
        self.query_heads: dict[int, int] = {}

    def positions(self, count: int) -> Tensor:
        return torch.arange(count)

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, how: AttentionParams) -> Tensor:
        self.keys[layer.layer_idx], self.modules[layer.layer_idx] = k, layer
        self.params[layer.layer_idx], self.query_heads[layer.layer_idx] = how, q.shape[1]
        self.widths[layer.layer_idx] = k.shape[-1], v.shape[-1]
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)

    def advance(self, count: int) -> None: ...

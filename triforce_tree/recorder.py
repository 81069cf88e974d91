"""A cache that keeps nothing and notes how each layer of a model attends."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from triforce_tree.caches.base import Rows, Variant


@dataclass(frozen=True)
class LayerCall:
    """How one layer calls attention: its module, what it asks for, the shapes of its keys and queries."""

    module: torch.nn.Module
    how: Variant
    kv_heads: int
    dim: int
    query_heads: int


class Recorder:
    """A cache of nothing, which notes the keys each layer handed over."""

    length = 0
    position = 0

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.modules: dict[int, Any] = {}
        self.variants: dict[int, Variant] = {}
        self.widths: dict[int, tuple[int, int]] = {}
        self.query_heads: dict[int, int] = {}

    def positions(self, rows: Rows) -> Tensor:
        return torch.full_like(rows.depths, self.position)

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, rows: Rows, how: Variant) -> Tensor:
        self.keys[layer.layer_idx], self.modules[layer.layer_idx] = k, layer
        self.variants[layer.layer_idx], self.query_heads[layer.layer_idx] = how, q.shape[1]
        self.widths[layer.layer_idx] = k.shape[-1], v.shape[-1]
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)

    def advance(self, count: int) -> None: ...

    def keep(self, rows: list[int]) -> None: ...

    def commit(self, count: int) -> None: ...

    def prefill_step(self, coming: int) -> tuple[int, int]:
        return 0, coming


def one_row(device: torch.device) -> Rows:
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return Rows(zero, torch.ones(1, 1, dtype=torch.bool, device=device), zero)

"""A KV cache that stores nothing and records how each layer of a model calls attention."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from triforce_tree.models.attention import AttentionParams
from triforce_tree.models.recurrent.running import ChunkPass, Rows, StateShapes


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
        self.states = StateRecorder()
        self.recurrent: ChunkPass | None = self.states
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


class StateRecorder:
    """A ``ChunkPass`` whose states are zeros, and which records their shapes."""

    def __init__(self) -> None:
        self._convolutions: list[tuple[int, int]] = []
        self._recurrences: list[tuple[int, int, int]] = []

    @property
    def shapes(self) -> StateShapes | None:
        """None if no layer has a state."""
        found = StateShapes(tuple(self._convolutions), tuple(self._recurrences))
        return found if found.convolutions or found.recurrences else None

    def convolve(self, number: int, new: Tensor, columns: int) -> Tensor:
        self._convolutions.append((new.shape[1], columns))
        return torch.nn.functional.pad(new, (columns, 0))

    def recur(self, number: int, rows: Rows) -> Tensor:
        self._recurrences.append((*rows.v.shape[2:], rows.k.shape[3]))
        return torch.zeros_like(rows.v)

    def state(self, number: int) -> Tensor | None:
        return None

    def keep(self, number: int, state: Tensor) -> None:
        _, heads, values, keys = state.shape
        self._recurrences.append((heads, values, keys))

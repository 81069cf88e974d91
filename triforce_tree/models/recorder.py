"""A KV cache that stores nothing and records how each layer of a model calls attention."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from triforce_tree.kernels.attention.plan import Heads
from triforce_tree.models.attention import AttentionParams
from triforce_tree.models.recurrent.running import ChunkPass, Rows, StateShapes


@dataclass(frozen=True)
class LayerCall:
    """How one layer calls attention: its module, the parameters, and its attention heads."""

    module: torch.nn.Module
    how: AttentionParams
    heads: Heads


class Recorder:
    """A ``KVCache`` that records each layer's call, by layer index."""

    def __init__(self) -> None:
        self.states = StateRecorder()
        self.recurrent: ChunkPass | None = self.states
        self.calls: dict[int, LayerCall] = {}

    def positions(self, count: int) -> Tensor:
        return torch.arange(count)

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, how: AttentionParams) -> Tensor:
        heads = Heads(q.shape[1], k.shape[1], k.shape[3], v.shape[3])
        self.calls[layer.layer_idx] = LayerCall(layer, how, heads)
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

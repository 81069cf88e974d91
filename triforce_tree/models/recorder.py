"""A KV cache that stores nothing and records how each layer of a model calls attention."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from triforce_tree.kernels.attention.plan import AttentionParams, Heads
from triforce_tree.models.model_copy import listed_layers
from triforce_tree.models.running_forward import ChunkPass, ScanInputs, StateShapes


@dataclass(frozen=True)
class LayerCall:
    """The way in which one layer calls attention: its module, the parameters, and its attention heads."""

    module: torch.nn.Module
    how: AttentionParams
    heads: Heads


class Recorder:
    """A ``KVCache`` that records each layer's call, by layer index.

    Args:
        device: the device of the model.

    Attributes:
        calls: parameters and heads of each layer's attention.
        index_dims: elements of a key of each layer's indexer.
        outputs: length of the tuples that decoder layers return; 0 where they return the hidden state alone.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.outputs = 0
        self.states = StateRecorder()
        self.recurrent: ChunkPass | None = self.states
        self.calls: dict[int, tuple[AttentionParams, Heads]] = {}
        self.index_dims: dict[int, int] = {}
        self.indexed = self

    def watch(self, model: PreTrainedModel) -> None:
        """Records what the decoder layers of a model copy return in its forwards; the copy is changed
        permanently.
        """

        def note(layer: nn.Module, args: Any, out: Any) -> None:
            self.outputs = len(out) if isinstance(out, tuple) else 0

        if layers := listed_layers(model):
            layers[0].register_forward_hook(note)

    def positions(self, count: int) -> Tensor:
        return torch.arange(count, device=self._device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        self.calls[layer] = (
            replace(params, selected=None),
            Heads(q.shape[1], k.shape[1], k.shape[3], v.shape[3]),
        )
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1).transpose(1, 2)

    def visible(self, queries: int) -> Tensor:
        return torch.ones(1, queries, queries, dtype=torch.bool, device=self._device)

    def index_keys(self, layer: int, new: Tensor, first: int) -> Tensor:
        self.index_dims[layer] = new.shape[2]
        return new

    def advance(self, count: int) -> None: ...


class StateRecorder:
    """A ``ChunkPass`` whose states are zeros, and which records their shapes."""

    def __init__(self) -> None:
        self._convolutions: list[tuple[int, int]] = []
        self._recurrences: list[tuple[int, int, int]] = []

    @property
    def shapes(self) -> StateShapes | None:
        """Returns the recorded shapes, or None if no layer has a state."""
        found = StateShapes(tuple(self._convolutions), tuple(self._recurrences))
        return found if found.convolutions or found.recurrences else None

    def convolve(self, number: int, new: Tensor, columns: int) -> Tensor:
        self._convolutions.append((new.shape[1], columns))
        return torch.nn.functional.pad(new, (columns, 0))

    def windows(self, number: int, width: int) -> None:
        return None

    def recur(self, number: int, inputs: ScanInputs) -> Tensor:
        self._recurrences.append((*inputs.v.shape[2:], inputs.k.shape[3]))
        return torch.zeros_like(inputs.v)

    def state(self, number: int) -> Tensor | None:
        return None

    def keep(self, number: int, state: Tensor) -> None:
        _, heads, values, keys = state.shape
        self._recurrences.append((heads, values, keys))

"""All decoder layers of a model on the CPU in one call, for few tokens.

In a small model Python takes as long for a layer's four calls of C functions as these functions do. So the
calls of a forward are noted, with buffers that stay, and later forwards of the same shape repeat them, as a
CUDA graph does on a GPU.
"""

from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from triforce_tree.kernels.cpu.fp32.library import Calls, library, noted
from triforce_tree.kernels.cpu.fp32.linear import MOST_ROWS
from triforce_tree.models.model_copy import hooked, other_layers
from triforce_tree.models.running_forward import running

# Forwards of a shape before their calls are noted, which takes as long as several forwards.
_BEFORE = 2
_aten = torch.ops.aten
_ALLOCATIONS = (
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
)


class _Watched(TorchDispatchMode):
    """Gives every second layer the same memory, and notices work that no C function of ours does.

    Nothing of a layer is used after the layer that follows it.

    Attributes:
        computes: whether an operation of torch has computed something.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory: dict[Hashable, Tensor] = {}
        self.computes = False
        self._layer = self._count = 0

    def next_layer(self) -> None:
        self._layer, self._count = 1 - self._layer, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self._count += 1
            return self.memory.setdefault((self._layer, self._count, out.shape, out.stride(), out.dtype), out)
        self.computes = self.computes or not func.is_view
        return out


def _weights_of(layers: Iterable[nn.Module]) -> list[tuple[dict[str, Any], str, Tensor, int, int | None]]:
    """Returns where each weight is, its address, and its version, which inference mode does not count."""
    places = [
        place for layer in layers for each in layer.modules() for place in (each._parameters, each._buffers)
    ]
    return [
        (place, name, weight, weight.data_ptr(), None if weight.is_inference() else weight._version)
        for place in places
        for name, weight in place.items()
        if weight is not None
    ]


class _Recording:
    """The calls of one forward of the layers.

    Args:
        inputs: hidden states ``[B, T, size]``, cosines and sines ``[B, T, D]``; they are copied.
    """

    def __init__(self, layers: "RecordedLayers", inputs: Sequence[Tensor], keywords: dict[str, Any]) -> None:
        self._inputs, self._weights = [each.clone() for each in inputs], _weights_of(layers.each)
        with noted() as made, _Watched() as watched:
            x, *angles = self._inputs
            for layer in layers.each:
                watched.next_layer()
                x = layer(x, position_embeddings=tuple(angles), **keywords)
        own = library()
        assert own is not None, "layers have been fused"
        self.out, self.repeatable = x, not watched.computes
        self._calls, self._memory = Calls(own.replay, made), watched.memory

    def repeat(self, inputs: Sequence[Tensor]) -> bool:
        """Computes ``out``; returns False if weights have changed, or if attention needs more workspace."""
        for place, name, weight, address, version in self._weights:
            if place[name] is not weight or weight.data_ptr() != address:
                return False
            if version is not None and weight._version != version:
                return False
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        return self._calls.repeat()


class RecordedLayers(nn.Module):
    """Stands for all decoder layers of a model copy while it computes.

    Args:
        layers: after ``use_fused_decoder_layers``.

    Attributes:
        most_rows: rows up to which the C library computes the layers.
    """

    most_rows = MOST_ROWS
    each: tuple[nn.Module, ...]

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        # In tuples, so that they are no modules of this one.
        self._list, self.each = (layers,), tuple(layers)
        # By view: what was recorded, or the number of forwards before that; None if nothing can be.
        self._known: WeakKeyDictionary[Any, dict[Hashable, _Recording | int | None]] = WeakKeyDictionary()

    def __getattr__(self, name: str) -> Any:
        """Returns what a model's forward reads of a layer, such as its kind of attention."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.each[0], name)

    def instead(self) -> AbstractContextManager[None]:
        """Returns a context in which the model calls this instead of its layers."""
        return other_layers(*self._list, {"0": self})

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **keywords: Any,
    ) -> Tensor:
        view: Any = running.attend
        if position_embeddings is None or not getattr(view, "repeats", False):
            return self._one_by_one(hidden_states, position_embeddings, keywords)
        inputs = hidden_states, *position_embeddings
        shapes = tuple(each.shape for each in inputs)
        key = shapes, torch.get_num_threads(), getattr(view, "refreshing", None)
        known = self._known.setdefault(view, {})
        found = known.setdefault(key, 0)
        if isinstance(found, _Recording):
            if found.repeat(inputs):
                return found.out
            found = 0
        if isinstance(found, int) and found >= _BEFORE:
            made = _Recording(self, inputs, keywords)
            known[key] = made if made.repeatable else None
            return made.out
        known[key] = None if found is None else found + 1
        return self._one_by_one(hidden_states, position_embeddings, keywords)

    def _one_by_one(
        self, x: Tensor, angles: tuple[Tensor, Tensor] | None, keywords: dict[str, Any]
    ) -> Tensor:
        for layer in self.each:
            x = layer(x, position_embeddings=angles, **keywords)
        return x


def recorded_layers(layers: nn.ModuleList) -> RecordedLayers | None:
    """Returns what stands for the layers of a model copy, if the C library computes all of them.

    Args:
        layers: after ``use_fused_decoder_layers``.
    """
    if len(layers) < 2 or any("forward" not in vars(layer) or hooked(layer) for layer in layers):
        return None
    return RecordedLayers(layers)

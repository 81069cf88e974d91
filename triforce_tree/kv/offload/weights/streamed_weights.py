"""Weights of decoder layers in host memory, copied to the device layer by layer as they are needed.

    host     one page-locked block a layer: all its linear weights
    device   two slots of one layer each; layer i's parameters are always views of slot i % 2

While layer i computes, layer i + 1's weights are copied, and the first layers' for the next pass are copied
while no weights are in use. Norms, biases, embeddings and the head stay on the device. Of fused experts only
those are copied that a layer's tokens are routed to (``streamed_experts.py``).
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from triforce_tree.kv.offload.copy_stream import CopyEvent, CopyStream
from triforce_tree.kv.offload.layout import BlockLayout
from triforce_tree.kv.offload.pinned import HostMemory, HostMemoryError
from triforce_tree.kv.offload.weights.streamed_experts import StreamedExperts
from triforce_tree.models.experts.modules import expert_modules, fused_weights
from triforce_tree.models.few_row import quantisation
from triforce_tree.models.model_copy import decoder_layers

SLOTS = 2
"""Layers on the device: one that computes, one that is copied."""

_REMEDY = "free host memory, or use a smaller model"
_WHOLE = "keep the weights on the device (offload_weights=False)"


class StreamedWeights:
    """The weights of a model's plain linear layers and fused experts inside its decoder layers, on the host.

    The model is changed in place: its parameters are rebound, and a hook of each layer waits for its weights.
    Clones made later inherit the hook; one whose layers have other weights waits for nothing. Clones made
    before have no hook and must not be used any more.

    Args:
        model: any transformers model, on any device.
        device: where it computes from now on.
        progress: called with the bytes of each layer after they were copied to host memory.
        most: limit on the bytes of host memory that they take; None for what the machine has.
        linears: False keeps the linear layers on the device, so that only experts are streamed.

    Attributes:
        bytes: the bytes of the weights, which are all on the host.
        slot_bytes: the bytes of the slots on the device; ``least_slot_bytes`` is this without the experts
            that stay there.
        copies: layers whose linear weights were copied to the device so far.
        experts: the fused experts; empty for models without.
        capturable: whether a CUDA graph can capture a forward: only experts are streamed.

    Raises:
        ValueError: layers share weights, or have no plain linear layer; nothing is left to stream.
        HostMemoryError: host memory is short. Weights that had been moved by then stay in ordinary host
            memory, so that a model on the CPU still works.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device | str,
        progress: Callable[[int], None] | None = None,
        most: int | None = None,
        linears: bool = True,
    ) -> None:
        self.device = torch.device(device)
        self.experts = StreamedExperts(model, self.device)
        layers = len(decoder_layers(model))
        self._weights = _linear_weights(model) if linears else [[] for _ in range(layers)]
        if not linears and not len(self.experts):
            raise ValueError(f"{type(model).__name__} has no fused experts to stream; {_WHOLE}")
        self.capturable = not linears
        self._layouts = [BlockLayout.of(weights) for weights in self._weights]
        sizes = [layout.bytes for layout in self._layouts]
        size = max(sizes)
        self.bytes = sum(sizes) + self.experts.bytes
        self._linear_slot_bytes = size * SLOTS
        if most is not None and (total := self.bytes) > most:
            raise HostMemoryError(
                f"the weights of the layers take {total / 2**30:.1f} GiB of host memory, and host_memory "
                f"allows {most / 2**30:.1f} GiB; allow more, or {_REMEDY}"
            )
        self._layer_of = {id(w): i for i, weights in enumerate(self._weights) for w in weights}
        self._memory = HostMemory(self.device.type == "cuda", "streamed weights", _REMEDY)
        self._host: list[Tensor] = []
        self._slots: list[Tensor] = []
        try:
            for layer, own in enumerate(sizes):
                # One by one: the memory of a layer in the model is free again after its copy.
                taken = own + self.experts.layer_bytes(layer)
                self._memory.check(taken)
                self._host.append(self._memory.take((own,), torch.uint8))
                self._bind(layer, self._host[-1], copy=True)
                self.experts.move(layer, self._memory)
                if progress:
                    progress(taken)
            self._move_the_rest(model)
            self._slots = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(SLOTS)]
            self.experts.make_slots()
        except BaseException:
            for layer, block in enumerate(self._host):
                self._bind(layer, block)
            self.experts.restore()
            self._host, self._slots = [], []
            self._memory.release()
            raise
        for layer in range(layers):
            self._bind(layer, self._slots[layer % SLOTS])
        self.experts.attach()
        self._copy_stream = CopyStream(self.device)
        if self._copy_stream.stream is not None:
            for slot in self._slots:
                # Where close() is never called, the memory is not reused while a copy runs.
                slot.record_stream(self._copy_stream.stream)
        self._slot_layers: list[int | None] = [None] * SLOTS
        self._events = [CopyEvent(None)] * SLOTS
        self._current: int | None = None
        self._paused = self.closed = False
        self._copied = self.copies = 0
        for layer, module in enumerate(decoder_layers(model)):
            if linears:
                module.register_forward_pre_hook(self._hook(layer))

    @property
    def slot_bytes(self) -> int:
        return self._linear_slot_bytes + self.experts.slot_bytes

    @property
    def least_slot_bytes(self) -> int:
        return self._linear_slot_bytes + self.experts.least_slot_bytes

    @property
    def arrangement(self) -> int:
        """Returns a number that changes with the addresses of weights on the device, which graphs keep."""
        return self.experts.arrangement

    def keep_experts(self, layers: int) -> None:
        """See ``StreamedExperts.keep``."""
        self.experts.keep(layers)

    @property
    def copied(self) -> int:
        """Returns the bytes that were copied to the device so far; with experts it waits for the device."""
        return self._copied + self.experts.copied

    def pass_bytes(self, tokens: int) -> int:
        """Returns the expected bytes that a forward of ``tokens`` tokens copies to the device."""
        return self.bytes - self.experts.bytes + self.experts.pass_bytes(tokens)

    def _bind(self, layer: int, block: Tensor, copy: bool = False) -> None:
        """Makes parameters views of their places in a block; with ``copy`` their values are copied there."""
        for weight, view in zip(self._weights[layer], self._layouts[layer].cut(block), strict=True):
            if copy:
                view.copy_(weight.data)
            weight.data = view

    def _clear(self) -> None:
        """Binds the parameters of linear layers to empty tensors."""
        for weights in self._weights:
            for weight in weights:
                weight.data = weight.data.new_empty(0)

    def _move_the_rest(self, model: PreTrainedModel) -> None:
        self._clear()
        self.experts.clear()
        moved: Any = model
        moved.to(self.device)

    def _hook(self, layer: int) -> Callable[[nn.Module, Any], None]:
        own = {id(weight) for weight in self._weights[layer]}

        def wait(module: nn.Module, _: Any) -> None:
            if not self._paused and any(id(weight) in own for weight in module.parameters()):
                self.wait_for_layer(layer)

        # A plain function: deep copies of the model share it.
        return wait

    def wait_for_layer(self, layer: int) -> None:
        """Lets the computation wait for ``layer``'s weights, and begins to copy those of the next one.

        Fastest where layers come in order, the first after the last; any other order is correct as well. The
        work of the layer before must be queued by now: its slot is the next to be filled.

        Raises:
            RuntimeError: the memory was freed, or a CUDA graph is being captured, which would not wait.
        """
        self.check()
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("streamed weights cannot be captured: a graph would not wait for them")
        if layer == self._current:
            return
        self._current = None
        slot = self._fetch(layer)
        self._events[slot].wait()
        self._current = layer
        following = (layer + 1) % len(self._host)
        # The first layer may share a slot with the last one.
        if following % SLOTS != slot:
            self._fetch(following)

    def _fetch(self, layer: int) -> int:
        """Copies a layer to its slot, unless it is there or being copied; returns the slot."""
        slot = layer % SLOTS
        if self._slot_layers[slot] != layer:
            self._slot_layers[slot] = None
            host = self._host[layer]
            self._events[slot] = self._copy_stream.copy(self._slots[slot][: host.nbytes], host)
            self._slot_layers[slot] = layer
            self._copied += self._host[layer].nbytes
            self.copies += 1
        return slot

    def bring(self, weight: Tensor) -> None:
        """Waits for the layer of a parameter; of a parameter with experts it copies all of them.

        Nothing for a parameter that stays on the device.
        """
        if self.experts.bring(weight):
            return
        layer = self._layer_of.get(id(weight))
        if layer is not None:
            self.wait_for_layer(layer)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Returns a context in which layers are called without computing, and do not wait for weights."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def check(self) -> None:
        """Raises RuntimeError where the memory was freed."""
        if self.closed:
            raise RuntimeError("the streamed weights were freed by close(); load the model again")

    def close(self) -> None:
        """Frees all memory; the model cannot be used afterwards."""
        if self.closed:
            return
        self.closed = True
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._clear()
        self.experts.close()
        self._host, self._slots = [], []
        self._memory.release()


def check_level_one(bits: int) -> None:
    """Raises ValueError where the retrieval model would run on the streamed weights."""
    if bits == 16:
        raise ValueError(
            "retrieval_weight_bits=16 lets the retrieval model use the target's own weights, which are "
            "streamed; use retrieval_weight_bits=8 or 4, whose copy stays on the device, or levels=1 or 2"
        )


def _linear_weights(model: PreTrainedModel) -> list[list[Tensor]]:
    """Returns the weights of each decoder layer's plain linear layers, which a copy would quantise."""
    name = type(model).__name__
    if (method := quantisation(model)) is not None:
        raise ValueError(
            f"{name} is quantised ({method}), and only plain linear layers can be streamed; {_WHOLE}, or "
            "give the checkpoint of 16 bits"
        )
    layers = decoder_layers(model)
    found: list[dict[int, Tensor]] = [
        {id(module.weight): module.weight for module in layer.modules() if type(module) is nn.Linear}
        for layer in layers
    ]
    if not all(found):
        raise ValueError(
            f"{name} has a decoder layer without a plain nn.Linear and cannot be streamed; {_WHOLE}"
        )
    uses = Counter(id(w) for _, w in model.named_parameters(remove_duplicate=False))
    experts = [id(weight) for module in expert_modules(layers) for weight in fused_weights(module)]
    if any(uses[key] > 1 for own in [*found, experts] for key in own):
        raise ValueError(f"{name} shares weights of a decoder layer, which cannot be streamed; {_WHOLE}")
    return [[*own.values()] for own in found]

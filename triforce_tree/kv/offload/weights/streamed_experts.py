"""Fused experts of decoder layers in host memory, of which each call copies those that its tokens need.

    host     one page-locked block a layer: its experts' weights [E, ...]
    device   one layer's weights [E, ...]; the parameters of all layers of one kind are views of them.
             Where memory is left, the first layers have slots of their own, in which experts stay

Before a module of experts computes, a hook copies the experts that the router chose and that its slots do not
hold yet: expert e is in slot e, so every implementation of the experts finds it, and none reads the others.
The routing is read on the device (``kernels/exchange/experts.py``): nothing waits for the host, and a CUDA
graph can capture it. Biases and routers stay on the device.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from triforce_tree.kernels import exchange
from triforce_tree.kernels.exchange import link
from triforce_tree.kv.offload.layout import BlockLayout
from triforce_tree.kv.offload.pinned import HostMemory
from triforce_tree.models.experts.modules import (
    distinct,
    experts_per_token,
    fused_weights,
    is_fused,
    routing,
)
from triforce_tree.models.model_copy import decoder_layers

# Widest words first: their loads are as wide as the layout allows.
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class _Kind(BlockLayout):
    """Describes the weights ``[E, ...]`` of a module, which modules of one kind share."""

    @property
    def experts(self) -> int:
        return self.tensors[0][0][0]

    @property
    def expert_bytes(self) -> int:
        """Returns the bytes of one expert."""
        return sum(self.sizes) // self.experts


class _Slots:
    """Holds device memory for the experts of one layer, and which layer's experts each slot has."""

    def __init__(self, kind: _Kind, device: torch.device) -> None:
        def integers(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.weights = kind.cut(torch.empty(kind.bytes, dtype=torch.uint8, device=device))
        self.held, self.moves = integers(kind.experts).fill_(-1), integers(kind.experts)
        self.count, self.fetched = integers(1), integers(1, torch.int64)
        self.every = torch.arange(kind.experts, device=device)


class StreamedExperts:
    """The experts of a model's decoder layers, on the host.

    The model is changed in place: :meth:`move` puts the weights into host memory, :meth:`attach` binds the
    parameters to slots on the device and adds a hook to each module of experts. Clones made later inherit the
    hook; one whose modules have other weights copies nothing.

    Args:
        model: any transformers model; families without fused experts have nothing to stream.
        device: where it computes.

    Attributes:
        bytes: the bytes of the weights, which are all on the host.
        slot_bytes: the bytes of the slots on the device; ``least_slot_bytes`` is this without the layers that
            stay there.
        arrangement: changes with the addresses of the slots, which captured graphs keep.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self.device = device
        self._modules: list[nn.Module] = []
        self._layer_of: list[int] = []
        for layer, block in enumerate(decoder_layers(model)):
            found = [module for module in block.modules() if is_fused(module)]
            self._modules += found
            self._layer_of += [layer] * len(found)
        self._kinds = [_Kind.of(fused_weights(module)) for module in self._modules]
        self.bytes = sum(kind.bytes for kind in self._kinds)
        self.least_slot_bytes = self.slot_bytes = sum(kind.bytes for kind in set(self._kinds))
        self.arrangement = 0
        self._number_of = {
            id(weight): number for number, m in enumerate(self._modules) for weight in fused_weights(m)
        }
        self._per_token = experts_per_token(model.config.get_text_config(decoder=True))
        self._host: list[list[Tensor]] = []
        # The slots of each module. Modules of one kind that have no slots of their own share the same ones.
        self._slots: list[_Slots] = []
        self._resident = self._copied_before = 0

    def __len__(self) -> int:
        return len(self._modules)

    def layer_bytes(self, layer: int) -> int:
        """Returns the bytes of host memory of one decoder layer's experts."""
        return sum(k.bytes for k, own in zip(self._kinds, self._layer_of, strict=True) if own == layer)

    def move(self, layer: int, memory: HostMemory) -> None:
        """Copies the experts of one decoder layer into host memory."""
        # The pages stay locked for as long as the model's hooks copy from them.
        self._memory = memory
        for number in [n for n, own in enumerate(self._layer_of) if own == layer]:
            kind, module = self._kinds[number], self._modules[number]
            block = kind.cut(memory.take((kind.bytes,), torch.uint8))
            for weight, view in zip(fused_weights(module), block, strict=True):
                view.copy_(weight.data)
            self._host.append(block)
            _bind(module, block)

    def restore(self) -> None:
        """Binds the parameters of all modules that were moved to their host memory."""
        for module, block in zip(self._modules, self._host, strict=False):
            _bind(module, block)

    def clear(self) -> None:
        """Binds the parameters to empty tensors."""
        for module in self._modules:
            for weight in fused_weights(module):
                weight.data = weight.data.new_empty(0)

    def attach(self) -> None:
        """Binds the parameters to the slots, and lets every call of a module copy what it needs."""
        self._bind_slots()
        for number, module in enumerate(self._modules):
            module.register_forward_pre_hook(self._hook(number), with_kwargs=True)

    def make_slots(self, resident: int = 0) -> None:
        """Takes the device memory.

        Args:
            resident: how many modules, the first ones, get slots of their own.
        """
        shared: dict[_Kind, _Slots] = {}
        self.slot_bytes = 0
        for number, kind in enumerate(self._kinds):
            slots = shared.get(kind) if number >= resident else None
            if slots is None:
                slots = _Slots(kind, self.device)
                self.slot_bytes += kind.bytes
            if number >= resident:
                shared[kind] = slots
            self._slots.append(slots)
        self._resident = resident

    def keep(self, resident: int) -> None:
        """Lets the experts of the first ``resident`` modules stay on the device once they were copied.

        Graphs that were captured before must not be replayed any more.

        Raises:
            torch.OutOfMemoryError: the device lacks the memory; then no module's experts stay.
        """
        resident = min(resident, len(self) - 1)
        if not self._modules or resident == self._resident:
            return
        self._free_slots()
        try:
            self.make_slots(resident)
        except torch.OutOfMemoryError:
            self._slots = []
            self.make_slots()
            raise
        finally:
            self._bind_slots()

    def _free_slots(self) -> None:
        self._copied_before = self.copied
        self.arrangement += 1
        self.clear()
        self._slots = []

    def _bind_slots(self) -> None:
        for module, slots in zip(self._modules, self._slots, strict=True):
            _bind(module, slots.weights)

    def _hook(self, number: int) -> Callable[[nn.Module, Any, Any], None]:
        own = {id(weight) for weight in fused_weights(self._modules[number])}

        def copy_routed(module: nn.Module, args: Any, kwargs: Any) -> None:
            if any(id(weight) in own for weight in module.parameters(recurse=False)):
                self._fetch(number, routing(args, kwargs))

        # A plain function: deep copies of the model share it.
        return copy_routed

    def _fetch(self, number: int, ids: Tensor | None) -> None:
        """Copies the experts of these indices that their slots do not hold; None for all experts."""
        if not self._slots:
            raise RuntimeError("the streamed weights were freed by close(); load the model again")
        slots = self._slots[number]
        ids = slots.every if ids is None else ids
        try:
            exchange.choose_experts(ids, slots.held, slots.moves, slots.count, slots.fetched, number)
            begun = link.begin()
            for slot, host in zip(slots.weights, self._host[number], strict=True):
                exchange.fetch_experts(_words(slot), _words(host), slots.moves, slots.count)
            link.end(begun, self._kinds[number].expert_bytes, slots.count)
        except BaseException:
            # The copies that were listed may be incomplete.
            slots.held.fill_(-1)
            raise

    def bring(self, weight: Tensor) -> bool:
        """Copies all experts of the module of a parameter; returns False if it is not streamed."""
        number = self._number_of.get(id(weight))
        if number is not None:
            self._fetch(number, None)
        return number is not None

    @property
    def copied(self) -> int:
        """Returns the bytes copied to the device so far; waits for the device."""
        distinct_slots = {id(s): (s, k) for s, k in zip(self._slots, self._kinds, strict=False)}
        now = sum(int(slots.fetched) * kind.expert_bytes for slots, kind in distinct_slots.values())
        return self._copied_before + now

    def pass_bytes(self, tokens: int) -> int:
        """Returns the expected bytes that a pass over ``tokens`` tokens copies, if routing is even.

        Of modules whose experts stay nothing is counted: sooner or later they are all there.
        """
        users = Counter(map(id, self._slots))
        return int(
            sum(
                kind.expert_bytes * distinct(kind.experts, self._per_token or kind.experts, tokens)
                for kind, slots in zip(self._kinds, self._slots, strict=True)
                if users[id(slots)] > 1
            )
        )

    def close(self) -> None:
        """Drops all memory; the model cannot be used afterwards."""
        self._free_slots()
        self._host = []


def _bind(module: nn.Module, views: Sequence[Tensor]) -> None:
    """Makes the weights of a module of experts these views."""
    for weight, view in zip(fused_weights(module), views, strict=True):
        weight.data = view


def _words(weight: Tensor) -> Tensor:
    """Returns a weight ``[E, ...]`` as ``[E, n]`` of the widest words that fit an expert."""
    experts = weight.view(weight.shape[0], -1)
    size = experts.shape[1] * experts.itemsize
    return experts.view(next(word for word in _WORDS if size % word.itemsize == 0))

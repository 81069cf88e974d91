"""Copies a model that accelerate has spread over devices, host memory or disk to one device.

A draft that is on another device than its target is copied in the same way. Each model has to be on one
device, because its forwards are CUDA graphs over buffers of that device. The copy shares all tensors that are
already on the device with the user's model, which is not changed and keeps its hooks.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from triforce_tree.models.few_row import quantisation
from triforce_tree.models.model_copy import shallow_copy
from triforce_tree.models.supported import UnsupportedModelError
from triforce_tree.planning.machine import available_device_bytes

_ELSEWHERE = ("cpu", "disk")


def on_one_device(model: PreTrainedModel, device: torch.device | None = None) -> PreTrainedModel:
    """Returns a copy without hooks on one device; a model that is already there is returned itself.

    Args:
        model: a model from ``from_pretrained(device_map=...)`` or ``accelerate.dispatch_model``. A quantised
            model is returned unchanged (and refused later), since its library manages its weights.
        device: the device of the copy; by default the first GPU of its ``hf_device_map``, or the CPU.

    Raises:
        ValueError: the device has too little memory left.
        UnsupportedModelError: the model has weights without data.
    """
    places = list((getattr(model, "hf_device_map", None) or {}).values())
    spread = len({str(place) for place in places}) > 1 or "disk" in places
    hooks = [hook for module in model.modules() for hook in _hooks(module)]
    without_data = any(weight.device.type == "meta" for weight in model.parameters())
    spread = bool(hooks) and (spread or without_data)
    if without_data and not spread:
        raise UnsupportedModelError(
            f"{type(model).__name__} has weights without data (meta tensors); load it with its weights"
        )
    if not spread and device is not None and model.device != device:
        spread, places = True, [str(model.device)]
    if not spread or quantisation(model) is not None:
        return model
    if device is None:
        # accelerate gives a GPU as its number or as a torch device.
        places += [getattr(hook, "execution_device", None) for hook in hooks]
        named = (place for place in places if place is not None and str(place) not in _ELSEWHERE)
        device = torch.device(next(named, "cpu"))
    _check_memory(model, device, places)
    copy = shallow_copy(model)
    loaded = _unloaded(copy)
    moved: dict[int, Any] = {}
    for module in copy.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    value = loaded.get(id(tensor), tensor)
                    if id(tensor) not in moved:
                        moved[id(tensor)] = _placed(tensor, value, device)
                    tensors[name] = moved[id(tensor)]
        _unhook(module)
    vars(copy).pop("hf_device_map", None)
    copy.tie_weights()
    return copy


def _check_memory(model: PreTrainedModel, device: torch.device, places: list[Any]) -> None:
    tensors = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    coming = sum(t.numel() * t.element_size() for t in tensors.values() if t.device != device)
    free = available_device_bytes(device, None)
    if free is not None and coming > free:
        spread = ", ".join(sorted({str(place) for place in places}))
        where = f"spread over {spread}" if len(places) > 1 else f"on {spread}"
        raise ValueError(
            f"{type(model).__name__} is {where}, and {device} has "
            f"{free / 2**30:.1f} GiB left for the {coming / 2**30:.1f} GiB that are elsewhere; give its "
            "folder with offload_weights=True, which streams the weights of its layers from host memory"
        )


def _hooks(module: nn.Module) -> list[Any]:
    """Returns accelerate's hooks of a module."""
    hook = vars(module).get("_hf_hook")
    return [] if hook is None else list(getattr(hook, "hooks", None) or [hook])


def _unloaded(copy: nn.Module) -> dict[int, Tensor]:
    """Returns the values of meta tensors by ``id``; accelerate keeps them in the hook of an outer module."""
    loaded: dict[int, Tensor] = {}
    for module in copy.modules():
        for each in _hooks(module):
            values = getattr(each, "weights_map", None)
            if values is None:
                continue
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                if tensor.device.type == "meta" and id(tensor) not in loaded and name in values:
                    loaded[id(tensor)] = values[name]
    return loaded


def _placed(tensor: Tensor, value: Tensor, device: torch.device) -> Tensor:
    """Returns ``tensor`` if it is on the device, else a copy of ``value`` there, a Parameter if it is one."""
    if value is tensor and tensor.device == device:
        return tensor
    new = value.detach().to(device)
    return nn.Parameter(new, requires_grad=False) if isinstance(tensor, nn.Parameter) else new


def _unhook(module: nn.Module) -> None:
    """Restores the original ``forward`` of a module of the copy, without a call of the shared hook."""
    own = vars(module)
    own.pop("_hf_hook", None)
    before = own.pop("_old_forward", None)
    if before is not None:
        own.pop("forward", None)
        if getattr(before, "__func__", None) is not type(module).forward:
            own["forward"] = before
    for name in ("to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa"):
        own.pop(name, None)

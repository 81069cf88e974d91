"""Adds an adapter of peft in a folder to its base model. Adapters are read from safetensors only."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from triforce_tree.loading.model_folder import ADAPTER_WEIGHTS, in_one_line

_NAME = "default"


def add_adapter(model: PreTrainedModel, folder: Path, merged: bool = False) -> PreTrainedModel:
    """Adds an adapter to a model, in place, and returns the model.

    Its weights get the dtype of the layers that they belong to.

    Args:
        folder: has been checked by ``model_folder.base_and_adapter``.
        merged: add the adapter to the model's weights, so that no layer differs from those of the base.

    Raises:
        ValueError: the adapter does not fit the model, or cannot be merged.
        torch.OutOfMemoryError: device memory is short.
    """
    # peft is imported here, because it is optional and takes a second.
    from peft import PeftConfig, PeftModel

    try:
        _widen(model, folder)
        config = PeftConfig.from_pretrained(str(folder))
        config.inference_mode = True
        adapted = PeftModel(model, config, _NAME, autocast_adapter_dtype=False)
        loaded = adapted.load_adapter(
            str(folder),
            _NAME,
            is_trainable=False,
            autocast_adapter_dtype=False,
            torch_device=str(model.device),
        )
        _check_all(adapted, loaded.missing_keys, loaded.unexpected_keys)
        adapted.eval()
        if merged:
            _separate(adapted)
        whole: Any = adapted.merge_and_unload() if merged else adapted.get_base_model()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # third-party code may raise anything on files of unknown origin
        done, remedy = "added to", "give an adapter of this model, or one that was saved anew"
        if merged:
            done, remedy = "merged into", f"{remedy}, or run without torchrun and offload_weights=True"
        raise ValueError(
            f"the adapter in {str(folder)!r} cannot be {done} {type(model).__name__} ({in_one_line(error)}); "
            f"{remedy}"
        ) from error
    ready: PreTrainedModel = whole
    return ready


def _widen(model: Any, folder: Path) -> None:
    """Gives a model the rows of embeddings and head that its adapter has for new tokens."""
    with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as weights:
        rows = {name: weights.get_slice(name).get_shape()[0] for name in weights.keys()}  # noqa: SIM118
    names = {module: name for name, module in model.named_modules()}
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    size = rows.get(f"base_model.model.{names[embeddings]}.weight", 0)
    tied = head is None or head.weight is embeddings.weight
    if size > len(embeddings.weight) and (tied or rows.get(f"base_model.model.{names[head]}.weight") == size):
        model.resize_token_embeddings(size, mean_resizing=False)


def _separate(adapted: Any) -> None:
    """Gives layers with adapters weights of their own where these are shared, as by tied embeddings.

    An adapter that is merged into a shared weight would change the other layers that have it, too.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    modules = [*adapted.modules()]
    uses = Counter(id(weight) for module in modules for weight in module._parameters.values())
    for base in [module.get_base_layer() for module in modules if isinstance(module, BaseTunerLayer)]:
        for name, weight in base._parameters.items():
            if weight is not None and uses[id(weight)] > 1:
                setattr(base, name, nn.Parameter(weight.detach().clone(), weight.requires_grad))


def _check_all(adapted: nn.Module, missing: Iterable[str], unexpected: Sequence[str]) -> None:
    """Raises ValueError if weights of an adapter were not in its file, or weights in the file not used."""
    # Of embeddings that are saved modules peft may write a second copy, which it does not read.
    if unknown := [name for name in unexpected if ".modules_to_save." not in name]:
        raise ValueError(f"it has weights that no layer takes, such as {unknown[0]}")
    absent, filled = {}, set()
    lacking = set(missing)
    for name, weight in adapted.named_parameters(remove_duplicate=False):
        if name in lacking:
            absent[name] = id(weight)
        else:
            filled.add(id(weight))
    # A weight that several layers share is stored under one of its names.
    if lacks := [name for name, weight in absent.items() if weight not in filled]:
        raise ValueError(f"it lacks {lacks[0]}")

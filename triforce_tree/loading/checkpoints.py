"""Models and tokenizers from folders, hub ids or objects; safetensors only."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from triforce_tree.config import HierarchyConfig
from triforce_tree.kv.offload.streamed_weights import StreamedWeights
from triforce_tree.loading.model_files import checked, configuration, folder_of, in_one_line, needs_code
from triforce_tree.models.tensor_parallel import shard
from triforce_tree.planning.machine import device_room
from triforce_tree.planning.memory_map import tensor_bytes, weights_fit
from triforce_tree.runtime.devices import device_of
from triforce_tree.runtime.distributed import Group, local_size

PAIR = Path(__file__).parents[1] / "pair"
# One of these lies wherever there is a tokenizer.
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)


def unwrapped(source: Any, name: str = "model") -> PreTrainedModel | str | Path:
    """A model or where it lies, as it was given; of a model under ``torch.compile`` the model inside it.

    PEFT is asked by name, as it need not be installed.

    Args:
        name: what to call it in errors.

    Raises:
        TypeError: it is none of these, or its adapters are not part of its weights.
    """
    source = getattr(source, "_orig_mod", source)
    kind = type(source).__name__
    if hasattr(source, "peft_config") or any(base.__name__ == "PeftModel" for base in type(source).__mro__):
        raise TypeError(
            f"the {name} is a {kind} of peft; merge its adapter first: {name} = {name}.merge_and_unload()"
        )
    if not isinstance(source, PreTrainedModel | str | Path):
        raise TypeError(f"the {name} is of type {kind}; give a transformers model, a hub id or a folder")
    return source


def load_model(
    source: PreTrainedModel | str | Path,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
) -> PreTrainedModel:
    """A causal LM; a model object is returned as it is.

    Raises:
        TypeError: see :func:`unwrapped`.
        OSError: files are missing, corrupt, or hold a pickle instead of safetensors.
        ValueError: the folder holds something else than a causal LM, or its weights exceed the device.
    """
    source = unwrapped(source)
    if isinstance(source, PreTrainedModel):
        return source
    device = device_of(device)
    return _placed(_read(source, device, dtype), source, device)


def load_target(
    source: PreTrainedModel | str | Path,
    config: HierarchyConfig,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    group: Group | None = None,
    pinned: Callable[[int], None] | None = None,
) -> tuple[PreTrainedModel, StreamedWeights | None]:
    """A causal LM, and the weights of its layers where they are to stay in host memory.

    Args:
        source: a model object is returned as it is, or with ``offload_weights=True`` taken over.
        config: says whether weights may stay on the host, and how much of the device there is.
        group: ranks that share the model, which is cut in place before its weights go anywhere.
        pinned: called with bytes of host memory as weights that stay there take them.

    Raises:
        OSError: as :func:`load_model`; host memory is short (:class:`HostMemoryError`).
        ValueError: as :func:`load_model`; the layers' weights cannot be streamed; the model cannot be cut.
    """
    device = group.device if group is not None else device_of(device)
    model = source if isinstance(source, PreTrainedModel) else _read(source, device, dtype)
    if group is not None:
        shard(model, group)
    if config.streams is not True:
        if isinstance(source, PreTrainedModel):
            return source, None
        room = None if config.streams is False else device_room(device, config.gpu_bytes)
        if room is None or weights_fit(tensor_bytes(model), room):
            return _placed(model, source, device), None
    try:
        most = config.host_bytes // local_size() if config.host_bytes is not None else None
        return model, StreamedWeights(model, device, progress=pinned, most=most)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"{device} has no room for embeddings, head and two layers of this {type(model).__name__}: free "
            "device memory, allow more of it, or use a smaller model"
        ) from error


def _read(source: str | Path, device: torch.device, dtype: torch.dtype | str | None) -> PreTrainedModel:
    """A model in host memory, in the dtype that it gets on the device."""
    checkpoint = checked(source)
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else "auto"
    try:
        # Typed as a model; with the loading info it is a pair.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint.folder,
            config=checkpoint.config,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            trust_remote_code=False,
        )
    except torch.OutOfMemoryError:
        raise
    except ImportError as error:
        raise ValueError(
            f"the model in {str(source)!r} needs a package that is not installed ({in_one_line(error)})"
        ) from error
    except Exception as error:  # foreign code on foreign files
        why = checkpoint.mismatch() or in_one_line(error)
        raise ValueError(
            f"the model in {str(source)!r} cannot be loaded ({why}); copy or download it again"
        ) from error
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise OSError(
            f"the checkpoint in {str(source)!r} lacks {len(missing)} weights, such as {missing[0]}; copy "
            "or download it again"
        )
    method = getattr(model.config, "quantization_config", None)
    if method is not None and not getattr(model, "is_quantized", False):
        # transformers would take packed weights for the weights themselves.
        raise ValueError(
            f"{str(source)!r} is quantised in a way that this release of transformers does not read "
            f"({method}); give a checkpoint of 16 bits"
        )
    ours: PreTrainedModel = model.eval()
    return ours


def _placed(model: Any, source: Any, device: torch.device) -> PreTrainedModel:
    if getattr(model, "is_quantized", False) and model.device.type == device.type:
        # Some quantised models refuse to be moved, be it to where they are.
        return cast(PreTrainedModel, model)
    try:
        placed: PreTrainedModel = model.to(device)
    except torch.OutOfMemoryError as error:
        size = tensor_bytes(model)
        raise ValueError(
            f"the weights of {str(source)!r} take {size / 2**30:.1f} GiB, more than {device} has left: free "
            "device memory, allow more of it, use a smaller model or fewer bits (dtype), or let a target's "
            "weights stay on the host (offload_weights=True)"
        ) from error
    return placed


def tokenizer_of(
    given: PreTrainedTokenizerBase | str | Path | None, target: PreTrainedModel | str | Path | None = None
) -> PreTrainedTokenizerBase | None:
    """A tokenizer from what was given for one, or the one beside the target.

    Raises:
        TypeError: it is neither a tokenizer nor a path.
        OSError, ValueError: as :func:`load_tokenizer`; there is none where one was named.
    """
    if given is None:
        return load_tokenizer(target) if isinstance(target, str | Path) else None
    if isinstance(given, str | Path):
        found = load_tokenizer(given)
        if found is None:
            raise FileNotFoundError(f"{str(given)!r} holds no tokenizer; give another folder")
        return found
    if not (callable(given) and hasattr(given, "decode")):
        kind = type(given).__name__
        raise TypeError(f"the tokenizer is of type {kind}; give transformers' own, a hub id or a folder")
    return given


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside a model, or None where there is none (token ids then serve).

    Raises:
        OSError: there is no such folder.
        ValueError: there are files of a tokenizer, but they are corrupt or need code of their own.
    """
    folder = folder_of(source)
    if (folder / "config.json").exists():
        # transformers reads it for the tokenizer too.
        configuration(source)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # foreign code on foreign files
        if not any((folder / name).exists() for name in _TOKENIZERS):
            return None
        why = in_one_line(error)
        if needs_code(folder / "tokenizer_config.json"):
            why = "it needs Python code of its own (auto_map), which is not run"
        raise ValueError(
            f"the tokenizer in {str(source)!r} cannot be loaded ({why}); mend it, or give another with "
            "load(..., tokenizer=...)"
        ) from error
    return tokenizer

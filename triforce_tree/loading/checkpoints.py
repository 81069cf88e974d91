"""Loads models and tokenizers from folders, hub ids, GGUF files or objects. Pickles are never loaded."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from triforce_tree.config import HierarchyConfig
from triforce_tree.kv.offload.weights.streamed_weights import StreamedWeights
from triforce_tree.kv.parallel.choice import Ranks, chosen
from triforce_tree.loading.gguf import gguf_tokenizer
from triforce_tree.loading.gguf_header import is_gguf
from triforce_tree.loading.model_files import configuration
from triforce_tree.loading.model_folder import base_and_adapter, folder_of, in_one_line, needs_code
from triforce_tree.loading.reading import ModelFiles
from triforce_tree.models.experts.modules import expert_modules, fused_weights
from triforce_tree.models.few_row import quantisation
from triforce_tree.models.supported import refuse_adapters
from triforce_tree.models.tensor_parallel import shard
from triforce_tree.planning.machine import available_device_bytes
from triforce_tree.planning.memory_map import tensor_bytes, weights_fit
from triforce_tree.runtime import distributed
from triforce_tree.runtime.devices import device_of
from triforce_tree.runtime.distributed import Grid, local_size
from triforce_tree.runtime.progress_log import logged

_PEFT_MODELS = {"PeftModel", "PeftMixedModel", "BaseTuner"}
PAIR = Path(__file__).parents[1] / "pair"
# A folder with a tokenizer has at least one of these files.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)


def unwrapped(source: Any, name: str = "model") -> PreTrainedModel | str | Path:
    """Returns ``source`` unchanged, or the transformers model inside a wrapper of ``torch.compile`` or peft.

    Models of peft are recognised by class name, as peft need not be installed. The model inside runs with the
    adapters that are active in each call.

    Args:
        name: what to call the model in errors.

    Raises:
        TypeError: ``source`` is no transformers model, folder or hub id.
        UnsupportedModelError: it has adapters of peft that cannot be decoded.
    """
    source = getattr(source, "_orig_mod", source)
    kind = type(source).__name__
    while not {base.__name__ for base in type(source).__mro__}.isdisjoint(_PEFT_MODELS):
        refuse_adapters(source)
        # A model of peft holds a tuner (such as ``LoraModel``), which holds the transformers model or, if it
        # was wrapped again, a model of peft.
        tuner = getattr(source, "base_model", source) if "Peft" in type(source).__name__ else source
        source = tuner.model
    if not isinstance(source, PreTrainedModel | str | Path):
        raise TypeError(f"the {name} is of type {kind}; give a transformers model, a hub id or a folder")
    return source


def load_model(
    source: PreTrainedModel | str | Path,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    blocks: bool = True,
) -> PreTrainedModel:
    """Loads a causal LM, or a multimodal model without its encoders. A model object is returned unchanged.

    Args:
        blocks: as for :meth:`ModelFiles.find`.

    Raises:
        TypeError: see :func:`unwrapped`.
        OSError: files are missing, corrupt, or hold a pickle instead of safetensors.
        ValueError: the folder does not hold a causal LM, or its weights do not fit on the device.
    """
    source = unwrapped(source)
    if isinstance(source, PreTrainedModel):
        return source
    device = device_of(device)
    return _read_onto(ModelFiles.find(source, device, dtype, blocks), device)


def load_target(
    source: PreTrainedModel | str | Path,
    config: HierarchyConfig,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    grid: Grid | None = None,
    pinned: Callable[[int], None] | None = None,
) -> tuple[PreTrainedModel, StreamedWeights | None]:
    """Loads a causal LM, and its streamed weights if its layers' weights stay in host memory.

    Args:
        source: a model object is returned unchanged, except that ``offload_weights=True`` moves its weights
            to host memory.
        config: settings that decide whether weights may stay on the host, and how much device memory is used.
        grid: the ranks that share the model. It is sharded in place before its weights are moved.
        pinned: called with the bytes of each block of weights that was copied to pinned host memory.

    Raises:
        OSError: as in :func:`load_model`, or host memory is short (:class:`HostMemoryError`).
        ValueError: as in :func:`load_model`, or the weights cannot be streamed, or the model cannot be
            sharded.
    """
    device = grid.tensor.device if grid is not None else device_of(device)
    if isinstance(source, PreTrainedModel):
        model = source
        if hasattr(model, "peft_config") and (grid is not None or config.streams is True):
            raise ValueError(
                f"{type(model).__name__} has adapters of peft, which torchrun and offload_weights=True "
                "do not serve; run without these, or load a folder with the merged weights"
            )
        if grid is not None:
            shard(model, grid.tensor, grid.every)
        if config.streams is not True:
            return model, None
    else:
        # Ranks, streams and copies of fewer bits need weights that can be divided or quantised.
        blocks = grid is None and config.streams is not True and config.retrieval_weight_bits in ("auto", 16)
        files = ModelFiles.find(source, device, dtype, blocks)
        # Ranks that split a text by position alone each hold all weights.
        whole = grid is None or (files.quantised is not None and grid.tensor.size == 1)
        if whole and _stays(files.bytes, config, device):
            return _read_onto(files, device), None
        if files.quantised is not None:
            raise _not_divisible(files, whole)
        # Streamed and sharded layers are those of the base.
        model = files.read(torch.device("cpu"), merged=True)
        if grid is not None:
            shard(model, grid.tensor, grid.every)
            if _stays(tensor_bytes(model), config, device):
                return _moved(model, files, device), None
    try:
        most = config.host_bytes // local_size() if config.host_bytes is not None else None
        free = available_device_bytes(device, config.gpu_bytes)
        linears = not experts_alone(model, free)
        return model, StreamedWeights(model, device, progress=pinned, most=most, linears=linears)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"embeddings, head and two layers of this {type(model).__name__} do not fit on {device}; free "
            "device memory, allow more of it (gpu_memory), or use a smaller model"
        ) from error


def with_text_ranks(
    config: HierarchyConfig, source: PreTrainedModel | str | Path, dtype: torch.dtype | str | None = None
) -> HierarchyConfig:
    """Returns ``config`` with a number in place of ``context_parallel="auto"``, equal on all ranks.

    Args:
        source, dtype: as for :func:`load_target`; no weights are read.

    Raises:
        OSError: as in :func:`load_target`.
        ValueError: as in :func:`load_target`, or the ranks have different models, or they can split neither
            heads nor texts.
    """
    if (group := distributed.current()) is None:
        return replace(config, context_parallel=1) if config.context_parallel == "auto" else config
    known = source if isinstance(source, PreTrainedModel) else ModelFiles.find(source, group.device, dtype)
    distributed.check_equal({"targets": settings_of(known.config)})
    if config.context_parallel != "auto":
        return config
    if isinstance(known, PreTrainedModel):
        model, method = known, quantisation(known)
    else:
        model, method = known.skeleton(), known.quantised
    count = chosen(model, config, group.size, lambda: Ranks.joined(group), method)
    return replace(config, context_parallel=distributed.broadcast_object(count))


def settings_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Returns the settings of a model without the folder and the version that wrote them."""
    return {k: v for k, v in config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}


def experts_alone(model: PreTrainedModel, free: int | None) -> bool:
    """Returns whether streaming experts is enough: all other weights fit into ``free`` bytes.

    ``free`` None means no limit.
    """
    sizes = [sum(w.nbytes for w in fused_weights(m)) for m in expert_modules(model)]
    rest = tensor_bytes(model) - sum(sizes) + max(sizes, default=0)
    return bool(sizes) and (free is None or weights_fit(rest, free))


def _stays(size: int, config: HierarchyConfig, device: torch.device) -> bool:
    """Returns whether weights of ``size`` bytes are kept on the device instead of streamed from the host."""
    if config.streams is True:
        return False
    free = available_device_bytes(device, config.gpu_bytes) if config.streams == "auto" else None
    return free is None or weights_fit(size, free)


def _read_onto(files: ModelFiles, device: torch.device) -> PreTrainedModel:
    """Reads a model onto a device. If it is larger than the free memory, it is refused before allocation."""
    free = available_device_bytes(device, None)
    if free is not None and files.bytes > free:
        raise _too_large(files, device)
    try:
        return files.read(device)
    except torch.OutOfMemoryError as error:
        raise _too_large(files, device) from error


def _moved(model: Any, files: ModelFiles, device: torch.device) -> PreTrainedModel:
    try:
        moved: PreTrainedModel = model.to(device)
    except torch.OutOfMemoryError as error:
        raise _too_large(files, device) from error
    return moved


def _too_large(files: ModelFiles, device: torch.device) -> ValueError:
    return ValueError(
        f"the weights of {str(files.source)!r} take {files.bytes / 2**30:.1f} GiB, more than {device} has "
        "left: free device memory, allow more of it, use a smaller model or fewer bits (dtype), or keep a "
        "target's weights on the host (offload_weights=True)"
    )


def _not_divisible(files: ModelFiles, streamed: bool) -> ValueError:
    what = "streamed from the host" if streamed else "sharded over several cards"
    return ValueError(
        f"the weights of {str(files.source)!r} are quantised ({files.quantised}) and cannot be {what}; keep "
        f"their {files.bytes / 2**30:.1f} GiB on one device (offload_weights=False, without torchrun), or "
        "give the checkpoint of 16 bits"
    )


def tokenizer_of(
    given: PreTrainedTokenizerBase | str | Path | None,
    model: PreTrainedModel | str | Path | None = None,
    option: str = "tokenizer",
) -> PreTrainedTokenizerBase | None:
    """Returns the tokenizer ``given`` (object, hub id or folder); if None, the one in the model's folder.

    Args:
        option: the name of the argument of ``load`` for error messages.

    Raises:
        TypeError: ``given`` is neither a tokenizer nor a path.
        OSError, ValueError: as in :func:`load_tokenizer`, or the folder ``given`` holds no tokenizer.
    """
    if given is None:
        return load_tokenizer(model, option) if isinstance(model, str | Path) else None
    if isinstance(given, str | Path):
        loaded = load_tokenizer(given, option)
        if loaded is None:
            raise FileNotFoundError(f"{str(given)!r} holds no tokenizer; give another folder")
        return loaded
    if not (callable(given) and hasattr(given, "decode")):
        kind = type(given).__name__
        raise TypeError(f"the {option} is of type {kind}; give transformers' own, a hub id or a folder")
    return given


def load_tokenizer(source: str | Path, option: str = "tokenizer") -> PreTrainedTokenizerBase | None:
    """Loads the tokenizer in a model's folder; None if there is none, so that inputs must be token ids.

    Raises:
        OSError: there is no such folder.
        ValueError: tokenizer files are corrupt or need Python code of their own.
    """
    if is_gguf(source):
        return gguf_tokenizer(source)
    folder = folder_of(source)
    if (folder / "config.json").exists():
        # transformers reads config.json for the tokenizer as well, so it is checked first.
        configuration(source)
    try:
        with logged(f"reading the tokenizer in {folder}"):
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=False
            )
    except Exception as error:  # third-party code may raise anything on files of unknown origin
        if not any((folder / name).exists() for name in _TOKENIZER_FILES):
            base, adapter = base_and_adapter(source)
            return load_tokenizer(base, option) if adapter is not None else None
        why = in_one_line(error)
        if needs_code(folder / "tokenizer_config.json"):
            why = "it needs Python code of its own (auto_map), which is not run"
        raise ValueError(
            f"the tokenizer in {str(source)!r} cannot be loaded ({why}); repair it, or give another with "
            f"load(..., {option}=...)"
        ) from error
    return tokenizer

"""Models and tokenizers from folders, hub ids or objects; safetensors only."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from triforce_tree.config import HierarchyConfig
from triforce_tree.cycle.streamed_weights import StreamedWeights
from triforce_tree.machine import device_room
from triforce_tree.memory_map import tensor_bytes, weights_fit
from triforce_tree.parallel import Group
from triforce_tree.sharding import shard

PAIR = Path(__file__).parent / "pair"


def load_model(
    source: PreTrainedModel | str | Path,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
) -> PreTrainedModel:
    """A causal LM; a model object is returned as it is.

    Raises:
        OSError: files are missing, corrupt, or hold a pickle instead of safetensors.
        ValueError: the folder holds something else than a causal LM, or its weights exceed the device.
    """
    if isinstance(source, PreTrainedModel):
        return source
    device = _device(device)
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
    device = group.device if group is not None else _device(device)
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
        return model, StreamedWeights(model, device, progress=pinned)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"{device} has no room for embeddings, head and two layers of this {type(model).__name__}: free "
            "device memory, allow more of it, or use a smaller model"
        ) from error


def _device(device: str | torch.device | None) -> torch.device:
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _read(source: str | Path, device: torch.device, dtype: torch.dtype | str | None) -> PreTrainedModel:
    """A model in host memory, in the dtype that it gets on the device."""
    _check_folder(source)
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else "auto"
    try:
        # Typed as a model; with the loading info it is a pair.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, use_safetensors=True, output_loading_info=True
        )
    except SafetensorError as error:
        raise OSError(
            f"the checkpoint in {str(source)!r} is corrupt ({error}); copy or download it again"
        ) from error
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise OSError(
            f"the checkpoint in {str(source)!r} lacks {len(missing)} weights, such as {missing[0]}; copy "
            "or download it again"
        )
    ours: PreTrainedModel = model.eval()
    return ours


def _placed(model: Any, source: Any, device: torch.device) -> PreTrainedModel:
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


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside a model, or None where there is none (token ids then serve)."""
    _check_folder(source)
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError):
        return None


def _check_folder(source: str | Path) -> None:
    """Say plainly what a folder lacks, before transformers asks the hub for it."""
    path = Path(source)
    if not path.is_dir():
        if isinstance(source, Path) or str(source).startswith((".", "/", "~")) or path.exists():
            raise FileNotFoundError(f"{str(source)!r} is not a folder with a model in it")
        return
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{str(source)!r} has no config.json; give a Hugging Face model folder")
    if not list(path.glob("*.safetensors")):
        pickles = sorted(p.name for p in (*path.glob("*.bin"), *path.glob("*.pt")))
        has = f"only {pickles[0]}, a pickle, which may run code when loaded" if pickles else "no weights"
        raise FileNotFoundError(
            f"{str(source)!r} holds {has}; save the model with save_pretrained (safetensors)"
        )

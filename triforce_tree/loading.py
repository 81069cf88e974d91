"""Models and tokenizers from folders, hub ids or objects; safetensors only."""

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
    _check_folder(source)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
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
    try:
        placed: PreTrainedModel = model.to(device).eval()
    except torch.OutOfMemoryError as error:
        size = sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])
        raise ValueError(
            f"the weights of {str(source)!r} take {size / 2**30:.1f} GiB, more than {device} has left, and "
            "only the cache can be offloaded: free device memory, allow more of it, or use a smaller model "
            "or fewer bits (dtype)"
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

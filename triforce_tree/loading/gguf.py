"""Models in GGUF files: found and checked here, read by transformers, their weights unpacked at load.

Unpacked weights are plain ones: all that works for a 16-bit checkpoint works for them, at its size in memory.
The output is lossless against the model of these weights.
"""

import struct
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from triforce_tree.loading.model_files import check_sizes, downloaded, in_one_line, skeleton
from triforce_tree.models.supported import attention_of

SUFFIX = ".gguf"
PACKAGE = "pip install 'triforce-tree[quant]', or gguf alone"
# Magic bytes, version, and the numbers of tensors and of metadata entries.
_HEADER = struct.Struct("<4sIQQ")
# The fewest bits of a weight are about 1.6.
_MOST_WEIGHTS_PER_BYTE = 8


def is_gguf(source: object) -> bool:
    """Whether a source of a model or a tokenizer is a path that ends in ``.gguf``."""
    return isinstance(source, str | Path) and str(source).lower().endswith(SUFFIX)


def gguf_path(source: Any, gguf_file: str) -> Path:
    """The path of a GGUF file in a folder, or in a repository of the hub, from which it is downloaded.

    Raises:
        TypeError: ``source`` is not a path.
        ValueError: ``gguf_file`` is not the name of a GGUF file.
        FileNotFoundError: there is no such file.
    """
    if not isinstance(source, str | Path):
        raise TypeError(
            f"gguf_file={gguf_file!r} names a file of the target's folder, and the target is a model; give a "
            "folder or a hub id, or leave it out"
        )
    if not is_gguf(gguf_file):
        raise ValueError(f"gguf_file={gguf_file!r} does not end in {SUFFIX}; name a GGUF file")
    if not Path(source).exists() and not str(source).startswith((".", "/", "~")):
        source = downloaded(str(source), [gguf_file])
    return Path(source) / gguf_file


def gguf_configuration(path: str | Path) -> PreTrainedConfig:
    """The checked configuration in a GGUF file; no weights are read.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a GGUF file, or transformers cannot run its architecture.
    """
    path = Path(path)
    tensors = _tensors(path)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # third-party code on a file of unknown origin
        raise _unusable(path, "model", error) from error
    config._attn_implementation, config._experts_implementation = attention_of(config), None
    check_sizes(config.to_dict(), path)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{str(path)!r} is a {config.model_type} model, and no causal language model")
    layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", 0)
    if layers > tensors:
        raise ValueError(
            f"{str(path)!r} describes {layers} layers and holds {tensors} tensors; copy or download it again"
        )
    described = sum(weight.numel() for weight in skeleton(config, path).parameters())
    if described > _MOST_WEIGHTS_PER_BYTE * path.stat().st_size:
        raise ValueError(
            f"{str(path)!r} describes {described} weights in {path.stat().st_size} bytes; copy or "
            "download it again"
        )
    return config


def gguf_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a GGUF file.

    Raises:
        FileNotFoundError, ValueError: as :func:`gguf_configuration`; transformers cannot use the tokenizer.
    """
    path = Path(path)
    _tensors(path)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # third-party code on a file of unknown origin
        raise _unusable(path, "tokenizer", error) from error
    return tokenizer


def _tensors(path: Path) -> int:
    """The number of tensors by the header of a GGUF file; errors as of :func:`gguf_configuration`."""
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {str(path)!r}; give the path of a GGUF file")
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
    if len(head) < _HEADER.size or head[:4] != b"GGUF":
        raise ValueError(f"{str(path)!r} is no GGUF file (its header is missing); copy or download it again")
    return int(_HEADER.unpack(head)[2])


def gguf_arguments(path: Path, dtype: torch.dtype | str | None, device: torch.device) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that make it unpack the file's weights.

    Args:
        dtype: None for float32 on a CPU, and bfloat16 elsewhere: packed weights have no dtype of their own.
    """
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    arguments: dict[str, Any] = {"gguf_file": path.name, "dtype": dtype}
    # Older releases always unpack. Newer ones may multiply packed weights by kernels downloaded from the hub.
    if (settings := getattr(transformers, "GgufConfig", None)) is not None:
        arguments["quantization_config"] = settings(dequantize=True)
    return arguments


def _unusable(path: Path, what: str, error: Exception) -> ValueError:
    if isinstance(error, ImportError):
        return ValueError(
            f"the {what} in {str(path)!r} needs a package that is not installed ({in_one_line(error)}); "
            f"{PACKAGE}"
        )
    remedy = "give another file"
    if what == "tokenizer":
        remedy = "give another with load(..., tokenizer=...)"
    return ValueError(f"the {what} in {str(path)!r} cannot be used ({in_one_line(error)}); {remedy}")

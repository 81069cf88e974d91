"""Checks GGUF files and has transformers read them and unpack (dequantise) their weights.

Unpacked weights behave like those of a 16-bit checkpoint and take as much memory. The output is lossless
relative to the model with the unpacked weights.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from triforce_tree.loading import gguf_cache
from triforce_tree.loading.gguf_header import stored_tensors, tensor_count
from triforce_tree.loading.model_files import check_sizes, skeleton
from triforce_tree.loading.model_folder import in_one_line
from triforce_tree.models.supported import attention_of
from triforce_tree.runtime.progress_log import logged

PACKAGE = "pip install 'triforce-tree[quant]', or gguf alone"
# The smallest quantisation of GGUF has about 1.6 bits per weight, or 5 weights per byte.
_MOST_WEIGHTS_PER_BYTE = 8
_PARSING = RLock()


def gguf_configuration(path: str | Path) -> PreTrainedConfig:
    """Returns the checked configuration in a GGUF file. No weights are read.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a GGUF file, or transformers cannot run its architecture.
    """
    path = Path(path)
    tensors = tensor_count(path)
    folder = gguf_cache.kept(path, gguf_cache.CONFIG)
    config: PreTrainedConfig
    try:
        if folder is not None:
            config = AutoConfig.from_pretrained(folder)
        else:
            with parsed_once(), logged(f"reading the configuration in {path}"):
                config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # third-party code may raise anything on a file of unknown origin
        raise _unusable(path, "model", error) from error
    checked = _checked(copy.deepcopy(config), path, tensors)
    if folder is None:
        gguf_cache.keep(path, gguf_cache.CONFIG, 0, config.save_pretrained)
    return checked


def _checked(config: PreTrainedConfig, path: Path, tensors: int) -> PreTrainedConfig:
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
    """Returns the tokenizer in a GGUF file.

    Raises:
        FileNotFoundError, ValueError: as in :func:`gguf_configuration`, or transformers cannot use the
            tokenizer.
    """
    path = Path(path)
    tensor_count(path)
    folder = gguf_cache.kept(path, gguf_cache.TOKENIZER)
    tokenizer: PreTrainedTokenizerBase
    try:
        if folder is not None:
            return AutoTokenizer.from_pretrained(folder)
        with parsed_once(), logged(f"reading the tokenizer in {path}"):
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
            with suppress(ValueError):
                # The configuration is needed next. Here it is stored in the cache while the parsed file is
                # still in memory.
                gguf_configuration(path)
    except Exception as error:  # third-party code may raise anything on a file of unknown origin
        raise _unusable(path, "tokenizer", error) from error

    def write(folder: Path) -> None:
        tokenizer.save_pretrained(folder)
        if _described(AutoTokenizer.from_pretrained(folder)) != _described(tokenizer):
            raise ValueError("transformers reads it otherwise than it was written")

    gguf_cache.keep(path, gguf_cache.TOKENIZER, 0, write)
    return tokenizer


def _described(tokenizer: Any) -> tuple[Any, ...]:
    """Returns everything that decides what a tokenizer does, for comparison."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    return (
        inner.to_str() if inner is not None else tokenizer.get_vocab(),
        tokenizer.special_tokens_map,
        tokenizer.chat_template,
        tokenizer.padding_side,
    )


@contextmanager
def parsed_once() -> Iterator[None]:
    """Lets transformers parse each GGUF file once inside the context, and three times faster.

    transformers parses a file anew for each thing that it reads. The parser cuts every string out of
    ``numpy.memmap``, whose slices cost several times those of a plain array of the same memory.
    """
    try:
        import gguf as package
    except ImportError:  # transformers reports the missing package
        yield
        return

    with _PARSING:
        original: Any = package.GGUFReader
        if not isinstance(original, type):  # inside another context of this thread
            yield
            return

        class Reader(original):  # type: ignore[misc]
            def __setattr__(self, name: str, value: Any) -> None:
                super().__setattr__(name, value.view(np.ndarray) if isinstance(value, np.memmap) else value)

        before: dict[str, Any] = {"GGUFReader": original, "get_tensor_name_map": package.get_tensor_name_map}
        for name, function in before.items():
            setattr(package, name, cache(Reader if function is original else function))
        try:
            yield
        finally:
            for name, function in before.items():
                setattr(package, name, function)


def unpacked_dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    """Returns the dtype of unpacked weights.

    For ``dtype`` None and "auto" it is float32 on a CPU, and bfloat16 on other devices.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def gguf_arguments(path: Path, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the arguments of ``from_pretrained`` that make it unpack the weights of a GGUF file."""
    arguments: dict[str, Any] = {"gguf_file": path.name, "dtype": dtype}
    # Releases without GgufConfig always unpack. Newer ones may instead keep packed weights and download
    # kernels for them from the hub.
    if (settings := getattr(transformers, "GgufConfig", None)) is not None:
        arguments["quantization_config"] = settings(dequantize=True)
    return arguments


def _unusable(path: Path, what: str, error: Exception) -> ValueError:
    if isinstance(error, ImportError):
        return ValueError(
            f"the {what} in {str(path)!r} needs a package that is not installed ({in_one_line(error)}); "
            f"{PACKAGE}"
        )
    if (named := _named_bytes(path)) > (size := path.stat().st_size):
        return ValueError(
            f"{str(path)!r} is cut off: it has {size} bytes, and its header names {named}; copy or download "
            "it again"
        )
    remedy = "give another file"
    if what == "tokenizer":
        remedy = "give another with load(..., tokenizer=...)"
    return ValueError(f"the {what} in {str(path)!r} cannot be used ({in_one_line(error)}); {remedy}")


def _named_bytes(path: Path) -> int:
    """Returns the size of a GGUF file by its header; 0 if the header is damaged."""
    from gguf import GGML_QUANT_SIZES

    try:
        return max((each.offset + each.bytes for each in stored_tensors(path, GGML_QUANT_SIZES)), default=0)
    except ValueError:
        return 0

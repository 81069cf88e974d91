"""Finds the files of a model, and checks them before anything is loaded, as their origin is unknown.

Nothing in them is executed: weights are read from safetensors only, and Python code in the model's folder
(``auto_map``) or named by its configuration (attention kernels of the hub) is not run.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
)

from triforce_tree.models.supported import attention_of
from triforce_tree.runtime.files.json_files import read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# All files of a hub repository but weights and Python code.
_SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
# Upper limits of a model's sizes: some configuration classes loop over them when they are made.
_MOST = dict.fromkeys(("vocab_size", "hidden_size", "max_position_embeddings"), 2**31 - 1)
_MOST |= dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 2**16)
# Most weights per element of a checkpoint: packed weights of 2 bits in int32.
_PACKED = 16


@dataclass(frozen=True)
class Checkpoint:
    """A causal LM on disk, complete and of plausible sizes.

    Attributes:
        folder: where its files are.
        config: the model's configuration.
        shapes: of every tensor, from the headers of the weight files.
        stored: bytes of the weight files.
    """

    folder: Path
    config: PreTrainedConfig
    shapes: dict[str, list[int]]
    stored: int = 0

    def mismatch(self) -> str:
        """Describes the first weight whose shape differs from that by ``config``; empty if none does."""
        for name, weight in _on_meta(self.config).state_dict().items():
            stored, expected = self.shapes.get(name), list(weight.shape)
            if stored not in (None, expected):
                return f"{name} is {stored} in the checkpoint and {expected} by config.json"
        return ""


def folder_of(source: str | Path) -> Path:
    """The folder of a model; for a hub id the cached snapshot, whose weights may not be downloaded yet.

    Raises:
        FileNotFoundError: there is no such folder, and no such model on the hub.
    """
    path = Path(source)
    if path.is_dir():
        return path
    if path.exists():
        raise FileNotFoundError(f"{str(source)!r} is a file, not a folder with a model in it")
    if isinstance(source, Path) or str(source).startswith((".", "/", "~")):
        raise FileNotFoundError(f"no such folder: {str(source)!r}; give a folder with a model in it")
    return downloaded(source, _SMALL_FILES)


def downloaded(source: str, patterns: Iterable[str], revision: str | None = None) -> Path:
    """The folder of a hub repository's snapshot with the files that match ``patterns``.

    Raises:
        FileNotFoundError: there is no such repository, or it cannot be reached.
    """
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=list(patterns)))
    except LocalEntryNotFoundError as error:
        # Its text is about the library's cache.
        raise FileNotFoundError(
            f"no such folder: {source!r}, and the Hugging Face hub cannot be reached to download it; give a "
            "folder with a model in it, or a hub id like owner/name on a machine with a network"
        ) from error
    except HFValidationError as error:
        # Its text describes ids, and a mistyped path is likelier.
        raise FileNotFoundError(
            f"no such folder: {source!r}, nor is it a hub id, which is like owner/name; give a folder with a "
            "model in it, or the id of one"
        ) from error
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"no such folder: {source!r}, and it cannot be downloaded from the Hugging Face hub "
            f"({in_one_line(error)}); give a folder with a model in it, or a hub id like owner/name"
        ) from error


def configuration(source: str | Path) -> tuple[Path, PreTrainedConfig]:
    """A model's folder and its configuration.

    Raises:
        OSError: there is no configuration.
        ValueError: it cannot be used, or needs Python code of its own.
    """
    folder = folder_of(source)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{str(source)!r} has no config.json; give a Hugging Face model folder")
    _check_settings(_object(folder / "config.json"), source)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # third-party code on values of unknown origin
        raise _unusable(source, error) from error
    # transformers never writes them to a file, and a name like owner/kernel loads code from the hub.
    config._attn_implementation, config._experts_implementation = attention_of(config), None
    return folder, config


def checked(source: str | Path) -> Checkpoint:
    """The checked files of a causal LM; no weights are loaded.

    Raises:
        OSError: files are missing, corrupt, or hold a pickle instead of safetensors.
        ValueError: the configuration cannot be used, is not of a causal LM, or needs Python code of its own.
    """
    folder, config = configuration(source)
    if auto_class(config) is None:
        raise ValueError(
            f"{str(source)!r} is a {config.model_type} model, which transformers does not load as a causal "
            "language model (AutoModelForCausalLM, AutoModelForImageTextToText); give a decoder-only model, "
            "or load it yourself and give the object"
        )
    if (folder / "adapter_config.json").exists():
        raise ValueError(
            f"{str(source)!r} holds an adapter (adapter_config.json); merge it into its model (peft's "
            "merge_and_unload) and save that"
        )
    _check_generation(folder)
    names = _weight_names(folder, config)
    if folder != Path(source):
        # A snapshot is named after its commit, so the weights come from the revision that was checked.
        downloaded(str(source), names, folder.name)
    shapes = _shapes(folder, names)
    checkpoint = Checkpoint(folder, config, shapes, sum((folder / name).stat().st_size for name in names))
    _check_bytes(checkpoint, source)
    return checkpoint


def auto_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that loads a causal LM, or a model of images and text; None for others."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    return AutoModelForImageTextToText if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING else None


def in_one_line(error: Exception, most: int = 240) -> str:
    """A library's error message without line breaks, cut to ``most`` characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:most]}{'...' * (len(text) > most)}" if text else repr(error)


def needs_code(path: Path) -> bool:
    """Whether a configuration names Python code of its own (``auto_map``)."""
    try:
        return bool(_object(path).get("auto_map"))
    except (OSError, ValueError):
        return False


def _object(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, not an object")
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is corrupt ({error}); copy or download it again") from error
    return content


def _check_settings(content: dict[str, Any], source: str | Path) -> None:
    """Refuse settings that would run code, and implausible sizes."""
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        if content.get("auto_map"):
            raise ValueError(
                f"{str(source)!r} (model_type {kind!r}) needs Python code of its own (auto_map), which is "
                "not run; use a model of a family that transformers has itself, or load it yourself and "
                "give the object"
            )
        raise ValueError(
            f"{str(source)!r} has model_type={kind!r}, which this release of transformers does not know; "
            "update transformers, or give another model"
        )
    check_sizes(content, source)


def check_sizes(content: dict[str, Any], source: str | Path) -> None:
    """Raise ValueError for implausible sizes in the values of a configuration."""
    known = CONFIG_MAPPING[content["model_type"]].attribute_map
    for part in _parts(content):
        for size, most in _MOST.items():
            for name in sorted({size, known.get(size, size)}):
                _check_size(name, part.get(name), most, source)


def _check_size(name: str, given: Any, most: int, source: str | Path) -> None:
    # Some families have one value per layer.
    for value in given if isinstance(given, list) else [given]:
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (is_integer and 1 <= value <= most):
            raise ValueError(
                f"{name}={value!r} in config.json of {str(source)!r} must be an integer from 1 to "
                f"{most}; copy or download the file again"
            )


def _parts(content: dict[str, Any]) -> list[dict[str, Any]]:
    """A configuration and its sub-configurations."""
    return [content, *(value for value in content.values() if isinstance(value, dict))]


def _check_generation(folder: Path) -> None:
    """Refuse a generation_config.json that cannot be read; transformers would silently ignore it."""
    path = folder / "generation_config.json"
    if path.exists():
        content = _object(path)
        try:
            GenerationConfig.from_dict(content)
        except Exception as error:  # third-party code on values of unknown origin
            raise ValueError(
                f"{str(path)!r} cannot be used ({in_one_line(error)}); repair or delete it"
            ) from error


def _weight_names(folder: Path, config: PreTrainedConfig) -> list[str]:
    """Names of the weight files that transformers will load; they need not exist yet."""
    main = getattr(config, "transformers_weights", None)
    if main is None:
        main = INDEX if (folder / INDEX).exists() and not (folder / WEIGHTS).exists() else WEIGHTS
    if not str(main).endswith(".safetensors.index.json"):
        return [_inside(main, folder / "config.json")]
    index = folder / _inside(main.removesuffix(".index.json"), folder / "config.json")
    index = index.with_name(index.name + ".index.json")
    named = _object(index)
    weights = named.get("weight_map")
    if not isinstance(weights, dict) or not weights or not isinstance(named.get("metadata"), dict):
        raise ValueError(f"{str(index)!r} lacks its weight_map or its metadata; copy or download it again")
    return [_inside(name, index) for name in sorted(set(map(str, weights.values())))]


def _inside(name: Any, where: Path) -> str:
    """Check that ``name``, a weight file named in ``where``, is a safetensors file inside the folder.

    Only the name is checked: hub snapshots consist of links to files outside the folder.
    """
    if not isinstance(name, str) or not name.endswith(".safetensors"):
        raise ValueError(
            f"{str(where)!r} names {name!r} as a weight file; only .safetensors are loaded (a pickle may run "
            "code): save the model with save_pretrained"
        )
    if any(part in ("", ".", "..") for part in re.split(r"[/\\]", name)) or re.search(r"[:\0]", name):
        raise ValueError(
            f"{str(where)!r} names {name!r} as a weight file, which is not inside the folder; download the "
            "model again"
        )
    return name


def _lacks(folder: Path, name: str) -> str:
    """Error text for a missing weight file: what is missing, and what the folder holds instead."""
    pickles = sorted(p.name for p in (*folder.glob("*.bin"), *folder.glob("*.pt")))
    if name != WEIGHTS:
        return f"lacks {name}, which its index names; copy or download it again"
    has = f"only {pickles[0]}, a pickle, which may run code when loaded" if pickles else "no weights"
    return f"holds {has}; save the model with save_pretrained ({WEIGHTS})"


def _shapes(folder: Path, names: Iterable[str]) -> dict[str, list[int]]:
    """Shape of every tensor in the weight files, from their headers."""
    shapes: dict[str, list[int]] = {}
    for name in names:
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(f"{str(folder)!r} {_lacks(folder, name)}")
        # safetensors says of a file that may not be read that there is none.
        path.open("rb").close()
        try:
            with safe_open(path, framework="pt") as file:
                shapes |= {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise OSError(
                f"the checkpoint in {str(folder)!r} is corrupt ({name}: {in_one_line(error)}); copy or "
                "download it again"
            ) from error
    return shapes


def skeleton(config: PreTrainedConfig, source: str | Path) -> torch.nn.Module:
    """The model on the meta device, without memory for its weights.

    Raises:
        ValueError: its class cannot be made with these settings.
    """
    try:
        return _on_meta(config)
    except Exception as error:  # third-party code on values of unknown origin
        raise _unusable(source, error) from error


def _on_meta(config: PreTrainedConfig) -> torch.nn.Module:
    with torch.device("meta"):
        model: torch.nn.Module = auto_class(config).from_config(config, trust_remote_code=False)
    return model


def _check_bytes(checkpoint: Checkpoint, source: str | Path) -> None:
    """Refuse a configuration of far more layers or weights than the checkpoint holds."""
    config, shapes = checkpoint.config, checkpoint.shapes
    layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", 0)
    stored = sum(torch.Size(shape).numel() for shape in shapes.values())
    again = "copy or download both again"
    if layers > len(shapes):
        raise ValueError(
            f"config.json of {str(source)!r} describes {layers} layers, its checkpoint holds {len(shapes)} "
            f"tensors; {again}"
        )
    model = skeleton(config, source)
    described = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    if described > _PACKED * stored:
        raise ValueError(
            f"config.json of {str(source)!r} describes {described} weights, its checkpoint holds {stored}; "
            f"{again}"
        )


def _unusable(source: str | Path, error: Exception) -> ValueError:
    return ValueError(
        f"config.json of {str(source)!r} cannot be used ({in_one_line(error)}); copy or download it again"
    )

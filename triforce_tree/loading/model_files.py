"""Files of models that others made: found, and checked before anything of them is loaded.

Nothing in them is executed: weights are safetensors alone, and the Python code that may lie beside a model
(``auto_map``) or be named by it (attention kernels of the hub) is not run.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
)

from triforce_tree.runtime.json_files import read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# Of a hub repository all but its weights: small files, and no Python.
_SMALL = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
# Sizes of a model, and more than any has: classes of configurations count to some of them.
_MOST = dict.fromkeys(("vocab_size", "hidden_size", "max_position_embeddings"), 2**31 - 1)
_MOST |= dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 2**16)
# Packed weights of 2 bits hold 16 values in an element of the checkpoint.
_PACKED = 16


@dataclass(frozen=True)
class Checkpoint:
    """A causal LM on disk, complete and within bounds.

    Attributes:
        folder: where its files are.
        config: what they say of it.
        shapes: of every tensor, by the files' headers.
    """

    folder: Path
    config: PreTrainedConfig
    shapes: dict[str, list[int]]

    def mismatch(self) -> str:
        """The first weight whose shape is another than ``config`` makes it, in words; may be empty."""
        for name, weight in _skeleton(self.config).state_dict().items():
            held, made = self.shapes.get(name), list(weight.shape)
            if held not in (None, made):
                return f"{name} is {held} in the checkpoint and {made} by config.json"
        return ""


def folder_of(source: str | Path) -> Path:
    """The folder of a model; of one on the hub the cached snapshot, whose weights may still be missing.

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
    return _snapshot(source, _SMALL)


def _snapshot(source: str, patterns: Iterable[str], revision: str | None = None) -> Path:
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=list(patterns)))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"no such folder: {source!r}, and it cannot be had from the Hugging Face hub "
            f"({in_one_line(error)}); give a folder with a model in it, or a hub id like owner/name"
        ) from error


def configuration(source: str | Path) -> tuple[Path, PreTrainedConfig]:
    """A model's folder and its configuration.

    Raises:
        OSError: there is none.
        ValueError: it cannot be used, or needs code of its own.
    """
    folder = folder_of(source)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{str(source)!r} has no config.json; give a Hugging Face model folder")
    _check_settings(_object(folder / "config.json"), source)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # foreign code on foreign values
        raise _unusable(source, error) from error
    # No file that transformers writes holds them, and a name like owner/kernel is code from the hub.
    config._attn_implementation = config._experts_implementation = None
    return folder, config


def checked(source: str | Path) -> Checkpoint:
    """The files of a causal LM, none of which has been loaded.

    Raises:
        OSError: files are missing, corrupt, or hold a pickle instead of safetensors.
        ValueError: the configuration cannot be used, is not of a causal LM, or needs code of its own.
    """
    folder, config = configuration(source)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"{str(source)!r} is a {config.model_type} model, which transformers does not load as a causal "
            "language model (AutoModelForCausalLM); give a decoder-only model, or load it yourself and give "
            "the object"
        )
    if (folder / "adapter_config.json").exists():
        raise ValueError(
            f"{str(source)!r} holds an adapter (adapter_config.json); merge it into its model (peft's "
            "merge_and_unload) and save that"
        )
    _check_generation(folder)
    names = _weight_names(folder, config)
    if folder != Path(source):
        # A snapshot is named after its commit, so the weights come from the state that was checked.
        _snapshot(str(source), names, folder.name)
    checkpoint = Checkpoint(folder, config, _shapes(folder, names))
    _check_bytes(checkpoint, source)
    return checkpoint


def in_one_line(error: Exception, most: int = 240) -> str:
    """What a library's error says, without its line breaks and not at any length."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:most]}{'...' * (len(text) > most)}" if text else repr(error)


def needs_code(path: Path) -> bool:
    """Whether a configuration names Python code that lies beside it."""
    try:
        return bool(_object(path).get("auto_map"))
    except (OSError, ValueError):
        return False


def _object(path: Path) -> dict[str, Any]:
    try:
        held = read_json(path)
        if not isinstance(held, dict):
            raise ValueError(f"it holds a {type(held).__name__}, not an object")
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is corrupt ({error}); copy or download it again") from error
    return held


def _check_settings(held: dict[str, Any], source: str | Path) -> None:
    """Refuse what would run code, and sizes that no model has."""
    kind = held.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        if held.get("auto_map"):
            raise ValueError(
                f"{str(source)!r} (model_type {kind!r}) needs Python code of its own (auto_map), which is "
                "not run; use a model of a family that transformers has itself, or load it yourself and "
                "give the object"
            )
        raise ValueError(
            f"{str(source)!r} has model_type={kind!r}, which this release of transformers does not know; "
            "update transformers, or give another model"
        )
    known = CONFIG_MAPPING[kind].attribute_map
    for part in _parts(held):
        for size, most in _MOST.items():
            for name in sorted({size, known.get(size, size)}):
                _check_size(name, part.get(name), most, source)


def _check_size(name: str, given: Any, most: int, source: str | Path) -> None:
    # Some families have one for each layer.
    for value in given if isinstance(given, list) else [given]:
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (whole and 1 <= value <= most):
            raise ValueError(
                f"{name}={value!r} in config.json of {str(source)!r} must be a whole number from 1 to "
                f"{most}; copy or download the file again"
            )


def _parts(held: dict[str, Any]) -> list[dict[str, Any]]:
    """A configuration, and those of its parts."""
    return [held, *(value for value in held.values() if isinstance(value, dict))]


def _check_generation(folder: Path) -> None:
    """transformers leaves a generation_config.json that it cannot read aside without a word."""
    path = folder / "generation_config.json"
    if path.exists():
        held = _object(path)
        try:
            GenerationConfig.from_dict(held)
        except Exception as error:  # foreign code on foreign values
            raise ValueError(
                f"{str(path)!r} cannot be used ({in_one_line(error)}); mend or delete it"
            ) from error


def _weight_names(folder: Path, config: PreTrainedConfig) -> list[str]:
    """Files of weights that transformers will load, by their names in the folder; they may be missing yet."""
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
    """A file of weights as it is named in ``where``, which must not lead out of the folder.

    Names alone count: snapshots of the hub are links to files that lie elsewhere.
    """
    if not isinstance(name, str) or not name.endswith(".safetensors"):
        raise ValueError(
            f"{str(where)!r} names {name!r} as a file of weights; only .safetensors are loaded (a pickle may "
            "run code): save the model with save_pretrained"
        )
    if any(part in ("", ".", "..") for part in re.split(r"[/\\]", name)) or re.search(r"[:\0]", name):
        raise ValueError(
            f"{str(where)!r} names {name!r} as a file of weights, which is not inside the folder; download "
            "the model again"
        )
    return name


def _lacks(folder: Path, name: str) -> str:
    """That a file of weights is not there, and what is instead."""
    pickles = sorted(p.name for p in (*folder.glob("*.bin"), *folder.glob("*.pt")))
    if name != WEIGHTS:
        return f"lacks {name}, which its index names; copy or download it again"
    has = f"only {pickles[0]}, a pickle, which may run code when loaded" if pickles else "no weights"
    return f"holds {has}; save the model with save_pretrained ({WEIGHTS})"


def _shapes(folder: Path, names: Iterable[str]) -> dict[str, list[int]]:
    """Shape of every tensor in files of weights, from their headers."""
    shapes: dict[str, list[int]] = {}
    for name in names:
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(f"{str(folder)!r} {_lacks(folder, name)}")
        try:
            with safe_open(path, framework="pt") as file:
                shapes |= {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise OSError(
                f"the checkpoint in {str(folder)!r} is corrupt ({name}: {in_one_line(error)}); copy or "
                "download it again"
            ) from error
    return shapes


def _skeleton(config: PreTrainedConfig) -> torch.nn.Module:
    """The model without memory for its weights."""
    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return model


def _check_bytes(checkpoint: Checkpoint, source: str | Path) -> None:
    """Refuse a configuration that wants far more layers or memory than the checkpoint fills."""
    config, shapes = checkpoint.config, checkpoint.shapes
    layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", 0)
    there = sum(torch.Size(shape).numel() for shape in shapes.values())
    again = "copy or download both again"
    if layers > len(shapes):
        raise ValueError(
            f"config.json of {str(source)!r} describes {layers} layers, its checkpoint holds {len(shapes)} "
            f"tensors; {again}"
        )
    try:
        model = _skeleton(config)
    except Exception as error:  # foreign code on foreign values
        raise _unusable(source, error) from error
    wanted = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    if wanted > _PACKED * there:
        raise ValueError(
            f"config.json of {str(source)!r} describes {wanted} weights, its checkpoint holds {there}; "
            f"{again}"
        )


def _unusable(source: str | Path, error: Exception) -> ValueError:
    return ValueError(
        f"config.json of {str(source)!r} cannot be used ({in_one_line(error)}); copy or download it again"
    )

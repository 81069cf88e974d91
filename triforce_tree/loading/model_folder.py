"""Checks the files of a model's folder without importing torch or transformers.

So a folder that cannot be used is refused at once, before imports that take seconds.
"""

import json
import re
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from triforce_tree.models.adapters import undecodable
from triforce_tree.runtime.files.json_files import read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# These patterns match all files of a hub repository except weights and Python code.
_SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
CONFIG = "config.json"
ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_POSITIONS = ("max_position_embeddings", "max_target_positions", "n_positions")
# Keys under which configurations of multimodal models describe the decoder.
_TEXT_PARTS = ("text_config", "llm_config", "language_config", "decoder", "thinker_config")
# The header of a weight file is parsed here only up to this many bytes.
_MOST_HEADER = 16 << 20


def folder_of(source: str | Path) -> Path:
    """Returns the folder of a model; for a hub id the cached snapshot, possibly still without weights.

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


def settings_of(source: str | Path) -> tuple[Path, dict[str, Any]]:
    """Returns a model's folder and the contents of its config.json; for an adapter of peft, its base's.

    Raises:
        OSError: there is no such folder, or it has no config.json.
        ValueError: config.json is corrupt, or raised by :func:`base_and_adapter`.
    """
    source = base_and_adapter(source)[0]
    folder = folder_of(source)
    if not (folder / CONFIG).is_file():
        named = ", ".join(sorted(path.name for path in folder.glob("*.gguf"))[:4])
        if named:
            raise FileNotFoundError(
                f"{str(source)!r} has no {CONFIG}, but GGUF files ({named}); name one, by "
                "load(..., gguf_file=...) or --gguf-file"
            )
        raise FileNotFoundError(f"{str(source)!r} has no {CONFIG}; give a Hugging Face model folder")
    return folder, json_object(folder / CONFIG)


def check_folder(source: str | Path) -> None:
    """Checks a model's folder or hub id, of weight files only the names, sizes and headers.

    Raises:
        OSError: files are missing or truncated.
        ValueError: the folder does not hold a causal LM.
    """
    source = base_and_adapter(source)[0]
    folder, content = settings_of(source)
    check_kind(content, source)
    if folder == Path(source):  # a hub id's weights may not be downloaded yet
        for name in weight_names(folder, content.get("transformers_weights")):
            _check_whole(folder, name)


def check_kind(content: dict[str, Any], source: str | Path) -> None:
    """Raises ValueError if config.json describes an encoder-decoder or a type that transformers lacks."""
    kind, known = content.get("model_type"), _kinds()
    if content.get("is_encoder_decoder") is True:
        raise ValueError(
            f"{str(source)!r} is an encoder-decoder model ({kind}); hierarchical decoding needs a causal LM"
        )
    if isinstance(kind, str) and (known is None or kind in known):
        return
    raise unknown_kind(content, source)


def unknown_kind(content: dict[str, Any], source: str | Path) -> ValueError:
    """Returns the error for a model of a type that transformers does not have."""
    kind = content.get("model_type")
    if content.get("auto_map"):
        return ValueError(
            f"{str(source)!r} (model_type {kind!r}) needs Python code of its own (auto_map), which is not "
            "run; use a model of a family that transformers has itself, or load it yourself and give the "
            "object"
        )
    return ValueError(
        f"{str(source)!r} has model_type={kind!r}, which this release of transformers does not know; update "
        "transformers, or give another model"
    )


def named_positions(content: dict[str, Any]) -> int | None:
    """Returns the most text positions by a config.json, including extensions of rotary embeddings.

    Returns None if it has no such setting, in which case the class in transformers has a default. The
    result is at least ``models.supported.max_positions`` of the loaded model.
    """
    part = next((content[name] for name in _TEXT_PARTS if isinstance(content.get(name), dict)), content)
    named = [part[name] for name in _POSITIONS if type(part.get(name)) is int]
    rope = part.get("rope_parameters") or part.get("rope_scaling")
    if named and isinstance(rope, dict) and isinstance(factor := rope.get("factor"), int | float):
        original = rope.get("original_max_position_embeddings")
        named += [int(factor * base) for base in [*named, *([original] if type(original) is int else [])]]
    return max(named, default=None)


def base_and_adapter(source: str | Path) -> tuple[str | Path, Path | None]:
    """Returns the base model of an adapter of peft, and the adapter's folder; any other source with None.

    A folder or hub repository with ``adapter_config.json`` is an adapter, as it is for transformers.

    Raises:
        OSError: there is no such folder, or the adapter's base is not found, or its weights are missing.
        ValueError: the adapter's configuration is corrupt, names no base, or is of a method that cannot be
            decoded here.
    """
    folder = folder_of(source)
    if not (folder / ADAPTER).is_file():
        return source, None
    content = json_object(folder / ADAPTER)
    if reason := undecodable(content):
        raise ValueError(f"the adapter in {str(source)!r} {reason}")
    if find_spec("peft") is None:
        raise ValueError(
            f"{str(source)!r} holds an adapter, which needs the package peft; pip install peft, or merge the "
            "adapter into its model and save that"
        )
    if folder == Path(source) and not (folder / ADAPTER_WEIGHTS).is_file():
        pickled = (folder / "adapter_model.bin").exists()
        has = " but adapter_model.bin, a pickle, which may run code when loaded" if pickled else ""
        raise FileNotFoundError(
            f"the adapter in {str(source)!r} has no {ADAPTER_WEIGHTS}{has}; save it with save_pretrained, or "
            f"delete {ADAPTER} if this is a whole model"
        )
    return _base_of(content, folder, source), folder


def _base_of(content: dict[str, Any], folder: Path, source: str | Path) -> str | Path:
    """Returns the folder or hub id of an adapter's base model."""
    base, revision = content.get("base_model_name_or_path"), content.get("revision")
    name = f"set base_model_name_or_path in its {ADAPTER} to the folder of that model"
    if not isinstance(base, str) or not base:
        raise ValueError(f"the adapter in {str(source)!r} does not name its base model; {name}")
    # Where peft finds it, or beside the adapter. Any folder may have the name of a relative path.
    places = [place for place in (Path(base), folder / base) if place.is_dir()]
    found = next((place for place in places if (place / "config.json").is_file()), next(iter(places), None))
    if found is None and revision not in (None, "main"):
        raise ValueError(
            f"the adapter in {str(source)!r} names revision {revision!r} of its base model {base!r}; "
            f"download that, and {name}"
        )
    try:
        below = folder_of(found or base)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"the base model {base!r} of the adapter in {str(source)!r} is not found ({error}); {name}"
        ) from error
    if (below / ADAPTER).is_file():
        raise ValueError(
            f"the base model {base!r} of the adapter in {str(source)!r} is an adapter itself; merge that one "
            f"into its model, and {name}"
        )
    return found or base


@cache
def _kinds() -> frozenset[str] | None:
    """Returns the model types of the installed transformers without importing it; None if not found."""
    package = find_spec("transformers")
    places = list(package.submodule_search_locations or ()) if package is not None else []
    path = Path(places[0]) / "models" / "auto" / "auto_mappings.py" if places else None
    if path is None or not path.is_file() or (spec := spec_from_file_location("_model_types", path)) is None:
        return None
    module = module_from_spec(spec)
    try:
        assert spec.loader is not None
        spec.loader.exec_module(module)
        names = module.CONFIG_MAPPING_NAMES
    except Exception:  # other releases may have another form; the model is then refused later
        return None
    return frozenset(names)


def _check_whole(folder: Path, name: str) -> None:
    """Raises OSError if a safetensors file is missing, or shorter than its header says."""
    path = folder / name
    if not path.is_file():
        raise FileNotFoundError(f"{str(folder)!r} {lacks(folder, name)}")
    with path.open("rb") as file:
        head = file.read(8)
        length = int.from_bytes(head, "little")
        size = path.stat().st_size
        why = "" if len(head) == 8 and 8 + length <= size else "its header is cut off"
        if not why and length <= _MOST_HEADER:
            try:
                parts = json.loads(file.read(length))
                ends = [part["data_offsets"][1] for key, part in parts.items() if key != "__metadata__"]
                if 8 + length + max(ends, default=0) > size:
                    why = f"it has {size} bytes of {8 + length + max(ends)}"
            except (ValueError, TypeError, KeyError, IndexError, AttributeError):
                why = "its header is no JSON"
    if why:
        raise OSError(
            f"the checkpoint in {str(folder)!r} is corrupt ({name}: {why}); copy or download it again"
        )


def downloaded(source: str, patterns: Iterable[str], revision: str | None = None) -> Path:
    """Downloads the files of a hub repository that match ``patterns``, and returns their folder.

    Raises:
        FileNotFoundError: there is no such repository, or it cannot be reached.
    """
    # The import takes half a second.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=list(patterns)))
    except LocalEntryNotFoundError as error:
        # The library's own message describes its cache, which would mislead the user.
        raise FileNotFoundError(
            f"no such folder: {source!r}, and the Hugging Face hub cannot be reached to download it; give a "
            "folder with a model in it, or a hub id like owner/name on a machine with a network"
        ) from error
    except HFValidationError as error:
        # The library's own message describes valid ids, but a mistyped path is more likely.
        raise FileNotFoundError(
            f"no such folder: {source!r}, nor is it a hub id, which is like owner/name; give a folder with a "
            "model in it, or the id of one"
        ) from error
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"no such folder: {source!r}, and it cannot be downloaded from the Hugging Face hub "
            f"({in_one_line(error)}); give a folder with a model in it, or a hub id like owner/name"
        ) from error


def in_one_line(error: Exception) -> str:
    """Returns a library's error message without line breaks, cut to 240 characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:240]}{'...' * (len(text) > 240)}" if text else repr(error)


def needs_code(path: Path) -> bool:
    """Returns whether a configuration refers to Python code of the model (``auto_map``)."""
    try:
        return bool(json_object(path).get("auto_map"))
    except (OSError, ValueError):
        return False


def json_object(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds an object.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file holds no JSON object.
    """
    try:
        content = read_json(path)
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, not an object")
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is corrupt ({error}); copy or download it again") from error
    return content


def weight_names(folder: Path, main: str | None) -> list[str]:
    """Returns the names of the weight files that transformers will load, which need not exist yet.

    Args:
        main: the weight or index file in the configuration (``transformers_weights``); None if it has none.

    Raises:
        ValueError: the index cannot be used, or a file is no safetensors file or outside the folder.
    """
    if main is None:
        main = INDEX if (folder / INDEX).exists() and not (folder / WEIGHTS).exists() else WEIGHTS
    if not str(main).endswith(".safetensors.index.json"):
        return [_inside(main, folder / CONFIG)]
    index = folder / _inside(main.removesuffix(".index.json"), folder / CONFIG)
    index = index.with_name(index.name + ".index.json")
    named = json_object(index)
    weights = named.get("weight_map")
    if not isinstance(weights, dict) or not weights or not isinstance(named.get("metadata"), dict):
        raise ValueError(f"{str(index)!r} lacks its weight_map or its metadata; copy or download it again")
    return [_inside(name, index) for name in sorted(set(map(str, weights.values())))]


def _inside(name: Any, where: Path) -> str:
    """Checks that ``name``, a weight file listed in ``where``, is a safetensors file inside the folder.

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


def lacks(folder: Path, name: str) -> str:
    """Returns the end of an error message for a missing weight file."""
    pickles = sorted(p.name for p in (*folder.glob("*.bin"), *folder.glob("*.pt")))
    if name != WEIGHTS:
        return f"lacks {name}, which its index names; copy or download it again"
    has = f"only {pickles[0]}, a pickle, which may run code when loaded" if pickles else "no weights"
    return f"holds {has}; save the model with save_pretrained ({WEIGHTS})"

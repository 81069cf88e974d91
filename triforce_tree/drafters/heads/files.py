"""Reads folders with drafting heads, whose origin is unknown: no code in them is run."""

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from triforce_tree.drafters.heads.names import CONFIG
from triforce_tree.runtime.files.json_files import read_json


def settings(folder: Path) -> dict[str, Any]:
    """The contents of ``config.json``; empty where there is none.

    Raises:
        ValueError: it cannot be read.
    """
    path = folder / CONFIG
    if not path.is_file():
        return {}
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); copy or download it again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is no JSON object; copy or download it again")
    return found


def weights_file(folder: Path, names: Sequence[str]) -> Path | None:
    """The first of these files that is there."""
    return next((folder / name for name in names if (folder / name).is_file()), None)


def read_weights(folder: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """Tensors by name, on the CPU, from the first of these files that is there.

    Args:
        names: of files; what does not end in .safetensors is read by ``torch.load(weights_only=True)``.

    Raises:
        FileNotFoundError: none of them is there.
        ValueError: the file cannot be read, or holds more than tensors.
    """
    path = weights_file(folder, names)
    if path is None:
        raise FileNotFoundError(f"{str(folder)!r} has neither {' nor '.join(names)}; give the whole folder")
    try:
        if path.suffix == ".safetensors":
            found: Any = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        why = " ".join(str(error).split())[:160]
        raise ValueError(f"{path} cannot be read as weights ({why}); copy or download it again") from error
    if not isinstance(found, Mapping) or not all(isinstance(t, Tensor) for t in found.values()):
        raise ValueError(f"{path} holds more than tensors by name; give a file of weights alone")
    return dict(found)


def take(weights: Mapping[str, Tensor], name: str, shape: Sequence[int], folder: Path) -> Tensor:
    """One tensor, whose shape is checked; -1 stands for any size.

    Raises:
        ValueError: it is not there, or of another shape.
    """
    if name not in weights:
        raise ValueError(f"the heads in {str(folder)!r} lack {name}; copy or download them again")
    found = weights[name]
    if len(found.shape) != len(shape) or any(
        size not in (-1, has) for size, has in zip(shape, found.shape, strict=True)
    ):
        wanted = [size if size >= 0 else "any" for size in shape]
        raise ValueError(
            f"{name} in {str(folder)!r} is {list(found.shape)}, and for this target it must be {wanted}; "
            "give heads that were trained for this target"
        )
    return found

"""Reads folders with trained heads. Their origin is unknown, so no code in them is run."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from triforce_tree.drafters.token_map import TargetLogits
from triforce_tree.runtime.files.json_files import read_json

_MOST_NAMED = 8  # tensors in a message
_UNREADABLE = (OSError, SafetensorError, RuntimeError, EOFError, ValueError, LookupError, TypeError)


class HeadWeights:
    """The tensors of trained heads on the CPU, and which of them were used.

    Args:
        folder: the folder of the heads, which messages name.
        names: file names; the first that exists is read. An index (.json) names files of safetensors in the
            same folder. Other files are read by ``torch.load(weights_only=True)``.
        renamed: returns the name of a tensor in the form that the reader of the heads uses.

    Attributes:
        tensors: the tensors by name.

    Raises:
        FileNotFoundError: none of the files exists.
        ValueError: the file cannot be read, or holds more than tensors.
    """

    def __init__(self, folder: Path, names: Sequence[str], renamed: Callable[[str], str]) -> None:
        self.folder = folder
        tensors = {renamed(name): tensor for name, tensor in _tensors(folder, names).items()}
        self.tensors, self._unused = tensors, set(tensors)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __iter__(self) -> Any:
        return iter(self.tensors)

    def take(self, name: str, *shape: int) -> Tensor:
        """Returns one tensor after a check of its numbers and of its shape, in which -1 means any size.

        Raises:
            ValueError: the tensor is missing, has another shape, or holds numbers of another kind or such as
                are not finite.
        """
        if name not in self.tensors:
            raise ValueError(f"the heads in {str(self.folder)!r} lack {name}; copy or download them again")
        found = self.tensors[name]
        self._unused.discard(name)
        if len(found.shape) != len(shape) or any(
            size not in (-1, has) for size, has in zip(shape, found.shape, strict=True)
        ):
            wanted = [size if size >= 0 else "any" for size in shape]
            raise ValueError(
                f"{name} in {str(self.folder)!r} is {list(found.shape)}, and for this target it must be "
                f"{wanted}; give heads that were trained for this target"
            )
        whole = name == "d2t"
        if found.is_floating_point() == whole:
            kind = "whole" if whole else "floating-point"
            raise ValueError(
                f"{name} in {str(self.folder)!r} is {found.dtype}, and must hold {kind} numbers; give heads "
                "that are not quantised"
            )
        if not (found.float() if found.element_size() == 1 else found).isfinite().all():
            raise ValueError(
                f"{name} in {str(self.folder)!r} has numbers that are not finite; copy or download it again"
            )
        return found

    def vocabulary(self, drafted: int, vocabulary: int, device: torch.device) -> TargetLogits:
        """Returns the map from logits over a draft vocabulary to the target's, by the tensor ``d2t``: token i
        of the draft vocabulary has the id i + d2t[i].

        Args:
            drafted, vocabulary: sizes of the draft vocabulary and of the target's.
            device: device of the logits.

        Raises:
            ValueError: ``d2t`` is missing, or does not map to different tokens of the target.
        """
        ids = self.take("d2t", drafted).long() + torch.arange(drafted, device="cpu")
        if len(ids.unique()) < len(ids) or not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            raise ValueError(
                f"d2t in {str(self.folder)!r} does not map {drafted} draft tokens to different ones of "
                f"the target's {vocabulary}; give heads that were trained for this target"
            )
        columns = torch.full((vocabulary,), -1, device="cpu")
        columns[ids] = torch.arange(drafted, device="cpu")
        return TargetLogits(columns, device)

    def refuse_unused(self, without_effect: Sequence[str] = ()) -> None:
        """Raises ValueError if a tensor was never taken: the heads would compute something else than they
        were trained for.

        Args:
            without_effect: names of tensors that no computation of the heads reads.
        """
        unused = sorted(self._unused.difference(without_effect))
        if unused:
            shown = ", ".join(unused[:_MOST_NAMED]) + (", ..." if len(unused) > _MOST_NAMED else "")
            raise ValueError(
                f"the heads in {str(self.folder)!r} have {len(unused)} tensors that belong to no supported "
                f"layout ({shown}), and would compute something else without them; give heads in a layout "
                "that docs/trained_drafters.md lists"
            )


def _tensors(folder: Path, names: Sequence[str]) -> dict[str, Tensor]:
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        raise FileNotFoundError(f"{str(folder)!r} has neither {' nor '.join(names)}; give the whole folder")
    try:
        if path.suffix == ".safetensors":
            found: Any = load_file(path)
        elif path.suffix == ".json":
            found = {}
            for name in sorted({*read_json(path)["weight_map"].values()}):
                found |= load_file(folder / Path(name).name)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except (*_UNREADABLE, pickle.UnpicklingError) as error:
        why = " ".join(str(error).split())[:160]
        raise ValueError(f"{path} cannot be read as weights ({why}); copy or download it again") from error
    if not isinstance(found, Mapping) or not all(isinstance(t, Tensor) for t in found.values()):
        raise ValueError(f"{path} holds more than tensors by name; give a file of weights alone")
    return dict(found)

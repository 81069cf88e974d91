"""The folder of a drafter in training: its published files, and how far its training has come."""

import json
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from scripts.benchmarks.common.results import Record, header
from triforce_tree.bench.results import Records
from triforce_tree.drafters.registry import CONFIG, WEIGHTS
from triforce_tree.runtime.files.writing import replace_file

PROGRESS = "training.jsonl"


class Published(Protocol):
    """A network that has a published layout."""

    def config(self) -> dict[str, Any]: ...

    def published(self) -> dict[str, Tensor]: ...


class DrafterFolder:
    """Weights in fp16 with ``config.json``, and a results file of the training.

    Args:
        path: the folder; it is made.
        file: the name of the file of weights.
        settings: of the training; a folder with others is refused.

    Raises:
        ValueError: the folder holds a training with other settings.
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, settings: Record, file: str = WEIGHTS[0]) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path, self.weights = path, path / file
        self.records = Records(path / PROGRESS, settings, header(settings["seed"]))

    @property
    def spent(self) -> float:
        """Returns the seconds of training that the weights have had."""
        return float(self._saved["seconds"]) if self._saved else 0.0

    @property
    def _saved(self) -> Record | None:
        """Returns the record of the newest weights."""
        return next((row for row in reversed(self.records.all) if row["what"] == "saved"), None)

    def save(self, network: Published, seconds: float) -> None:
        """Replaces the files by those of the network, which has been trained for ``seconds``."""
        tensors = {
            name: t.detach().to("cpu", torch.float16).contiguous() for name, t in network.published().items()
        }
        replace_file(self.path / CONFIG, json.dumps(network.config(), indent=1) + "\n")
        replace_file(self.weights, save(tensors))
        size = self.weights.stat().st_size
        self.records.add({"what": "saved", "seconds": round(seconds, 1), "bytes": size})

    def restore(self, network: Published) -> float:
        """Reads weights that :meth:`save` wrote into the network; returns the seconds that they have had."""
        if self._saved:
            saved = load_file(self.weights)
            with torch.no_grad():
                for name, tensor in network.published().items():
                    tensor.copy_(saved[name])
        return self.spent

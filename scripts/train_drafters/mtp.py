"""An MTP layer of a target as it is trained (DeepSeek-V3, arXiv 2412.19437), and the checkpoint that has it.

Its arithmetic is that of ``triforce_tree/drafters/heads/mtp.py``: a decoder layer of Llama over ``eh_proj``
of the normed embedding of a token and the normed hidden state before it. Queries and keys are rotated by the
positions in the text, as the target's are.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from scripts.train_drafters.segments import Cache
from scripts.train_drafters.teacher import Teacher
from scripts.train_drafters.unrolled import UnrolledLayer
from triforce_tree.runtime.files.writing import replace_file

FILE = "mtp.safetensors"
_TARGET, _INDEX = "target.safetensors", "model.safetensors.index.json"


class MtpTraining(UnrolledLayer):
    """A layer over pairs of the target's state after its last norm and the token after it.

    Args:
        teacher, depths, cache: as for :class:`UnrolledLayer`; the target is a Llama.

    Raises:
        ValueError: the target's layers or rotary frequencies are others than those of a plain Llama.
    """

    def __init__(self, teacher: Teacher, depths: int, cache: Cache) -> None:
        own = teacher.model.config
        rope = own.rope_parameters or {}
        if own.model_type != "llama" or rope.get("rope_type", "default") != "default":
            raise ValueError(
                f"MTP layers are trained for a Llama with rope_type 'default', and the target is a "
                f"{own.model_type} with {rope.get('rope_type')!r}; use --kind eagle3 or dflash"
            )
        size, theta = teacher.size, float(rope["rope_theta"])
        super().__init__(
            teacher, depths, cache, (teacher.layers,), size, own.intermediate_size, theta, within_cache=False
        )
        self.eh_proj, self.enorm, self.hnorm = self.linear(size, 2 * size), self.rms_norm(), self.rms_norm()
        with torch.no_grad():
            self.eh_proj.weight[:, size:] += torch.eye(size)
        self.to(teacher.head.device)

    def fused(self, states: list[Tensor]) -> Tensor:
        return states[0]

    def inputs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))
        return x, self.input_norm(x)

    def config(self) -> dict[str, Any]:
        """Returns ``config.json`` of the target with its MTP layer."""
        own: dict[str, Any] = self._teacher[0].model.config.to_dict()
        return own | {"num_mtp_layers": 1}

    def published(self) -> dict[str, Tensor]:
        """Returns the tensors by their names in the target's checkpoint."""
        prefix = f"model.layers.{self._teacher[0].layers}."
        own = {
            "eh_proj": self.eh_proj, "enorm": self.enorm, "hnorm": self.hnorm, "shared_head.norm": self.norm,
        }  # fmt: skip
        return self.tensors(prefix) | {f"{prefix}{name}.weight": part.weight for name, part in own.items()}

    def complete(self, folder: Path, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Adds the target to a folder with the layer, so that it is a whole checkpoint."""
        if not (folder / _TARGET).exists():
            self._teacher[0].model.save_pretrained(folder, max_shard_size="1TB")
            (folder / "model.safetensors").replace(folder / _TARGET)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
        names: dict[str, str] = {}
        for file in (_TARGET, FILE):
            with safe_open(folder / file, "pt") as held:
                names |= dict.fromkeys(held.keys(), file)
        size = sum((folder / file).stat().st_size for file in (_TARGET, FILE))
        replace_file(folder / _INDEX, json.dumps({"metadata": {"total_size": size}, "weight_map": names}))
        replace_file(folder / "config.json", json.dumps(self.config(), indent=1))

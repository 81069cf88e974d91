"""A process of a training: where it runs, what it writes, and the checkpoints that another can go on from."""

import argparse
import copy
import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaForCausalLM

from triforce_tree.kernels.cpu.cpu_attention import instructions

# The one special token of the tokenizer.
_ENDS: Mapping[str, int] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
# The tokenizer's files in a folder of texts.
FILES = ("tokenizer.json", "tokenizer_config.json")
# In a folder of weights, the seconds of training so far; and what ends the name of the folder before it.
_CLOCK, _EARLIER = "clock.json", ".earlier"


class Run:
    """Holds where this process runs and where it writes.

    Args:
        args: the command line's; ``data`` is the folder that the tokenizer's files are copied from.
        ends: ids of special tokens, for the saved configuration.
    """

    def __init__(self, args: argparse.Namespace, ends: Mapping[str, int] = _ENDS) -> None:
        self.args, self.out, self.ends = args, Path(args.out), dict(ends)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.out.mkdir(parents=True, exist_ok=True)
        self.began = time.monotonic()

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of products: bf16 on a GPU, and on a CPU with AMX, which is five times as fast;
        else fp32.
        """
        fast = self.device.type == "cuda" or "AMX" in instructions()
        return torch.bfloat16 if fast else torch.float32

    def precision(self) -> torch.autocast:
        """Products in ``dtype``; weights are fp32."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype is torch.bfloat16)

    def log(self, **row: object) -> None:
        line = json.dumps({"t": round(time.monotonic() - self.began, 1), **row})
        with open(self.out / "log.jsonl", "a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def save(self, name: str, model: LlamaForCausalLM, spent: float) -> None:
        """Weights in bf16 as a model folder with the tokenizer, and the clock.

        A process that is killed meanwhile leaves the earlier folder, or the new one.
        """
        folder, new, earlier = (self.out / f"{name}{end}" for end in ("", ".part", _EARLIER))
        shutil.rmtree(new, ignore_errors=True)
        small = LlamaForCausalLM(copy.deepcopy(model.config)).to(torch.bfloat16)
        small.load_state_dict(model.state_dict())
        # Not while training: a padding token's embedding would get no gradient.
        small.config.update(self.ends)
        small.generation_config = GenerationConfig(**self.ends)
        small.save_pretrained(new, max_shard_size="14MB")
        for file in FILES:
            shutil.copy(self.args.data / file, new)
        (new / _CLOCK).write_text(json.dumps({"seconds": spent}))
        if folder.exists():
            shutil.rmtree(earlier, ignore_errors=True)
            folder.replace(earlier)
        new.replace(folder)
        shutil.rmtree(earlier, ignore_errors=True)

    def load(self, name: str, model: LlamaForCausalLM) -> float:
        """Restores ``name`` if it was saved; the seconds already spent on it."""
        folder, spent = self.out / name, 0.0
        if not folder.exists():
            folder = self.out / f"{name}{_EARLIER}"
        if self.args.resume and (folder / _CLOCK).exists():
            model.load_state_dict(LlamaForCausalLM.from_pretrained(folder).state_dict())
            spent = float(json.loads((folder / _CLOCK).read_text())["seconds"])
        return spent

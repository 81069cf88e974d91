"""Turns the checkpoints of train.py into the pair's model folders: ``<out>/target`` and ``<out>/draft``."""

import argparse
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaForCausalLM

from scripts.train_pair.tokenizer import END


def export(checkpoint: Path, tokenizer: Path, folder: Path) -> None:
    """Weights in bf16 with the ids of the end-of-text token, and the tokenizer's files."""
    if not checkpoint.is_dir():
        raise FileNotFoundError(f"no model folder {checkpoint}; run train.py first")
    end = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).token_to_id(END)
    ends = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    model.config.update(ends)
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, folder / file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="--out of train.py")
    parser.add_argument("--tokenizer", type=Path, required=True, help="--out of tokenizer.py")
    parser.add_argument("--out", type=Path, default=Path("triforce_tree/pair"), help="folder of both models")
    args = parser.parse_args()
    for name in ("target", "draft"):
        export(args.checkpoint / name, args.tokenizer, args.out / name)


if __name__ == "__main__":
    main()

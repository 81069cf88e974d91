"""Turns the checkpoints of train.py into ordinary Hugging Face folders.

Writes ``<out>/target`` and ``<out>/draft``: ``config.json``, ``generation_config.json``,
``model.safetensors`` (bf16) and the tokenizer files.
"""

import argparse
import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from scripts.train_pair.model import Shape


def export(name: str, checkpoint: Path, tokenizer: Path, out: Path) -> None:
    """Writes one model's folder; the tied output matrix is not stored twice."""
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    weights = {}
    for file in sorted(checkpoint.glob(f"{name}-*.safetensors")):
        weights.update(load_file(file))
    if not weights:
        raise FileNotFoundError(f"no {name}-*.safetensors in {checkpoint}; run train.py first")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    shape = Shape(**json.loads((checkpoint / f"{name}.json").read_text())["shape"])
    special = json.loads((tokenizer / "tokenizer_config.json").read_text())["eos_token"]
    end = json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"][special]
    (folder / "config.json").write_text(json.dumps(shape.hf_config(end), indent=2) + "\n")
    generation = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, folder / file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="--out of train.py")
    parser.add_argument("--tokenizer", type=Path, required=True, help="--out of tokenizer.py")
    parser.add_argument("--out", type=Path, default=Path("triforce_tree/pair"))
    args = parser.parse_args()
    for name in ("target", "draft"):
        export(name, args.checkpoint, args.tokenizer, args.out)


if __name__ == "__main__":
    main()

"""Inflate a small model to a large shape and write it as a model folder.

    python -m scripts.train_pair.inflate --shape llama-2-7b --out inflated-7b
    python -m scripts.train_pair.inflate --shape llama-68m --model draft --out inflated-68m

A shape is a name or hidden x layers x heads/kv_heads x head_dim x mlp. The vocabulary stays the small
model's. ``tests/loading/test_inflate.py`` checks that the large model computes the small one's function.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch

from triforce_tree.loading.checkpoints import PAIR, load_model
from triforce_tree.loading.inflate import SHAPES, Shape, inflate

TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt")


def need_space(out: Path, size: int) -> None:
    """Before minutes of work."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SystemExit(f"{str(out)!r} exists and is not an empty folder; give another --out")
    there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if (free := shutil.disk_usage(there).free) < size:
        raise SystemExit(
            f"{free / 1e9:.1f} GB are free at {str(out)!r}, the model takes {size / 1e9:.1f} GB; give "
            "another --out, or inflate in memory: triforce_tree.loading.inflate"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--shape", required=True, help=f"{', '.join(SHAPES)}, or as 1024x12x8/4x128x2048")
    add("--model", default="target", help="target or draft (the embedded ones), or a folder")
    add("--out", type=Path, required=True, help="folder to write, new or empty")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="of torch")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16", help="of the weights")
    add("--seed", type=int, default=0, help="of the weights without effect")
    add("--shard", default="4GB", help="largest file")
    args = parser.parse_args()
    source = PAIR / args.model if args.model in ("target", "draft") else Path(args.model)
    try:
        shape = Shape.parse(args.shape)
        small = load_model(source, args.device, getattr(torch, args.dtype))
        count = shape.parameters(small.config.vocab_size)
        size = count * small.dtype.itemsize
        need_space(args.out, size)
        print(f"{shape}: {count / 1e9:.3f} G weights, {size / 1e9:.2f} GB, on {small.device} ...", flush=True)
        inflate(small, shape, seed=args.seed).save_pretrained(args.out, max_shard_size=args.shard)
        for pattern in TOKENIZER_FILES:
            for file in source.glob(pattern):
                shutil.copy(file, args.out / file.name)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    files = sorted(file.name for file in args.out.iterdir())
    print(json.dumps({"shape": str(shape), "parameters": count, "bytes": size, "files": files}))


if __name__ == "__main__":
    main()

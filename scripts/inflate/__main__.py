"""Writes the embedded pair, inflated to a shape, as two checkpoints that any engine can load.

    python -m scripts.inflate llama-3.1-8b FOLDER          # FOLDER/target and FOLDER/draft

Texts of the pair have no end token, so that each request gets as many new tokens as it asks for.
"""

import argparse
from pathlib import Path

import torch

from scripts.inflate.pair import inflate_pair


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.inflate", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("shape", help="of the target, such as llama-3.1-8b")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--draft-shape", default="llama-68m")
    parser.add_argument("--seed", type=int, default=0, help="of the weights without effect")
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if gpu else "cpu"), torch.bfloat16 if gpu else torch.float32
    target, draft, tokenizer = inflate_pair(args.shape, device, dtype, args.draft_shape, args.seed)
    for name, model in (("target", target), ("draft", draft)):
        model.generation_config.eos_token_id = model.config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        model.save_pretrained(args.folder / name, max_shard_size="8GB")
        tokenizer.save_pretrained(args.folder / name)
    print(f"written: {args.folder / 'target'}, {args.folder / 'draft'}")


if __name__ == "__main__":
    main()

"""Inflate a small model to a large shape: write it as a model folder, or check it against the small one.

    python -m scripts.train_pair.inflate --shape llama-2-7b --out inflated-7b
    python -m scripts.train_pair.inflate --shape llama-68m --model draft --out inflated-68m
    python -m scripts.train_pair.inflate --shape 1024x12x8/4x128x2048 --check              # on a CPU
    python -m scripts.train_pair.inflate --shape llama-2-7b --check --device cuda --dtype bfloat16

A shape is a name or hidden x layers x heads/kv_heads x head_dim x mlp. The vocabulary stays the small
model's. ``--check`` runs Python's help topics through both models: how far logits are from the small
model's in fp32, and how long the greedy texts agree. The last line is the same as JSON.
"""

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from triforce_tree.bench import text
from triforce_tree.inflate import SHAPES, Shape, inflate
from triforce_tree.loading import PAIR, load_model, load_tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt")


def build(small: PreTrainedModel, shape: Shape, seed: int) -> tuple[LlamaForCausalLM, dict[str, Any]]:
    """The model, and what it took."""
    count = shape.parameters(small.config.vocab_size)
    size = count * small.dtype.itemsize
    print(f"{shape}: {count / 1e9:.3f} G weights, {size / 1e9:.2f} GB, on {small.device} ...", flush=True)
    start = time.perf_counter()
    big = inflate(small, shape, seed=seed)
    facts: dict[str, Any] = {"shape": str(shape), "parameters": count, "bytes": size}
    if small.device.type == "cuda":
        torch.cuda.synchronize(small.device)
        facts["peak_bytes"] = torch.cuda.max_memory_allocated(small.device)
    facts["build_seconds"] = round(time.perf_counter() - start, 2)
    print(f"built in {facts['build_seconds']} s", flush=True)
    return big, facts


def write(big: LlamaForCausalLM, source: Path, out: Path, shard: str) -> None:
    """An ordinary model folder with the small model's tokenizer."""
    big.save_pretrained(out, max_shard_size=shard)
    for pattern in TOKENIZER_FILES:
        for file in source.glob(pattern):
            shutil.copy(file, out / file.name)
    print(f"{out}: " + ", ".join(sorted(file.name for file in out.iterdir())))


def need_room(out: Path, size: int) -> None:
    """Before minutes of work."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SystemExit(f"{str(out)!r} exists and is not an empty folder; give another --out")
    there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if (free := shutil.disk_usage(there).free) < size:
        raise SystemExit(
            f"{free / 1e9:.1f} GB are free at {str(out)!r}, the model takes {size / 1e9:.1f} GB; free some "
            "space, give another --out, or do without a folder: triforce_tree.inflate builds it in memory"
        )


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """``[T, V]`` in fp32."""
    result: Tensor = model(input_ids=ids).logits[0].float()
    return result


def distance(ours: Tensor, exact: Tensor) -> dict[str, float]:
    """Two ``[T, V]`` of logits: errors relative to the standard deviation, KL in nats, top-1 agreement."""
    p, q = exact.log_softmax(-1), ours.log_softmax(-1)
    spread = float(exact.std())
    return {
        "rms": float((ours - exact).square().mean().sqrt()) / spread,
        "max": float((ours - exact).abs().max()) / spread,
        "kl": float((p.exp() * (p - q)).sum(-1).mean()),
        "same_top": float((ours.argmax(-1) == exact.argmax(-1)).float().mean()),
    }


def greedy(model: PreTrainedModel, ids: Tensor, new: int) -> list[int]:
    out: Any = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, min_new_tokens=new
    )
    return list(out[0, ids.shape[1] :].tolist())


def check(
    small: PreTrainedModel, big: LlamaForCausalLM, source: Path, tokens: int, new: int
) -> dict[str, Any]:
    """Logits over ``tokens`` tokens of real text, and the greedy continuation of the first half of them."""
    tokenizer = load_tokenizer(source)
    if tokenizer is None:
        raise SystemExit(f"{str(source)!r} has no tokenizer, and the check runs on real text")
    (prompt,) = text.prompts([text.pydoc_text()], tokenizer, tokens, 1)
    ids = torch.tensor([prompt], device=small.device)
    exact = logits(load_model(source, small.device, torch.float32), ids)
    dtype = str(small.dtype).removeprefix("torch.")
    result: dict[str, Any] = {"tokens": tokens, "dtype": dtype, "logits": {}}
    for name, model in (("small", small), ("inflated", big)):
        result["logits"][name] = found = distance(logits(model, ids), exact)
        print(
            f"{name:9s} in {dtype} against small in float32: rms {found['rms']:.2e}, max {found['max']:.2e} "
            f"(of the standard deviation), KL {found['kl']:.2e}, same top token {found['same_top']:.2%}"
        )
    ids = ids[:, : tokens // 2]
    ours, theirs = greedy(big, ids, new), greedy(small, ids, new)
    same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), new)
    result["greedy"] = {"new": new, "same": same}
    print(f"greedy: the first {same} of {new} new tokens are the same")
    if same < new:
        after = torch.cat([ids, torch.tensor([theirs[:same]], device=ids.device)], 1)
        first, second = logits(small, after)[-1].topk(2).values.tolist()
        result["greedy"]["gap"] = (first - second) / float(exact.std())
        print(f"there the small model's two best logits differ by {result['greedy']['gap']:.2e}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--shape", required=True, help=f"{', '.join(SHAPES)}, or as 1024x12x8/4x128x2048")
    parser.add_argument("--model", default="target", help="target or draft (the embedded ones), or a folder")
    parser.add_argument("--out", type=Path, help="folder to write, new or empty")
    parser.add_argument("--check", action="store_true", help="compare with the small model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="of torch")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 to write, else as it is loaded")
    parser.add_argument("--seed", type=int, default=0, help="of the weights without effect")
    parser.add_argument("--tokens", type=int, default=512, help="of text in the check")
    parser.add_argument("--new", type=int, default=64, help="greedy tokens in the check")
    parser.add_argument("--shard", default="4GB", help="largest file")
    args = parser.parse_args()
    if args.out is None and not args.check:
        parser.error("give --out, --check, or both")
    source = PAIR / args.model if args.model in ("target", "draft") else Path(args.model)
    try:
        shape = Shape.parse(args.shape)
        dtype = DTYPES[args.dtype] if args.dtype else torch.bfloat16 if args.out else None
        small = load_model(source, args.device, dtype)
        if args.out:
            need_room(args.out, shape.parameters(small.config.vocab_size) * small.dtype.itemsize)
        big, facts = build(small, shape, args.seed)
        if args.check:
            facts["check"] = check(small, big, source, args.tokens, args.new)
        if args.out:
            write(big, source, args.out, args.shard)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    print(json.dumps(facts))


if __name__ == "__main__":
    main()

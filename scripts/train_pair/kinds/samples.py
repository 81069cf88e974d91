"""Texts that a target writes behind prompts of each kind, as further data for its drafters.

    python -m scripts.train_pair.kinds.samples --data data/tokens.npz --out written.npz --minutes 20

Speculative decoding judges a draft by the target's own text. Prompts are random slices of the file that
``scripts.train_pair.text`` made for it. Continuations are drawn at each of ``--temperatures`` in turn. The
output has an array for each kind, of prompts with their continuations and an end token after each; it is
written anew after each batch of all kinds. ``--minutes`` may be exceeded by one batch.
"""

import argparse
import itertools
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from scripts.train_pair.kinds.mixture import slices
from triforce_tree.loading.checkpoints import PAIR, load_model, load_tokenizer


@torch.no_grad()
def continuations(target: PreTrainedModel, prompts: Tensor, new: int, temperature: float, end: int) -> Tensor:
    """Returns int64 ``[B, L + new]``: prompts ``[B, L]`` and what the target writes behind them.

    Args:
        temperature: 0 is greedy.
        end: the end token, which is never chosen.
    """
    how = (
        {"do_sample": True, "temperature": temperature, "top_k": 0}
        if temperature > 0
        else {"do_sample": False}
    )
    made = target.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=new,
        suppress_tokens=[end],
        eos_token_id=end,
        pad_token_id=end,
        **how,
    )
    assert isinstance(made, Tensor)
    return made


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.train_pair.kinds.samples",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--target", default=str(PAIR / "target"), help="folder, GGUF file or hub id of the target")
    add("--data", type=Path, required=True, help="tokens by kind of text")
    add("--out", type=Path, required=True, help="the file to write")
    add("--minutes", type=float, default=20.0, help="of generation")
    add("--rows", type=int, default=32, help="texts written together")
    add("--prompt", type=int, default=128, help="tokens of a prompt")
    add("--new", type=int, default=384, help="tokens behind it")
    add("--temperatures", type=float, nargs="+", default=[1.0, 0.6], help="taken in turn")
    add("--seed", type=int, default=0, help="of all draws")
    args = parser.parse_args(words)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = load_model(args.target, device, torch.bfloat16)
    tokenizer = load_tokenizer(args.target)
    assert tokenizer is not None, "a target has a tokenizer"
    end = int(tokenizer.eos_token_id)
    with np.load(args.data) as file:
        texts = dict(file)
    written: dict[str, list[np.ndarray]] = {kind: [] for kind in texts}
    generator, began = torch.Generator().manual_seed(args.seed), time.monotonic()
    for temperature in itertools.cycle(args.temperatures):
        for kind, tokens in texts.items():
            prompts = slices(torch.from_numpy(tokens.astype(np.int32)), args.rows, args.prompt, generator)
            made = continuations(target, prompts.to(device), args.new, temperature, end)
            rows = torch.nn.functional.pad(made, (0, 1), value=end)
            written[kind].append(rows.flatten().cpu().numpy().astype(tokens.dtype))
        np.savez(args.out, **{kind: np.concatenate(parts) for kind, parts in written.items()})
        total = sum(len(part) for parts in written.values() for part in parts)
        print(f"[{time.monotonic() - began:6.0f} s] {total:,} tokens", flush=True)
        if time.monotonic() - began > 60 * args.minutes:
            break


if __name__ == "__main__":
    main()

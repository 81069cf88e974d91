"""Trains drafting heads for the embedded target by distillation, and measures their expected acceptance.

    python -m scripts.train_pair.heads --kind medusa --data data --out medusa --minutes 4
    python -m scripts.train_pair.heads --kind eagle --data data --out eagle --minutes 4

``--data`` holds token files (``text.py``, or ``tokenizer.py``); where there are none, they are made from
packages that are installed. Heads learn the target's own distribution at each depth, given the text:
cross-entropy first, then also the overlap sum of min(p, q), the probability of acceptance. The folder in
``--out`` has the published format and serves ``triforce_tree.load(drafter=...)``; it is saved every half
minute, and ``--resume`` goes on from it. ``--minutes`` bounds training and the evaluation on Python's help
topics; ``--engine`` then decodes with the heads. The last line of the output is one JSON object, also in
``training.json``.
"""

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from scripts.train_pair.data import Facts, Stream
from scripts.train_pair.heads.evaluate import by_depth, draft_overlap, engine_figures, states
from scripts.train_pair.heads.networks import EagleHead, MedusaHeads, restore, save
from scripts.train_pair.heads.text import TOKENIZER, prepare
from scripts.train_pair.loop import Schedule, fit
from scripts.train_pair.options import training_parser
from scripts.train_pair.run import Run
from triforce_tree.bench.texts import pydoc_text
from triforce_tree.loading.checkpoints import PAIR

SINKS = 4
# Tokens of a segment whose loss is left out: a window is never that empty.
_COLD = 48


class HeadsRun(Run):
    """A training of heads; ``--resume`` goes on from their weights with a whole budget."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.device = torch.device(args.device)

    def save(self, name: str, model: MedusaHeads | EagleHead, spent: float) -> None:
        save(model, self.out)

    def load(self, name: str, model: MedusaHeads | EagleHead) -> float:
        if self.args.resume:
            restore(model, self.out)
        return 0.0


class Distillation:
    """The losses of heads that learn from the target.

    Args:
        run: of this process.
        heads: the network.
        target: what it learns from.
        stream: batches of tokens.
    """

    def __init__(
        self, run: HeadsRun, heads: MedusaHeads | EagleHead, target: LlamaForCausalLM, stream: Stream
    ) -> None:
        self.run, self.heads, self.target, self.stream = run, heads, target, stream
        self._contexts = itertools.cycle(run.args.contexts)

    def losses(self, progress: float) -> tuple[Tensor, dict[str, Any]]:
        """The loss of a batch of the next context length, and the overlap of each depth."""
        args, heads, device = self.run.args, self.heads, self.run.device
        context = next(self._contexts)
        segment = min(args.segment, context - SINKS)
        rows = max(1, args.tokens // context)
        tokens = self.stream.batch(rows, context, 0.15, 1.0)[0]
        with torch.no_grad():
            found = states(self.target, tokens, heads.features)
        final = found[self.target.config.num_hidden_layers]
        count = max(1, args.segments // rows)
        starts = torch.randint(SINKS, context - segment + 1, (rows, count), device=device)
        at = starts[..., None] + torch.arange(segment, device=device)
        at = torch.cat([torch.arange(SINKS, device=device).expand(rows, count, SINKS), at], -1)
        index = at.flatten(0, 1)  # [rows * count, SINKS + segment]
        row = torch.arange(rows, device=device).repeat_interleave(count)[:, None]
        cold = SINKS + min(_COLD, segment // 4)
        with self.run.precision():
            made = heads(tokens[row, index], [found[layer][row, index] for layer in heads.features])
            losses, overlaps = [], []
            direct = min(1.0, max(0.0, 2 * progress - 0.5))
            for depth, x in enumerate(made):
                kept = slice(cold, index.shape[1] - heads.depths)
                # Position i predicts token i + depth + 2, the target from position i + depth + 1.
                right = final[row, (index + depth + 1).clamp_max(context - 1)][:, kept]
                entropy, overlap = self.compare(x[:, kept], right)
                losses.append((entropy + direct * (1 - overlap)) * args.depth_weight**depth)
                overlaps.append(overlap.detach())
        named = {f"overlap_{depth}": overlap for depth, overlap in enumerate(overlaps)}
        return torch.stack(losses).sum(), {"length": context, **named}

    def compare(self, made: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy against the target's distribution and mean overlap, of states ``[N, T, H]``."""
        head = self.target.lm_head.weight
        log_q = F.linear(made, head.to(made.dtype)).float().log_softmax(-1)
        with torch.no_grad():
            p = F.linear(final, head).float().softmax(-1)
        return -(p * log_q).sum(-1).mean(), torch.minimum(p, log_q.exp()).sum(-1).mean()


def measured(run: HeadsRun, heads: MedusaHeads | EagleHead, target: LlamaForCausalLM) -> dict[str, Any]:
    """Expected acceptance by depth on Python's help topics, which no data of the training holds."""
    ids = Tokenizer.from_file(str(TOKENIZER)).encode(pydoc_text()).ids
    args, text, found = run.args, torch.tensor(ids), dict[str, Any]()
    for context in args.evaluate:
        window = min(args.window, context - SINKS - 2)
        found[f"{args.kind}_overlap_{context}"] = by_depth(
            heads, target, text, context, args.windows, args.new, SINKS, window
        )
        found[f"draft_overlap_{context}"] = draft_overlap(target, text, context, args.windows, args.new)
        run.log(**found)
    return found


def write(out: Path, result: dict[str, Any]) -> None:
    (out / "training.json").write_text(json.dumps(result))
    print(json.dumps(result), flush=True)


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = training_parser(
        "heads", __doc__, data=Path("heads_data"), muon_rate=0.01, decay=0.02, save_every=30.0
    )
    add = parser.add_argument
    add("--kind", choices=("medusa", "eagle"), required=True, help="what to train")
    add("--minutes", type=float, default=4.0, help="for everything but the making of --data")
    add("--depths", type=int, default=0, help="heads, or unrolled steps; 0: 4 heads, 5 steps")
    add("--layers", type=int, default=1, help="residual blocks of a Medusa head")
    add("--mlp", type=int, default=768, help="width of the EAGLE layer's MLP")
    add("--window", type=int, default=512, help="pairs of the drafter's cache in the evaluation")
    add("--contexts", type=int, nargs="+", default=[4096, 4096, 16384, 65536], help="taken in turn")
    add("--segments", type=int, default=64, help="parts of a step's tokens that the heads learn from")
    add("--segment", type=int, default=640, help="tokens of such a part")
    add("--depth-weight", type=float, default=0.9, help="of the loss, for each depth more")
    add("--evaluate", type=int, nargs="+", default=[2048, 65536], help="contexts of the evaluation")
    add("--windows", type=int, default=8, help="of the held-out text, for each")
    add("--new", type=int, default=256, help="positions of each")
    add("--engine", action="store_true", help="also decode after the first of --evaluate, in fp32")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    args = arguments(words)
    torch.manual_seed(args.seed)
    if not list(args.data.glob("*.npy")):
        print(json.dumps({"data": str(args.data), "tokens": prepare(args.data, 4.0)}), flush=True)
    began, run = time.monotonic(), HeadsRun(args)
    device = run.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = LlamaForCausalLM.from_pretrained(PAIR / "target", dtype=dtype).to(device).eval()
    target.requires_grad_(False)
    heads: MedusaHeads | EagleHead
    if args.kind == "medusa":
        heads = MedusaHeads(target, args.depths or 4, args.layers)
    else:
        heads = EagleHead(target, args.depths or 5, args.mlp, SINKS)
    heads.to(device)
    resumed = args.resume and (args.out / heads.weights_file).exists()
    stream = Stream(args.data, Facts(Tokenizer.from_file(str(TOKENIZER))), device, args.seed)
    parameters = sum(p.numel() for p in heads.parameters())
    run.log(what=args.kind, parameters=parameters, corpus_tokens=len(stream.tokens), resumed=resumed)
    # A fifth is left for the evaluation, a minute at most.
    whole = 60 * args.minutes
    seconds = began + whole - min(60.0, whole / 5) - time.monotonic()
    distillation = Distillation(run, heads, target, stream)
    steps = fit(run, args.kind, heads, distillation.losses, max(1e-3, seconds), Schedule(0.5, 40, 0.02))
    # The figures are those of the weights as they are saved.
    restore(heads, args.out)
    result = {
        "kind": args.kind,
        "steps": steps,
        "train_seconds": round(time.monotonic() - began, 1),
        "bytes": (args.out / heads.weights_file).stat().st_size,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
    }
    result |= measured(run, heads, target)
    result["seconds"] = round(time.monotonic() - began, 1)
    write(args.out, result)
    if args.engine:
        ids = Tokenizer.from_file(str(TOKENIZER)).encode(pydoc_text()).ids
        result |= engine_figures(args.out, ids, args.evaluate[0], args.new, device.type)
        write(args.out, result)


if __name__ == "__main__":
    main()

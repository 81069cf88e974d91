"""Distils the embedded draft further on several kinds of text, or a new draft; the target stays as it is.

    python -m scripts.train_pair.kinds.text --root root --out kinds.npz
    python -m scripts.train_pair.kinds.samples --data kinds.npz --out written.npz
    python -m scripts.train_pair.kinds --data kinds.npz --written written.npz --out run --minutes 5
    python -m scripts.train_pair.kinds --data kinds.npz --out run --minutes 9 --hidden 512 --mlp 1536

With ``--hidden`` a new draft is trained. The losses are those of ``given``: the target's distribution on
``--length`` tokens of context, the draft on its streaming cache, cross-entropy and the overlap sum of
min(p, q). ``--out`` gets the model folder ``draft``, ``log.jsonl`` and, of a draft that was trained further,
the folder ``mean`` of the mean of its weights and the first ones, which forgets less (arXiv 2109.01903).
``--minutes`` is the training's budget without compilation. Products are bf16 on a GPU; on a CPU those of the
target are. ``--resume`` goes on from the last checkpoint.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.utils import logging

from scripts.train_pair.given.__main__ import Distillation, begin_embedding, checked, draft_config
from scripts.train_pair.kinds.mixture import Mixture
from scripts.train_pair.loop import Schedule, fit
from scripts.train_pair.model import new_model
from scripts.train_pair.options import training_parser
from scripts.train_pair.run import Run
from triforce_tree.loading.checkpoints import PAIR, load_model


class Further(Distillation):
    """Losses of a draft with a small vocabulary."""

    def losses(self, progress: float) -> tuple[Tensor, dict[str, Any]]:
        # The overlap counts from the beginning in a draft that was trained for it before.
        return super().losses(1.0 if self.args.hidden is None else progress)

    # Logits of all positions at once: making 4,096 entries again for the gradient takes longer than it saves.
    def compared(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        own, others = self.draft.lm_head.weight, self.target.lm_head.weight
        return self.compare(student, own, teacher, others, tuple(self.args.temperatures))


@torch.no_grad()
def average(draft: LlamaForCausalLM, first: Mapping[str, Tensor], share: float) -> None:
    """Makes each weight the mean of its own, in this share, and its first value."""
    for name, parameter in draft.named_parameters():
        parameter.copy_(torch.lerp(first[name].to(parameter.device), parameter, share))


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = training_parser("kinds", __doc__, tokens=4096, muon_rate=1.5e-3, adam_rate=3e-4, decay=0.0)
    add = parser.add_argument
    add("--written", type=Path, help="file of samples.py")
    add("--written-share", type=float, default=0.25, help="of the slices, from that file")
    add("--minutes", type=float, default=5.0, help="of training, without compilation")
    add("--draft", type=Path, default=PAIR / "draft", help="folder of the draft to begin with")
    add("--length", type=int, default=2048, help="tokens of context of the target while it teaches")
    add("--overlap-weight", type=float, default=2.0, help="of 1 - sum(min(p, q)), beside cross-entropy")
    add("--temperatures", type=float, nargs="+", default=[1.0], help="of the overlaps, whose mean counts")
    add("--warm-up", type=int, default=10, help="steps")
    add("--new-weight", type=float, default=0.5, help="of the trained weights, in their mean with the first")
    add("--hidden", type=int, help="size of a new draft; by default --draft is trained further")
    add("--layers", type=int, default=2, help="of a new draft")
    add("--head-dim", type=int, default=64, help="of a new draft")
    add("--mlp", type=int, default=512, help="neurons of a layer of a new draft")
    return checked(parser, words)


def main(words: Sequence[str] | None = None) -> None:
    args = arguments(words)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(args.seed)
    files = [args.data] if args.written is None else [args.data, args.written]
    # The run copies the tokenizer from there.
    args.data = PAIR / "target"
    run = Run(args)
    mixture = Mixture(files, args.written_share, run.device, args.seed)
    target = load_model(str(PAIR / "target"), run.device, torch.bfloat16).requires_grad_(False)
    weights: Mapping[str, Tensor] | None = None
    if args.hidden is None:
        earlier = LlamaForCausalLM.from_pretrained(args.draft, dtype=torch.float32)
        weights = earlier.state_dict()
        draft = new_model(earlier.config, run.device)
        draft.load_state_dict(weights)
    else:
        config = draft_config(target.config, args.hidden, args.layers, args.head_dim, args.mlp)
        draft = new_model(config, run.device)
        begin_embedding(draft, target)
    run.log(what="start", tokens=mixture.tokens)
    made = Further(args, run, target, draft, mixture)
    fit(run, "draft", draft, made.losses, 60 * args.minutes, Schedule(0.3, args.warm_up), [0.0])
    if weights is not None:
        average(draft, weights, args.new_weight)
        run.save("mean", draft, 60 * args.minutes)
    run.log(what="done")


if __name__ == "__main__":
    main()

"""Distils the embedded draft further on several kinds of text; the target stays as it is.

    python -m scripts.train_pair.kinds.text --root root --out kinds.npz
    python -m scripts.train_pair.kinds.samples --data kinds.npz --out written.npz
    python -m scripts.train_pair.kinds --data kinds.npz --written written.npz --out run --minutes 5

The losses are those of ``given``: the target's distribution on ``--length`` tokens of context, the draft on
its streaming cache, cross-entropy and the overlap sum of min(p, q). ``--out`` gets the model folder
``draft``, the folder ``mean`` of the mean of its weights and the first ones, which forgets less (arXiv
2109.01903), and ``log.jsonl``. ``--minutes`` is the training's budget
without compilation. Products are bf16 on a GPU; on a CPU those of the target are. ``--resume`` goes on from
the last checkpoint.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.utils import logging

from scripts.train_pair.given.__main__ import Distillation, checked
from scripts.train_pair.kinds.mixture import Mixture
from scripts.train_pair.loop import Schedule, fit
from scripts.train_pair.model import new_model
from scripts.train_pair.options import training_parser
from scripts.train_pair.run import Run
from triforce_tree.loading.checkpoints import PAIR, load_model


class Further(Distillation):
    """Losses of a draft that was distilled before, with a small vocabulary."""

    def losses(self, progress: float) -> tuple[Tensor, dict[str, Any]]:
        # The overlap counts from the beginning: it is what the draft was trained for last.
        return super().losses(1.0)

    # Logits of all positions at once: making 4,096 entries again for the gradient takes longer than it saves.
    def compared(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        return self.compare(student, self.draft.lm_head.weight, teacher, self.target.lm_head.weight)


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
    add("--warm-up", type=int, default=10, help="steps")
    add("--new-weight", type=float, default=0.5, help="of the trained weights, in their mean with the first")
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
    draft = LlamaForCausalLM.from_pretrained(args.draft, dtype=torch.float32)
    weights = draft.state_dict()
    draft = new_model(draft.config, run.device)
    draft.load_state_dict(weights)
    run.log(what="start", tokens=mixture.tokens)
    made = Further(args, run, target, draft, mixture)
    fit(run, "draft", draft, made.losses, 60 * args.minutes, Schedule(0.3, args.warm_up), [0.0])
    average(draft, weights, args.new_weight)
    run.save("mean", draft, 60 * args.minutes)
    run.log(what="done")


if __name__ == "__main__":
    main()

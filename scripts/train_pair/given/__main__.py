"""Distils a small draft for a given target with its own tokenizer: on one GPU within minutes.

    python -m scripts.train_pair.text --target TARGET --installed --out data
    python -m scripts.train_pair.given --target TARGET --data data --out smollm2 --minutes 5
    python -m scripts.train_pair.given --target TARGET --data data --out smollm2 --minutes 40 \
        --tokens 2048 --length 2048                                     # on a CPU

TARGET is a Llama of any size: a folder, a GGUF file or a hub id. The draft is a Llama of ``--hidden`` x
``--layers`` whose embedding, tied to its head, begins as the target's, projected on its principal components.
It learns the target's distribution at every position of real text, as the draft reads it: through a
StreamingLLM cache (``distil``), while the target reads ``--length`` tokens of context. Cross-entropy first,
then also the overlap sum of min(p, q), the probability of acceptance.

``--out`` gets the model folder ``draft``, for ``triforce_tree.load(TARGET, draft=...)``, and ``log.jsonl``.
``--minutes`` is the training's budget without compilation; afterwards the draft's overlap and that of the
retrieval level are measured on Python's help topics, which no training text holds. Products are bf16 on a
GPU and on a CPU with AMX, else fp32. ``--resume`` goes on from the last checkpoint.
"""

import argparse
import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging

import triforce_tree
from scripts.train_pair.distill import SEGMENT, SINKS, StreamingForward, compare, cut
from scripts.train_pair.given.overlaps import overlaps
from scripts.train_pair.kinds.mixture import slices
from scripts.train_pair.loop import Schedule, fit
from scripts.train_pair.model import llama, new_model
from scripts.train_pair.options import training_parser
from scripts.train_pair.run import Run
from scripts.train_pair.text import TOKENS
from triforce_tree.bench.texts import pydoc_text, token_ids
from triforce_tree.loading.checkpoints import load_model, load_tokenizer

# Positions whose logits exist at a time: two fp32 rows of the vocabulary for each.
_LOGITS_ON_GPU, _LOGITS_ON_CPU = 8192, 2048
# Minutes of training from which the compilation of the loss, one minute, is worth it on a CPU.
_LONG = 5.0
# Tokens at the beginning of a segment that teach nothing: no window is that empty while decoding.
_COLD = 128


def draft_config(target: LlamaConfig, hidden: int, layers: int, head_dim: int, mlp: int) -> LlamaConfig:
    """Returns a draft's configuration, with the target's vocabulary."""
    if hidden % head_dim:
        raise ValueError(f"--hidden {hidden} is not a multiple of --head-dim {head_dim}; choose one that is")
    config = llama(hidden, layers, hidden // head_dim, head_dim, mlp, 1e4)
    config.vocab_size = target.vocab_size
    return config


@torch.no_grad()
def begin_embedding(draft: LlamaForCausalLM, target: PreTrainedModel) -> None:
    """The draft's tied embedding: the target's head on its principal components, rescaled.

    With E ``[V, H]`` the target's head times the weights of its last norm, and P ``[H, d]`` the first
    eigenvectors of E^T E, the rows of E P keep what differs most between tokens.
    """
    head = target.get_output_embeddings().weight.float()
    weighed = head * target.model.norm.weight.float()
    components = torch.linalg.eigh(weighed.mT @ weighed).eigenvectors.flip(1)
    kept = weighed @ components[:, : draft.config.hidden_size]
    own = draft.model.embed_tokens.weight
    own[:, : kept.shape[1]].copy_(kept * (0.04 / kept.std()))


class Distillation:
    """The losses of a draft that learns from the target.

    Args:
        args: the command line's.
        run: of this process.
        target: the teacher.
        draft: with attention for training (``model.new_model``).
        slices: draws int64 ``[rows, length]`` of text.
    """

    def __init__(
        self, args: argparse.Namespace, run: Run, target: Any, draft: LlamaForCausalLM,
        slices: Callable[[int, int], Tensor],
    ) -> None:  # fmt: skip
        self.args, self.run, self.target, self.draft, self.slices = args, run, target, draft, slices
        self.streaming = StreamingForward(draft, run.device)
        self.rows = max(1, args.tokens // args.length)
        self.segments = max(1, args.tokens // self.rows // (SINKS + SEGMENT))
        on_gpu = run.device.type == "cuda"
        compiles = on_gpu or args.minutes > _LONG
        self.compare = torch.compile(compare, dynamic=False) if compiles else compare
        self.most = _LOGITS_ON_GPU if on_gpu else _LOGITS_ON_CPU

    def losses(self, progress: float) -> tuple[Tensor, dict[str, Any]]:
        """Returns the loss of a batch, and what the log says of it."""
        args, device = self.args, self.run.device
        tokens = self.slices(self.rows, args.length)
        starts = torch.randint(SINKS, args.length - SEGMENT + 1, (self.rows, self.segments), device=device)
        starts[:, 0] = SINKS  # a segment right after the sinks has no gap
        with self.run.precision():
            with torch.no_grad():
                hidden = self.target.model(tokens, use_cache=False).last_hidden_state
            inputs, teacher = cut(tokens, hidden, starts)
            student = self.streaming(inputs).flatten(0, 1)
            entropy, overlap = self.compared(student, teacher.flatten(0, 1))
        weight = torch.ones(self.rows, self.segments, SEGMENT, device=device)
        weight[:, 1:, :_COLD] = 0.0
        weight = weight.flatten() / weight.sum()
        direct = args.overlap_weight * min(1.0, max(0.0, 2 * progress - 0.5))
        loss = ((entropy + direct * (1 - overlap)) * weight).sum()
        return loss, {"length": args.length, "overlap": (overlap.detach() * weight).sum()}

    def compared(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cross-entropy and overlap ``[N]``; logits of many positions are made for some at a time,
        and made
        again for the gradient: for 32,768 positions of 49,152 entries they would take 13 GB."""
        own, others = self.draft.lm_head.weight, self.target.lm_head.weight
        if len(student) <= self.most:
            return self.compare(student, own, teacher, others)
        found = [
            checkpoint(self.compare, x, own, y, others, use_reentrant=False)
            for x, y in zip(student.split(self.most), teacher.split(self.most), strict=True)
        ]
        return torch.cat([one[0] for one in found]), torch.cat([one[1] for one in found])


def measured(args: argparse.Namespace, run: Run) -> dict[str, float | None]:
    """Overlaps of draft and retrieval level with the target, by the engine, on held-out text."""
    engine = triforce_tree.load(
        args.target, args.out / "draft", tokenizer=load_tokenizer(args.data), device=run.device
    )
    ids = token_ids(engine.tokenizer, pydoc_text()[: 12 * args.evaluate * args.windows])
    retrieval, draft = overlaps(engine, ids, args.evaluate, args.budget, args.windows)
    engine.close()
    return {"draft_overlap": draft, "retrieval_overlap": retrieval}


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = training_parser("given", __doc__, tokens=32768, adam_rate=1.5e-3)
    add = parser.add_argument
    add("--target", required=True, help="folder, GGUF file or hub id of a Llama")
    add("--minutes", type=float, default=5.0, help="of training, without compilation")
    add("--hidden", type=int, default=256, help="size of the draft")
    add("--layers", type=int, default=2, help="of the draft")
    add("--head-dim", type=int, default=64, help="of the draft")
    add("--mlp", type=int, default=768, help="neurons of a layer of the draft")
    add("--length", type=int, default=4096, help="tokens of context of the target while it teaches")
    add("--overlap-weight", type=float, default=1.0, help="of 1 - sum(min(p, q)), in the second half")
    add("--evaluate", type=int, default=4096, help="prompt tokens of the evaluation; 0 for none")
    add("--budget", type=int, default=1024, help="of the retrieval level in the evaluation")
    add("--windows", type=int, default=4, help="prompts of the evaluation")
    return checked(parser, words)


def checked(parser: argparse.ArgumentParser, words: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options of a distillation, whose ``--length`` has room for a segment."""
    args = parser.parse_args(words)
    if args.length < SINKS + SEGMENT:
        parser.error(f"--length {args.length} is less than a segment of {SINKS + SEGMENT} tokens; raise it")
    return args


def main(words: Sequence[str] | None = None) -> dict[str, float | None]:
    args = arguments(words)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(args.seed)
    tokenizer = load_tokenizer(args.data)
    known = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    run = Run(args, {name: token for name, token in known.items() if token is not None})
    target = load_model(args.target, run.device, run.dtype).requires_grad_(False)
    config = draft_config(target.config, args.hidden, args.layers, args.head_dim, args.mlp)
    draft = new_model(copy.deepcopy(config), run.device)
    begin_embedding(draft, target)
    with np.load(args.data / TOKENS) as file:
        tokens = torch.from_numpy(np.concatenate([file[kind].astype(np.int32) for kind in file]))
    draws, tokens = torch.Generator().manual_seed(args.seed), tokens.to(run.device)
    sizes = [sum(p.numel() for p in model.parameters()) for model in (target, draft)]
    run.log(what="start", tokens=len(tokens), parameters=sizes)
    distillation = Distillation(
        args, run, target, draft, lambda rows, length: slices(tokens, rows, length, draws)
    )
    fit(run, "draft", draft, distillation.losses, 60 * args.minutes, Schedule(0.4), [0.0])
    del distillation, target, draft
    found = measured(args, run) if args.evaluate else {}
    run.log(what="done", **found)
    return found


if __name__ == "__main__":
    main()

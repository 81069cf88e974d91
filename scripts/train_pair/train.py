"""Trains the embedded pair: target by staged context, then draft by distillation.

Start with ``torchrun --nproc_per_node N -m scripts.train_pair.train ...``; one process per GPU (or CPU, with
``--toy``). ``--out`` gets the model folders ``target`` and ``draft``, as ``triforce_tree/pair`` has them;
``evaluate.py`` measures that pair. Both trainings are budgets of seconds, so a run ends on time on any
machine; compilation is not part of them. ``--resume`` goes on from the last checkpoint in ``--out`` (weights
and clock; optimiser state is warmed anew).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from scripts.train_pair.data import Facts, Stream
from scripts.train_pair.distill import SEGMENT, SINKS, StreamingForward, compare, cut
from scripts.train_pair.loop import Schedule, fit
from scripts.train_pair.model import SHAPES, TOY_SHAPES, hidden_states, new_model, nll
from scripts.train_pair.options import training_parser
from scripts.train_pair.run import Run


@dataclass(frozen=True)
class Stage:
    """A share of the target's time at one context length."""

    length: int  # tokens
    share: float  # of the time budget
    planted: float  # share of sequences with facts
    weight: float  # loss weight of an answer's digits


STAGES = (
    Stage(1024, 0.14, 0.4, 2.0),
    Stage(4096, 0.22, 0.5, 4.0),
    Stage(32768, 0.26, 0.8, 8.0),
    Stage(131072, 0.38, 1.0, 10.0),
)
TOY_STAGES = (Stage(256, 0.4, 0.5, 2.0), Stage(2048, 0.6, 1.0, 8.0))


def train_target(run: Run, target: LlamaForCausalLM, stream: Stream) -> None:
    args, stages = run.args, TOY_STAGES if run.args.toy else STAGES
    ends = [sum(s.share for s in stages[: i + 1]) for i in range(len(stages))]
    compiled = torch.compile(nll, dynamic=False) if run.device.type == "cuda" else nll

    def losses(progress: float) -> tuple[Tensor, dict[str, Any]]:
        stage = next((s for s, e in zip(stages, ends, strict=True) if progress < e), stages[-1])
        rows = max(1, args.tokens // stage.length)
        x, y, w = stream.batch(rows, stage.length, stage.planted, stage.weight)
        with run.precision():
            hidden = hidden_states(target, x).flatten(0, 1)
            made = compiled(hidden, target.lm_head.weight, y.flatten())
        return (made * w.flatten()).sum() / w.sum(), {"length": stage.length}

    fit(run, "target", target, losses, args.target_seconds, Schedule(args.hold), [0.0, *ends[:-1]])


def distil(run: Run, target: LlamaForCausalLM, draft: LlamaForCausalLM, stream: Stream) -> None:
    """Cross-entropy against the target's full-context distribution, then also overlap itself."""
    args, length = run.args, run.args.teacher_length
    rows = max(1, args.tokens // length)
    segments = max(2, args.tokens // rows // (SINKS + SEGMENT))
    streaming = StreamingForward(draft, run.device)
    compiled = torch.compile(compare, dynamic=False) if run.device.type == "cuda" else compare
    weight = torch.ones(rows, segments, SEGMENT, device=run.device)
    weight[:, 1:, :128] = 0.0  # a cold window does not occur: prefill feeds a whole one
    weight = weight.flatten()

    def losses(progress: float) -> tuple[Tensor, dict[str, Any]]:
        tokens = stream.batch(rows, length, 0.15, 1.0)[0]
        with run.precision():
            with torch.no_grad():
                hidden = hidden_states(target, tokens)
            starts = torch.randint(SINKS, length - SEGMENT + 1, (rows, segments), device=run.device)
            starts[:, 0] = SINKS  # one segment a document has no gap after its sinks
            inputs, teacher = cut(tokens, hidden, starts)
            student = streaming(inputs).flatten(0, 1)
            heads = draft.lm_head.weight, target.lm_head.weight
            entropy, overlap = compiled(student, heads[0], teacher.flatten(0, 1), heads[1])
        direct = args.overlap_weight * min(1.0, max(0.0, 2 * progress - 0.5))
        loss = ((entropy + direct * (1 - overlap)) * weight).sum() / weight.sum()
        return loss, {"length": length, "overlap": (overlap.detach() * weight).sum() / weight.sum()}

    fit(run, "draft", draft, losses, args.draft_seconds, Schedule(0.3), [0.0])


def main() -> None:
    parser = training_parser("train", __doc__, adam_rate=3e-3, decay=0.1)
    add = parser.add_argument
    add("--target-seconds", type=float, default=400.0, help="budget of the target's training")
    add("--draft-seconds", type=float, default=110.0, help="budget of the distillation")
    add("--teacher-length", type=int, default=16384, help="tokens of context of the target while it teaches")
    add("--hold", type=float, default=0.45, help="share of the target's time before the rate decays")
    add("--overlap-weight", type=float, default=1.0, help="of 1 - sum(min(p, q)), late in distillation")
    add("--python-weight", type=float, default=1.6, help="sampling weight of Python's own texts, per token")
    add("--toy", action="store_true", help="tiny models and stages, on any machine")
    args = parser.parse_args()
    run = Run(args)
    torch.manual_seed(args.seed)
    facts = Facts(Tokenizer.from_file(str(args.data / "tokenizer.json")))
    stream = Stream(args.data, facts, run.device, args.seed * 1000 + run.rank, args.python_weight)
    target, draft = (new_model(shape, run.device) for shape in (TOY_SHAPES if args.toy else SHAPES))
    sizes = [sum(p.numel() for p in m.parameters()) for m in (target, draft)]
    corpus = round(len(stream.tokens) / 1e6, 1)
    run.log(what="start", corpus_mtok=corpus, world=run.world, parameters=sizes)
    train_target(run, target, stream)
    distil(run, target, draft, stream)
    run.log(what="done")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

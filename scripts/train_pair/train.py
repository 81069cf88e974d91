"""Trains the embedded pair: target by staged context, then draft by distillation.

Start with ``torchrun --nproc_per_node N -m scripts.train_pair.train ...``; one process per GPU (or CPU, with
``--toy``). ``export.py`` writes what comes out as model folders, ``evaluate.py`` measures them. Both
trainings are budgets of seconds, so a run ends on time on any machine. ``--resume`` continues from the last
checkpoint in ``--out`` (weights and clock; optimiser state is warmed anew).
"""

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import Tensor

from scripts.train_pair.data import Facts, Stream
from scripts.train_pair.distill import SEGMENT, SINKS, StreamingForward, cut, probs
from scripts.train_pair.model import CHUNK, DRAFT, TARGET, Llama
from scripts.train_pair.optim import PairOptimizer
from scripts.train_pair.run import Run, fastest_backend, same_everywhere


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


def rate(progress: float, step: int, hold: float) -> float:
    """Warm-up over 60 steps, hold, then linear decay to 1% at the end of the budget."""
    warm = min(1.0, (step + 1) / 60)
    return warm * min(1.0, max(0.01, (1 - progress) / (1 - hold)))


def train_target(run: Run, target: Llama, stream: Stream) -> None:
    args = run.args
    spent = run.load("target", target)
    same_everywhere(target)
    if spent >= args.target_seconds:
        return
    stages = TOY_STAGES if args.toy else STAGES
    optimizer = PairOptimizer(target, args.muon_rate, args.adam_rate, args.decay)
    # Compilation is not part of the budget.
    x, y, _ = stream.batch(args.tokens // stages[0].length, stages[0].length, 0.0, 1.0)
    target.backend = fastest_backend(run, target, stages[0].length, len(x))
    target.losses(x, y, run.dtype).mean().backward()
    optimizer.reduce(0.0, read=True)
    optimizer.flat.zero_()
    begin, clock, step, current, tokens = time.monotonic() - spent, spent, 0, stages[0], 0
    saved = seen = time.monotonic()
    while clock < args.target_seconds:
        progress = clock / args.target_seconds
        ends = [sum(s.share for s in stages[: i + 1]) for i in range(len(stages))]
        stage = next((s for s, e in zip(stages, ends, strict=True) if progress < e), stages[-1])
        rows = max(1, args.tokens // stage.length)
        if stage is not current:
            target.backend = fastest_backend(run, target, stage.length, rows)
            current, seen = stage, time.monotonic()
            tokens = 0
        x, y, w = stream.batch(rows, stage.length, stage.planted, stage.weight)
        loss = (target.losses(x, y, run.dtype) * w).sum() / w.sum()
        loss.backward()
        tokens += rows * stage.length * run.world
        slow = stage.length > 65536 or step % 8 == 0
        now = optimizer.reduce(time.monotonic() - begin, read=slow)
        clock = now if slow else clock
        optimizer.step(rate(progress, step, args.hold))
        if step % args.log_every == 0:
            run.log(
                what="target",
                step=step,
                length=stage.length,
                loss=round(loss.item(), 4),
                progress=round(progress, 3),
                mtok_s=round(tokens / (time.monotonic() - seen) / 1e6, 2),
            )
        step += 1
        if time.monotonic() - saved > args.save_every:
            run.save("target", target, clock)
            saved = time.monotonic()
    run.save("target", target, args.target_seconds)
    run.log(what="target", steps=step)


def distil(run: Run, target: Llama, draft: Llama, stream: Stream) -> None:
    """Cross-entropy against the target's full-context law, then also overlap itself."""
    args = run.args
    spent = run.load("draft", draft)
    same_everywhere(draft)
    if spent >= args.draft_seconds:
        return
    length = args.teacher_length
    rows = max(1, args.tokens // length)
    segments = max(2, args.tokens // rows // (SINKS + SEGMENT))
    target.backend = fastest_backend(run, target, length, rows)
    streaming = StreamingForward(draft, run.device)
    compiled = torch.compile(probs, dynamic=False) if run.device.type == "cuda" else probs
    optimizer = PairOptimizer(draft, args.muon_rate, args.adam_rate, args.decay)
    weight = torch.ones(rows, segments, SEGMENT, device=run.device)
    weight[:, 1:, :128] = 0.0  # a cold window does not occur: prefill feeds a whole one
    weight = weight.flatten()

    def losses(progress: float) -> tuple[Tensor, Tensor]:
        tokens = stream.batch(rows, length, 0.15, 1.0)[0]
        with torch.no_grad():
            hidden = target.hidden_states(tokens, run.dtype).unflatten(0, (rows, length))
        starts = torch.randint(SINKS, length - SEGMENT + 1, (rows, segments), device=run.device)
        starts[:, 0] = SINKS  # one segment a document has no gap behind its sinks
        inputs, teacher = cut(tokens, hidden, starts)
        student = streaming(inputs, run.dtype)
        student, teacher = student.flatten(0, 1), teacher.flatten(0, 1)
        entropy, overlap = compiled(student, *draft.head, teacher, *target.head)
        direct = args.overlap_weight * min(1.0, max(0.0, 2 * progress - 0.5))
        loss = ((entropy + direct * (1 - overlap)) * weight).sum() / weight.sum()
        return loss, (overlap.detach() * weight).sum() / weight.sum()

    losses(0.0)[0].backward()  # compilation is not part of the budget
    optimizer.reduce(0.0, read=True)
    optimizer.flat.zero_()
    begin, clock, step = time.monotonic() - spent, spent, 0
    while clock < args.draft_seconds:
        progress = clock / args.draft_seconds
        loss, overlap = losses(progress)
        loss.backward()
        slow = step % 8 == 0
        now = optimizer.reduce(time.monotonic() - begin, read=slow)
        clock = now if slow else clock
        optimizer.step(rate(progress, step, 0.3))
        if step % args.log_every == 0:
            run.log(
                what="draft",
                step=step,
                loss=round(loss.item(), 4),
                overlap=round(overlap.item(), 4),
                progress=round(progress, 3),
            )
        step += 1
    run.save("draft", draft, args.draft_seconds)
    run.log(what="draft", steps=step)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="token files of data.py")
    add("--tokenizer", type=Path, required=True, help="tokenizer.json")
    add("--out", type=Path, required=True, help="checkpoints and log")
    add("--target-seconds", type=float, default=400.0, help="budget of the target's training")
    add("--draft-seconds", type=float, default=110.0, help="budget of the distillation")
    add("--tokens", type=int, default=CHUNK, help="tokens per process and step")
    add("--teacher-length", type=int, default=16384, help="tokens of context of the target while it teaches")
    add("--muon-rate", type=float, default=0.015, help="learning rate of the matrices")
    add("--adam-rate", type=float, default=3e-3, help="learning rate of everything else")
    add("--decay", type=float, default=0.1, help="weight decay of the matrices")
    add("--hold", type=float, default=0.45, help="share of the target's time before the rate decays")
    add("--overlap-weight", type=float, default=1.0, help="of 1 - sum(min(p, q)), late in distillation")
    add("--python-weight", type=float, default=1.6, help="sampling weight of Python's own texts, per token")
    add("--log-every", type=int, default=50, help="steps")
    add("--save-every", type=float, default=60.0, help="seconds")
    add("--resume", action="store_true", help="go on from the checkpoint in --out")
    add("--toy", action="store_true", help="tiny models and stages, on any machine")
    add("--seed", type=int, default=0, help="of all draws")
    args = parser.parse_args()
    run = Run(args)
    torch.manual_seed(args.seed)
    facts = Facts(Tokenizer.from_file(str(args.tokenizer)))
    stream = Stream(args.data, facts, run.device, args.seed * 1000 + run.rank, args.python_weight)
    shapes = (TARGET, DRAFT)
    if args.toy:
        shapes = (
            replace(TARGET, hidden=64, layers=2, heads=1, head_dim=64, mlp=128),
            replace(DRAFT, hidden=32, layers=1, heads=1, head_dim=32, mlp=64),
        )
    target, draft = (Llama(shape).to(run.device) for shape in shapes)
    if run.device.type == "cuda":
        target.compile_pieces()
        draft.compile_pieces()
    run.log(
        what="start",
        corpus_mtok=round(len(stream.tokens) / 1e6, 1),
        world=run.world,
        parameters=[sum(p.numel() for p in m.parameters()) for m in (target, draft)],
    )
    train_target(run, target, stream)
    distil(run, target, draft, stream)
    run.log(what="done")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

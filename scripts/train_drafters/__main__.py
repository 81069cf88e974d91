"""Trains a drafter for a target, by distillation, within a time limit.

    python -m scripts.train_pair.text --target TARGET --installed --out data
    python -m scripts.train_drafters --kind eagle3 --target TARGET --data data/tokens.npz --out drafter
    python -m scripts.train_drafters ... --seconds 500          # ends a call; the same command goes on later
    python -m scripts.train_drafters --kind draft --target TARGET --data data/tokens.npz --out draft \
        --contexts 4096 --tokens 32768 --evaluate 4096          # --tokens 4096 --segments 4 on a CPU

TARGET is a folder, a GGUF file or a hub id; without ``--target`` it is the embedded target. The drafter
learns its distribution at every depth that it drafts: cross-entropy first, then also the overlap sum of
min(p, q), the probability that a token is accepted at T = 1. Hidden states of the target are computed on the
fly, on texts of all ``--contexts``, and the drafter reads them through sinks and a window as it does while
decoding, so that acceptance does not fall with the length of the text.

``--out`` gets ``config.json`` and ``model.safetensors`` in the published layout, for
``triforce_tree.load(TARGET, drafter=OUT)``. For ``--kind mtp`` it gets a checkpoint of the target with the
layer, which is in ``mtp.safetensors``, for ``load(OUT, drafter="mtp")``. For ``--kind draft`` it gets a small
Llama, for ``load(TARGET, draft=OUT)``. ``training.jsonl`` is a results file of losses, seconds and, at the
end, of the drafter's agreement with the target on Python's help topics, which are held out.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.utils import logging

from scripts.benchmarks.common.results import Record
from scripts.train_drafters.block import BlockTraining
from scripts.train_drafters.draft import DraftTraining
from scripts.train_drafters.eagle import EagleNetwork, ParallelEagleNetwork
from scripts.train_drafters.evaluate import by_context
from scripts.train_drafters.folder import DrafterFolder
from scripts.train_drafters.mtp import FILE, MtpTraining
from scripts.train_drafters.segments import Cache, Segments
from scripts.train_drafters.teacher import Teacher
from scripts.train_pair.kinds.mixture import Mixture
from scripts.train_pair.loop import Schedule, fit
from triforce_tree.bench.texts import pydoc_text, token_ids
from triforce_tree.config import StreamingConfig
from triforce_tree.kernels.cpu.cpu_attention import instructions
from triforce_tree.loading.checkpoints import PAIR, load_model, load_tokenizer

# Logits of a loss that exist at a time; those of more are made part by part, and again for the gradient.
_LOGITS_ON_GPU, _LOGITS_ON_CPU = 1 << 27, 1 << 24
_DRAFT_WINDOW = StreamingConfig.window
# Options that may differ between the calls of one training.
_OF_A_CALL = (
    "out", "seconds", "steps", "json", "device", "log_every", "save_every", "evaluate", "windows", "new",
)  # fmt: skip
KINDS = ("eagle3", "p-eagle", "mtp", "dflash", "draft")


def network_of(teacher: Teacher, args: argparse.Namespace) -> nn.Module:
    """Returns the network that learns, of the kind ``args.kind``."""
    cache = Cache(args.sinks, args.window)
    match args.kind:
        case "mtp":
            return MtpTraining(teacher, args.depths, cache)
        case "dflash":
            return BlockTraining(teacher, args.depths, args.layers, args.mlp, args.window)
        case "draft":
            return DraftTraining(teacher, args.hidden, args.layers, args.head_dim, args.mlp, cache)
    eagle = ParallelEagleNetwork if args.kind == "p-eagle" else EagleNetwork
    return eagle(teacher, args.depths, args.mlp, args.own_head, cache)


class Training:
    """A process of a training, as ``train_pair.loop.fit`` needs it.

    Args:
        args: the command line's.
        folder: of the drafter.
        say: prints a line.
    """

    def __init__(self, args: argparse.Namespace, folder: DrafterFolder, say: Callable[[str], None]) -> None:
        self.args, self.folder, self._say = args, folder, say
        self.device, self.save, self.load = torch.device(args.device), folder.save, folder.restore
        self._began = time.monotonic()

    def log(self, **values: object) -> None:
        """Adds a record to the folder's results file, with the seconds of this call, and prints it."""
        row = {"call_seconds": round(time.monotonic() - self._began, 1), **values}
        self.folder.records.add(row)
        self._say(json.dumps(row))

    def precision(self) -> torch.autocast:
        """Products in bf16 on a GPU and on a CPU with AMX; weights are fp32."""
        fast = self.device.type == "cuda" or "AMX" in instructions()
        return torch.autocast(self.device.type, torch.bfloat16, enabled=fast)


def compare(
    student: Tensor, draft_head: Tensor, teacher: Tensor, target_head: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns cross-entropy against the target's whole distribution and overlap sum(min(p, q)), each ``[N]``
    fp32.

    Args:
        student, teacher: last hidden states, ``[N, H_d]`` and ``[N, H_t]``.
        draft_head, target_head: heads, ``[V, H_d]`` and ``[V, H_t]``.
    """
    ours, theirs = F.linear(student, draft_head).float(), F.linear(teacher, target_head).float()
    entropy = -(F.softmax(theirs, dim=-1) * F.log_softmax(ours, dim=-1)).sum(-1)
    return entropy, torch.minimum(F.softmax(theirs, dim=-1), F.softmax(ours, dim=-1)).sum(-1)


class Distillation:
    """The losses of a drafter that learns from the target.

    Args:
        training: of this process.
        network: the drafter.
        teacher: the target.
        texts: draws ``[R, T]`` tokens for R and T.
    """

    def __init__(
        self, training: Training, network: Any, teacher: Teacher, texts: Callable[[int, int], Tensor]
    ) -> None:
        self.training, self.network, self.teacher, self.texts = training, network, teacher, texts
        self._contexts = itertools.cycle(training.args.contexts)
        on_gpu = training.device.type == "cuda"
        self._compare = torch.compile(compare, dynamic=False) if on_gpu else compare
        entries = _LOGITS_ON_GPU if on_gpu else _LOGITS_ON_CPU
        self._most = max(1, entries // teacher.head.shape[0])

    def losses(self, progress: float) -> tuple[Tensor, dict[str, Any]]:
        """Returns the loss of a batch of the next context length, and what the log says of it."""
        args, network, device = self.training.args, self.network, self.training.device
        context = next(self._contexts)
        count, length = args.segments, args.segment
        tokens = self.texts(max(1, args.tokens // context), context)
        hidden = self.teacher.states(tokens, network.features)
        rows = torch.arange(count, device=device) % len(tokens)
        starts = torch.randint(context - length - network.depths, (count,), device=device)
        segments = Segments(network.cache, rows, starts, length, network.every)
        direct = min(1.0, max(0.0, 2 * progress - 0.5))
        losses, overlaps = [], []
        with self.training.precision():
            for depth, made in enumerate(network(tokens, hidden, segments)):
                final = segments.take_own(hidden[self.teacher.layers], 1 + depth)
                entropy, overlap = self._compared(made.flatten(0, 1), final.flatten(0, 1))
                losses.append((entropy + direct * (1 - overlap)).mean() * args.depth_weight**depth)
                overlaps.append(overlap.detach().mean())
        named = {f"overlap_{depth + 1}": overlap for depth, overlap in enumerate(overlaps)}
        return torch.stack(losses).sum(), {"length": context, **named}

    def _compared(self, made: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cross-entropy and overlap ``[N]`` of states ``[N, H]`` of the drafter and the target."""
        own, others = self.network.head, self.teacher.head
        if len(made) <= self._most:
            return self._compare(made, own, final, others)
        found = [
            checkpoint(self._compare, x, own, y, others, use_reentrant=False)
            for x, y in zip(made.split(self._most), final.split(self._most), strict=True)
        ]
        return torch.cat([one[0] for one in found]), torch.cat([one[1] for one in found])


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.train_drafters",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--kind", choices=KINDS, default="eagle3", help="what to train")
    add("--target", default=str(PAIR / "target"), help="folder, GGUF file or hub id of the target")
    add("--data", type=Path, required=True, help="tokens by kind of text, which text.py writes")
    add("--written", type=Path, help="tokens that the target wrote, by kinds.samples")
    add("--written-share", type=float, default=0.4, help="of the texts, from that file")
    add("--out", type=Path, required=True, help="folder of the drafter")
    add("--minutes", type=float, default=6.0, help="of training, in all calls together")
    add("--seconds", type=float, help="end this call before its training takes more; the evaluation follows")
    add("--seed", type=int, default=0, help="of all draws")
    add("--depths", type=int, default=6, help="tokens drafted one after the other")
    add("--layers", type=int, default=2, help="layers of a block drafter or a draft; others have one")
    add("--mlp", type=int, help="neurons of a layer; by default 1536, 768 of a draft")
    add("--hidden", type=int, default=256, help="size of a draft")
    add("--head-dim", type=int, default=64, help="of a draft")
    add("--own-head", action="store_true", help="train a copy of the target's language model head too")
    add(
        "--sinks",
        type=int,
        default=Cache.sinks,
        help="first pairs that the drafter attends to; a block drafter has none",
    )
    add(
        "--window",
        type=int,
        help=f"newest pairs that the drafter attends to; by default {Cache.window}, and {_DRAFT_WINDOW} of a "
        "draft, which attends to twice as many at most",
    )
    add("--contexts", type=int, nargs="+", default=[2048, 4096, 16384, 65536], help="of texts, taken in turn")
    add("--tokens", type=int, default=131_072, help="that the target reads in a step")
    add("--segments", type=int, default=64, help="parts of them that the drafter learns from in a step")
    add("--segment", type=int, default=512, help="tokens of such a part")
    add("--depth-weight", type=float, default=0.9, help="of the loss, for each depth more")
    add("--muon-rate", type=float, default=0.01, help="peak learning rate of matrices")
    add("--adam-rate", type=float, default=2e-3, help="peak learning rate of everything else")
    add("--decay", type=float, default=0.02, help="weight decay of matrices")
    add("--warm-up", type=int, default=40, help="steps until the peak rates")
    add("--steps", type=int, default=10**9, help="most steps of this call")
    add("--evaluate", type=int, nargs="*", default=[2048, 65536], help="contexts of the evaluation")
    add("--windows", type=int, default=8, help="parts of the held-out text, for each of these contexts")
    add("--new", type=int, default=256, help="positions of each part")
    add("--log-every", type=int, default=50, help="steps")
    add("--save-every", type=float, default=30.0, help="seconds")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    add("--json", action="store_true", help="print one JSON object, the result; progress goes to stderr")
    args = parser.parse_args(words)
    args.mlp = args.mlp or (768 if args.kind == "draft" else 1536)
    args.window = args.window or (_DRAFT_WINDOW if args.kind == "draft" else Cache.window)
    if args.segment < 1 or min(args.contexts) <= args.segment + args.depths:
        parser.error(
            f"--contexts {min(args.contexts)} has no room for --segment {args.segment} and {args.depths} "
            "depths; raise it, or lower --segment"
        )
    if not 0 <= args.sinks <= args.window:
        parser.error(f"--sinks {args.sinks} must be at most --window {args.window}; lower it")
    return args


def settings_of(args: argparse.Namespace) -> Record:
    """Returns the options that all calls of a training share."""
    kept = {name: value for name, value in vars(args).items() if name not in _OF_A_CALL}
    return {name: str(value) if isinstance(value, Path) else value for name, value in kept.items()}


def main(words: Sequence[str] | None = None) -> Record:
    """Trains, measures and writes a drafter; returns the result."""
    args = arguments(words)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = load_model(args.target, device, dtype, blocks=False)
    teacher = Teacher(model)
    longest, most = max([*args.contexts, *args.evaluate]), teacher.positions
    if longest > most:
        sys.exit(f"--contexts and --evaluate: {longest} is more than the target's {most} positions; lower it")
    torch.manual_seed(args.seed)
    network: Any = network_of(teacher, args)
    folder = DrafterFolder(args.out, settings_of(args), *([FILE] if args.kind == "mtp" else []))
    training = Training(args, folder, lambda line: print(line, file=sys.stderr, flush=True))
    # The texts after a break are others than those before it.
    seed = args.seed + 1000 * int(folder.spent)
    files = [args.data] if args.written is None else [args.data, args.written]
    texts = Mixture(files, args.written_share, device, seed)
    parameters = sum(p.numel() for p in network.parameters())
    training.log(what="begin", parameters=parameters, tokens=texts.tokens, spent=folder.spent)
    total = 60 * args.minutes
    losses = Distillation(training, network, teacher, texts).losses
    until = folder.spent + args.seconds if args.seconds is not None else total
    steps = fit(training, network, losses, total, Schedule(0.5, args.warm_up, 0.02), until)
    # What is measured are the weights as they are saved.
    folder.restore(network)
    tokenizer = load_tokenizer(args.target)
    if isinstance(network, MtpTraining | DraftTraining):
        network.complete(folder.path, tokenizer)
    ids = token_ids(tokenizer, pydoc_text()) if args.evaluate else []
    result: Record = {
        "what": "result", "kind": args.kind, "steps": steps, "seconds": folder.spent,
        "parameters": parameters, "bytes": folder.weights.stat().st_size,
    }  # fmt: skip
    for context in args.evaluate:
        with training.precision():
            result |= by_context(network, teacher, ids, context, args.windows, args.new)
    training.log(**result)
    if args.json:
        print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()

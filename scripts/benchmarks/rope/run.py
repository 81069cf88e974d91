"""The embedded pair at more positions than it was trained on, with YaRN and with plain rope.

    python -m scripts.benchmarks rope --contexts 8192 16384          # on a CPU, fp32: what a factor costs
    python -m scripts.benchmarks rope --contexts 122880 262144 524288 1048000 --device cuda
    python -m scripts.benchmarks rope --tiny

A setting is FACTOR, FACTOR:ATTENTION_FACTOR or FACTOR:ATTENTION_FACTOR:BETA_FAST:BETA_SLOW, as transformers'
rope_parameters have them; what is left empty has transformers' default, and 1 is plain rope. After a real
text the tokens that follow are given: the target's loss on them, and the overlap of the retrieval level and
of the draft with the target. Then needles: six-digit numbers at several depths of the same text, asked for
one by one. With --speed the text is decoded too, beside plain decoding. Rows that the file has are kept.

    python -m scripts.benchmarks rope --contexts 1048000 --settings 8:1.0 --set gpu_memory=8GiB --speed
"""

import argparse
import json
import statistics
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from scripts.benchmarks.cards.decode import decoded
from scripts.benchmarks.common.command import parser, results_folder
from scripts.benchmarks.common.long_texts import long_prompts
from scripts.benchmarks.common.results import Record, header, rows_at, write
from scripts.benchmarks.common.rope import TRAINED, use_yarn
from scripts.benchmarks.rope.needles import found_share
from scripts.benchmarks.rope.tables import FILE
from scripts.benchmarks.texts.command import device_for, machine_of, option
from triforce_tree import Engine, load
from triforce_tree.eval.overlap import overlap, teacher_forced
from triforce_tree.eval.texts.registry import DOCUMENTATION, Texts
from triforce_tree.loading.checkpoints import PAIR, load_model, load_tokenizer
from triforce_tree.runtime.executor import free_memory

_DECODED = 256
_PARAMETERS = ("attention_factor", "beta_fast", "beta_slow")


def parsed(setting: str) -> tuple[float, dict[str, float]]:
    """The factor and further parameters of YaRN.

    Raises:
        ValueError: it is not spelled as the module's docstring says.
    """
    factor, *others = setting.split(":")
    if len(others) > len(_PARAMETERS):
        raise ValueError(f"{setting!r} has more than FACTOR:ATTENTION_FACTOR:BETA_FAST:BETA_SLOW")
    given = {name: float(value) for name, value in zip(_PARAMETERS, others, strict=False) if value}
    if float(factor) < 1 or (float(factor) == 1 and given):
        raise ValueError(f"{setting!r}: a factor is at least 1, and 1 is plain rope")
    return float(factor), given


def extend(model: PreTrainedModel, setting: str, original: int, tokens: int) -> None:
    """Use a setting in place; plain rope, too, may then go on beyond its positions."""
    factor, given = parsed(setting)
    use_yarn(model, factor, original, **given)
    model.config.max_position_embeddings = max(tokens, model.config.max_position_embeddings)


def measured(engine: Engine, ids: Sequence[int], context: int) -> Record:
    """Loss and overlaps over the tokens of ``ids`` after the first ``context``."""
    losses: list[float] = []
    retrieval: list[float] = []
    draft: list[float] = []
    for probs in teacher_forced(engine, ids, context):
        tokens = torch.tensor(probs.tokens, device=probs.target.device)[:, None]
        losses += (-probs.target.gather(1, tokens).clamp_min(1e-30).log()).flatten().tolist()
        retrieval += [overlap(probs.target, probs.retrieval)] * len(tokens)
        if probs.draft is not None:
            draft += [overlap(probs.target, probs.draft)] * len(tokens)
    return {
        "loss": statistics.fmean(losses),
        "retrieval_overlap": statistics.fmean(retrieval),
        "draft_overlap": statistics.fmean(draft),
        "tokens": len(losses),
    }


def main(words: Sequence[str] | None = None) -> int:
    made = parser("benchmarks rope", __doc__)
    add = made.add_argument
    add("--contexts", type=int, nargs="+", default=[8192, 16_384], help="tokens of a text")
    add("--settings", nargs="+", default=["1", "2", "4", "8"], help="of YaRN, see above")
    add("--original", type=int, default=TRAINED, help="positions that count as trained")
    add("--new-tokens", type=int, default=256, help="given after each text")
    add("--needles", type=int, default=5, help="in each text")
    add("--budget", type=int, help="tokens of the retrieval cache; by default the engine's")
    add("--kinds", nargs="+", default=[DOCUMENTATION], help="texts, by kind or name")
    add("--texts", help="file that `texts` wrote; by default what is installed")
    add("--set", type=option, nargs="+", default=[], metavar="NAME=VALUE", help="further engine options")
    add("--speed", action="store_true", help="decode 256 tokens too, by three levels and plainly")
    add("--device", help="cpu or cuda; by default CUDA where there is one")
    args = made.parse_args(words)
    if args.tiny:
        args.contexts, args.settings, args.new_tokens, args.needles = [256], ["1", "4"], 16, 1
    device = torch.device(args.device) if args.device else device_for(args)
    try:
        for setting in args.settings:
            parsed(setting)
        lengths = [context + args.new_tokens for context in args.contexts]
        prompts = long_prompts(Texts(args.texts), args.kinds, lengths)
    except (ValueError, OSError) as error:
        made.error(str(error))
    path = results_folder(args.out, args.tiny) / FILE.format(machine=machine_of(device))
    rows = rows_at(path)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    target, draft = (load_model(PAIR / name, device, dtype) for name in ("target", "draft"))
    tokenizer = load_tokenizer(PAIR / "target")
    assert tokenizer is not None, "the embedded pair has a tokenizer"
    about: Record = {"dtype": str(dtype), "original": args.original}
    options = dict(args.set) | ({} if args.budget is None else {"budget": args.budget})
    if args.set:
        about["options"] = options
    for context in args.contexts:
        for name, ids in prompts[context + args.new_tokens].items():
            for setting in args.settings:
                row: Record = {"context": context, "text": name, "setting": setting, **about}
                if any(all(old.get(key) == row[key] for key in row) for old in rows):
                    continue
                extend(target, setting, args.original, len(ids) + 64)
                row |= _row(target, draft, tokenizer, ids, context, options, args)
                rows.append(row)
                print(json.dumps(row), flush=True)
                write(path, header(args.seed) | {"rows": rows})
    return 0


def _row(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    context: int,
    options: Record,
    args: argparse.Namespace,
) -> Record:
    # Rounds that are given need no stage costs, and speed is not measured.
    engine = load(target, draft, tokenizer=tokenizer, levels=3, rounds=2, **options)
    try:
        found = measured(engine, ids, context)
        free_memory()
        share = found_share(engine, ids[:context], args.needles, args.seed)
    finally:
        engine.close()
    found |= {"needles": args.needles, "found": share}
    if args.speed:
        engine = load(target, draft, tokenizer=tokenizer, levels=3, **options)
        try:
            found |= {"speed": decoded(engine, "", ids[:context], _DECODED, _DECODED // 4)}
        finally:
            engine.close()
    return found

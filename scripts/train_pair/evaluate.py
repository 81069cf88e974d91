"""Measures what the embedded pair can do, through the engine's own caches: docs/results/pair.jsonl.

    python -m scripts.train_pair.evaluate                      # on a CPU: needles up to 16K, overlaps at 16K
    python -m scripts.train_pair.evaluate --device cuda --lengths 2048 8192 16384 32768 122880 \
        --retrieval 16384/1024 122880/4096 --trials 40

Only the figures measured now are replaced in the file. The text is Python's help topics, which the pair
was not trained on. Overlap is the mean of sum(min(p, q)), the chance that a token drawn from q is
accepted under p, at temperature 1: of the draft on its streaming cache and of the target on its retrieval
cache, both against the target on its full cache, over the tokens that follow a prompt in the text.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

import triforce_tree
from scripts.benchmarks.common.results import RESULTS, content_at, write
from scripts.benchmarks.common.results import header as header_of
from scripts.benchmarks.common.texts import cut
from triforce_tree.bench import needle, results
from triforce_tree.bench import texts as text
from triforce_tree.check import overlap
from triforce_tree.runtime.files.writing import check_writable

# The draft's overlap is a figure at one length of context.
DRAFT_CONTEXT = 16_384
# Tokens after each prompt.
NEW = 128


def windows(ids: Sequence[int], length: int, count: int) -> Iterator[list[int]]:
    """``count`` windows that start at even distances; the text wraps around."""
    yield from (cut(ids, number * len(ids) // count, length) for number in range(count))


@torch.no_grad()
def loss(model: Any, ids: Sequence[int], length: int, count: int) -> float:
    """Returns mean negative log-likelihood in nats over windows of ``length`` tokens."""
    losses = []
    for window in windows(ids, length + 1, count):
        row = torch.tensor([window], device=model.device)
        logits = model(row[:, :-1]).logits[0].float()
        losses.append(float(torch.nn.functional.cross_entropy(logits, row[0, 1:])))
        print(f"loss at {length}: {losses[-1]:.3f}")
    return statistics.fmean(losses)


def overlaps(
    engine: triforce_tree.Engine, ids: Sequence[int], length: int, budget: int, count: int
) -> tuple[float, float | None]:
    """Returns (retrieval, draft) against the full target, over ``NEW`` tokens after ``count`` prompts."""
    engine = engine.with_options(budget=budget)
    retrieval, draft = [], []
    for window in windows(ids, length + NEW, count):
        for probs in overlap.teacher_forced(engine, window, length):
            retrieval += torch.minimum(probs.retrieval, probs.target).sum(-1).tolist()
            if probs.draft is not None:
                draft += torch.minimum(probs.draft, probs.target).sum(-1).tolist()
        print(f"{length}/{budget}: retrieval {statistics.fmean(retrieval):.3f}", end="")
        print(f", draft {statistics.fmean(draft):.3f}" if draft else "")
    return statistics.fmean(retrieval), statistics.fmean(draft) if draft else None


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.train_pair.evaluate",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--lengths", type=int, nargs="*", default=[2048, 8192, 16384], help="of needle prompts")
    add("--trials", type=int, default=40, help="needles for each length")
    add(
        "--retrieval", nargs="*", default=["16384/1024"], metavar="CONTEXT/BUDGET", help="overlaps to measure"
    )
    add("--prompts", type=int, default=8, help="prompts for each overlap, of 128 tokens after them")
    add("--windows", type=int, default=7, help="of 16,384 tokens for the loss; 0 for no loss")
    add("--seed", type=int, default=0, help="of the needles")
    add("--device", default="cpu", help="cpu or cuda")
    add("--out", type=Path, default=RESULTS / "pair.jsonl", help="results file")
    args = parser.parse_args(words)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    check_writable(args.out)
    engine = triforce_tree.load(device=args.device, dtype=torch.float32)
    assert engine.tokenizer is not None
    source = text.pydoc_text()
    ids = text.token_ids(engine.tokenizer, source)

    found: dict[str, Any] = {}
    if args.windows:
        found["loss_16k"] = round(loss(engine.target.model, ids, 16_384, args.windows), 4)
    retrieval: dict[str, float] = {}
    for pair in args.retrieval:
        length, _, budget = pair.partition("/")
        share, draft = overlaps(engine, ids, int(length), int(budget), args.prompts)
        retrieval[pair] = round(share, 4)
        if draft is not None and int(length) == DRAFT_CONTEXT:
            found["draft_overlap"] = round(draft, 4)
    accuracy = {}
    for length in args.lengths:
        stack = needle.Haystack(source, engine.tokenizer, length)
        depths = [(i + 0.5) / args.trials for i in range(args.trials)]
        records = results.Records(None, {})
        series = results.Series(records, args.seed)
        needle.measure(engine, stack, [length], depths, 1, series, through=("target",))
        accuracy[str(length)] = needle.accuracy(records.all)
        print(f"needle at {length}: {accuracy[str(length)]}")

    old = content_at(args.out)
    merged = {**old, **found}
    for name, part in (("needle", accuracy), ("retrieval_overlap", retrieval)):
        merged[name] = {**old.get(name, {}), **part}
    # One header for each figure: they may come from different machines.
    header = header_of(args.seed) | {"prompts": args.prompts, "new_tokens": NEW}
    measured = [*found, *(f"retrieval_overlap {p}" for p in retrieval), *(f"needle {n}" for n in accuracy)]
    merged["parts"] = {**old["parts"], **dict.fromkeys(measured, header)}
    write(args.out, merged)
    print(json.dumps(merged))


if __name__ == "__main__":
    main()

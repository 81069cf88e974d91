"""``triforce-tree bench ruler``: accuracy on synthetic long-context tasks, by prompt length."""

import argparse
import statistics
from itertools import product
from typing import Any

from triforce_tree.cli import options
from triforce_tree.cli.bench.running import finish, records_of, series_of
from triforce_tree.cli.console import Interrupt, bar, json_line
from triforce_tree.cli.texts import documents
from triforce_tree.eval import ruler
from triforce_tree.eval.ablations.through import answer_by
from triforce_tree.eval.results import Record, Records, header


def run(args: argparse.Namespace) -> int:
    source, texts = documents(args)
    settings = {
        "benchmark": "ruler",
        "seed": args.seed,
        "text": source,
        "target": args.target or "embedded",
        **options.recorded(args),
    }
    records = records_of(args, settings)
    engine = options.engine_of(args)
    assert engine.tokenizer is not None
    # Answers take some tokens more, which each task's own check knows.
    engine.hierarchy.target.check_length(max(args.lengths), 1)
    made = ruler.Ruler(next(iter(texts)), engine.tokenizer, max(args.lengths))
    for task in args.tasks:
        made.question(task, min(args.lengths), 0)  # raises for too short a length, before any measurement
    by_name = {name: answer_by(engine, name) for name in args.through}
    cells = product(args.lengths, args.tasks, range(args.trials), args.through)
    keys = [{"through": by, "task": task, "length": n, "trial": i} for n, task, i, by in cells]
    progress = bar("questions")
    asking = progress.add_task("asking", total=len(keys))
    with Interrupt() as interrupt, progress:

        def answer(key: Record) -> Record:
            progress.update(asking, description=f"{key['task']}, {key['length']:,} tokens")
            question = made.question(key["task"], key["length"], key["trial"], args.seed)
            return ruler.answered(
                by_name[key["through"]],
                question,
                made.tokenizer,
                interrupt,
                lambda count: interrupt.check(),
            )

        series_of(args, records, interrupt, (progress, asking), _said).fill(keys, answer)
    code = finish(args, records, interrupt.requested)
    if args.json:
        json_line({**header(args.seed), "interrupted": interrupt.requested, "scores": _scores(args, records)})
    return code


def _said(record: Record) -> str:
    place = f"{record['through']}, {record['task']}, {record['length']:,} tokens"
    return f"{place}: score {record['score']:g}"


def _mean(records: Records, by: str, task: str, length: int) -> float | None:
    found = [
        record["score"]
        for record in records.all
        if (record["through"], record["task"], record["length"]) == (by, task, length)
    ]
    return statistics.fmean(found) if found else None


def _scores(args: argparse.Namespace, records: Records) -> dict[str, Any]:
    """Mean scores by levels, task and length."""
    return {
        by: {task: {str(n): _mean(records, by, task, n) for n in args.lengths} for task in args.tasks}
        for by in args.through
    }

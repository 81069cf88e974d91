"""``triforce-tree bench needle``: retrieval accuracy by prompt length and depth of the fact."""

import argparse
from pathlib import Path
from typing import Any

from triforce_tree.bench import needle
from triforce_tree.bench.results import Record, header
from triforce_tree.bench.tables import tables
from triforce_tree.cli import options
from triforce_tree.cli.bench.running import finish, records_of, series_of
from triforce_tree.cli.console import Interrupt, bar, json_line, screen
from triforce_tree.cli.texts import documents


def _said(record: Record) -> str:
    how = "found" if record["found"] else "not found"
    return f"{record['through']}, {record['length']:,} tokens, depth {record['depth']:g}: {how}"


def run(args: argparse.Namespace) -> int:
    source, texts = documents(args)
    settings = {
        "benchmark": "needle",
        "seed": args.seed,
        "text": source,
        "target": args.target or "embedded",
        **options.recorded(args),
    }
    records = records_of(args, settings)
    engine = options.engine_of(args)
    assert engine.tokenizer is not None
    engine.target.check_length(max(args.lengths), needle.ANSWER_TOKENS)
    haystack = needle.Haystack(next(iter(texts)), engine.tokenizer, max(args.lengths))
    haystack.needle(min(args.lengths), 0, 0)  # raises for too short a length, before anything is measured
    total = len(args.lengths) * len(args.depths) * args.trials * len(args.through)
    progress = bar("needles")
    task = progress.add_task("asking", total=total)
    with Interrupt() as interrupt, progress:

        def reading(key: Record, tokens: int) -> Any:
            progress.update(task, description=f"{key['through']}, {tokens:,} tokens")
            return lambda count: interrupt.check()

        series = series_of(args, records, interrupt, (progress, task), _said)
        needle.measure(
            engine, haystack, args.lengths, args.depths, args.trials, series, args.through, reading
        )
    code = finish(args, records, tables(records), interrupt.requested)
    if args.plot and records.all:
        name = Path(args.target).name if args.target else "embedded pair"
        needle.heat_map(records.all, args.through[0], args.lengths, args.depths, Path(args.plot), name)
        screen().print(f"written: {args.plot}")
    if args.json:
        cells = {
            levels: {
                str(n): {
                    f"{d:g}": needle.accuracy(records.all, through=levels, length=n, depth=d)
                    for d in args.depths
                }
                for n in args.lengths
            }
            for levels in args.through
        }
        json_line({**header(args.seed), "interrupted": interrupt.requested, "accuracy": cells})
    return code

"""``triforce-tree bench text | pg19``: speed on real text, compared with transformers' own decoding."""

import argparse

from triforce_tree.bench import speed, texts
from triforce_tree.bench.baselines import usable_methods
from triforce_tree.bench.results import Record, header
from triforce_tree.bench.tables import speed_of, tables
from triforce_tree.cli import options
from triforce_tree.cli.bench.running import finish, records_of, series_of
from triforce_tree.cli.console import Interrupt, bar, json_line
from triforce_tree.cli.texts import documents


def run(args: argparse.Namespace) -> int:
    source, found = documents(args)
    settings = {
        "benchmark": "text",
        "new_tokens": args.new_tokens,
        "seed": args.seed,
        "text": source,
        **options.pair_names(args),
        **options.recorded(args, "levels"),
    }
    records = records_of(args, settings)
    engine = options.engine_of(args)
    assert engine.tokenizer is not None
    methods = args.methods or usable_methods(engine)
    speed.check_methods(engine, methods)
    engine.target.check_length(max(args.lengths), args.new_tokens)
    longest = texts.prompts(found, engine.tokenizer, max(args.lengths), args.prompts)
    progress = bar("generations")
    cells = len(args.lengths) * len(longest) * len(args.temperatures)
    task = progress.add_task("measuring", total=cells * len(methods))

    def said(record: Record) -> str:
        ms = 1e3 * record["decode_seconds"] / record["timed_tokens"]
        place = f"{record['length']:,} tokens, T={record['temperature']:g}"
        return f"{record['method']}, {place}: {ms:.1f} ms a token"

    with Interrupt() as interrupt, progress:
        series = series_of(args, records, interrupt, (progress, task), said)
        for length in args.lengths:
            cut = [prompt[:length] for prompt in longest]
            place = {"length": length}
            speed.measure(engine, cut, methods, args.temperatures, args.new_tokens, series, place)
    code = finish(args, records, tables(records), interrupt.requested)
    if args.json:
        json_line({**header(args.seed), "interrupted": interrupt.requested, "rows": speed_of(records)})
    return code

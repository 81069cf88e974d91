"""``triforce-tree bench text``: speed on real text, compared with transformers' own decoding."""

import argparse
from collections.abc import Sequence
from typing import Any

from triforce_tree.cli import options
from triforce_tree.cli.console import Interrupt, bar, json_line, plain_table, screen
from triforce_tree.eval import speed, text
from triforce_tree.eval.baselines import usable_methods
from triforce_tree.eval.results import Record, Records, header
from triforce_tree.eval.texts import registry


def run(args: argparse.Namespace) -> int:
    if args.text:
        kind, content = options.text_source(args)
        source = kind.name
    else:
        source, texts = options.documents(args)
    settings = speed.settings(
        args.context,
        args.new_tokens,
        args.seed,
        source,
        args.target or "embedded",
        args.draft or args.drafter or "default",
    )
    settings |= options.recorded(args, "levels")
    records = Records(args.out, settings)
    engine = options.engine_of(args)
    assert engine.tokenizer is not None
    methods = args.methods or usable_methods(engine)
    speed.check_methods(engine, methods)
    if args.text:
        ids = text.token_ids(engine.tokenizer, content)
        prompts = registry.prompts(kind, ids, args.context, args.prompts)
    else:
        prompts = text.prompts(texts, engine.tokenizer, args.context, args.prompts)
    progress = bar("generations")
    task = progress.add_task("measuring", total=len(prompts) * len(args.temperatures) * len(methods))

    def done(record: Record) -> None:
        ms = 1e3 * record["decode_seconds"] / record["timed_tokens"]
        what = f"{record['method']} T={record['temperature']:g}: {ms:.1f} ms a token"
        progress.update(task, advance=1, description=what)

    with Interrupt() as interrupt, progress:
        speed.measure(
            engine,
            prompts,
            methods,
            args.temperatures,
            args.new_tokens,
            records,
            seed=args.seed,
            stop=interrupt,
            done=done,
            wanted=lambda: not interrupt.requested,
        )
    rows = speed.rows(records, args.context, args.new_tokens)
    screen().print(speed_table(rows))
    if interrupt.requested:
        left = "; the same command continues from here" if args.out else ""
        screen().print(f"ended by Ctrl-C after {len(records.all)} measurements{left}")
    if args.json:
        json_line({**header(args.seed), "interrupted": interrupt.requested, "rows": rows})
    return 130 if interrupt.requested else 0


def speed_table(rows: Sequence[Record]) -> Any:
    return plain_table(
        "decode time, medians over prompts",
        ("method", "temperature", "ms/token", "speed-up", "acceptance", "repeated 8-grams"),
        [
            (
                row["method"],
                f"{row['temperature']:g}",
                f"{row['ms_per_token']:.2f}",
                "" if row["speedup_vs_best_baseline"] is None else f"{row['speedup_vs_best_baseline']:.2f}x",
                ", ".join(f"{name} {value:.2f}" for name, value in row["acceptance"].items()),
                f"{100 * row['repeated_8grams']:.0f} %",
            )
            for row in rows
        ],
    )

"""``triforce-tree bench text``: speed on real text, compared with transformers' own decoding."""

import argparse

from triforce_tree.cli import options
from triforce_tree.cli.bench.running import finish, records_of, series_of
from triforce_tree.cli.console import Interrupt, bar, json_line
from triforce_tree.cli.texts import documents, text_source
from triforce_tree.eval import speed, text
from triforce_tree.eval.baselines import usable_methods
from triforce_tree.eval.results import Record, header
from triforce_tree.eval.texts import registry


def run(args: argparse.Namespace) -> int:
    if args.text:
        kind, content = text_source(args)
        source = kind.name
    else:
        source, texts = documents(args)
    settings = speed.settings(
        args.context,
        args.new_tokens,
        args.seed,
        source,
        args.target or "embedded",
        args.draft or args.drafter or "default",
    )
    settings |= options.recorded(args, "levels")
    records = records_of(args, settings)
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

    def said(record: Record) -> str:
        ms = 1e3 * record["decode_seconds"] / record["timed_tokens"]
        return f"{record['method']} T={record['temperature']:g}: {ms:.1f} ms a token"

    with Interrupt() as interrupt, progress:
        timing = speed.Timing(methods, args.temperatures, args.new_tokens)
        speed.measure(engine, prompts, timing, series_of(args, records, interrupt, (progress, task), said))
    code = finish(args, records, interrupt.requested)
    if args.json:
        rows = speed.rows(records, args.context, args.new_tokens)
        json_line({**header(args.seed), "interrupted": interrupt.requested, "rows": rows})
    return code

"""``triforce-tree bench offload``: an offloaded cache beside plain decoding under the same memory limit."""

import argparse
from functools import partial

from triforce_tree.cli import options
from triforce_tree.cli.bench.machine.following import follow
from triforce_tree.cli.bench.running import records_of
from triforce_tree.cli.groups import MEMORY_OPTIONS
from triforce_tree.cli.texts import documents
from triforce_tree.eval import text
from triforce_tree.eval.decoding import offload
from triforce_tree.eval.report import machine
from triforce_tree.eval.results import Record


def run(args: argparse.Namespace) -> int:
    source, texts = documents(args)
    settings = {
        "benchmark": "offload",
        "context": args.context,
        "new_tokens": args.new_tokens,
        "plain_tokens": args.plain_tokens,
        "seed": args.seed,
        "text": source,
        **options.pair_names(args),
        "memory": {name: getattr(args, name) for name in MEMORY_OPTIONS if name in args.given},
        **options.recorded(args, "levels"),
    }
    records = records_of(args, settings)
    engine = options.engine_of(args)
    assert engine.tokenizer is not None
    offload.check(engine)
    prompts = text.prompts(texts, engine.tokenizer, args.context, args.prompts)
    measure = partial(offload.measure, engine, prompts, args.temperatures, args.new_tokens, args.plain_tokens)
    total = len(offload.methods(engine)) * len(args.temperatures) * len(prompts)
    return follow(args, records, measure, total, _said, machine.of_offloading)


def _said(record: Record) -> str:
    ms = 1e3 * record["seconds"] / record["new_tokens"]
    return f"{record['method']}, T={record['temperature']:g}: {ms:.1f} ms a token"

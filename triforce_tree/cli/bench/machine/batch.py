"""``triforce-tree bench batch``: batches beside plain decoding of the same batch, and one by one."""

import argparse
from functools import partial

from triforce_tree.cli import options
from triforce_tree.cli.bench.machine.following import follow
from triforce_tree.cli.bench.running import records_of
from triforce_tree.cli.texts import documents
from triforce_tree.eval import text
from triforce_tree.eval.decoding import batch
from triforce_tree.eval.report import machine
from triforce_tree.eval.results import Record
from triforce_tree.runtime.stats import rate_text


def run(args: argparse.Namespace) -> int:
    source, texts = documents(args)
    settings = {
        "benchmark": "batch",
        "context": args.context,
        "new_tokens": args.new_tokens,
        "seed": args.seed,
        "text": source,
        **options.pair_names(args),
        **options.recorded(args, "levels"),
    }
    records = records_of(args, settings)
    engine = options.engine_of(args)
    assert engine.tokenizer is not None
    engine.hierarchy.target.check_length(args.context, args.new_tokens)
    sizes = sorted(set(args.batches))
    prompts = text.prompts(texts, engine.tokenizer, args.context, sizes[-1])
    measure = partial(batch.measure, engine, prompts, sizes, args.temperatures, args.new_tokens)
    methods = sum(len(batch.METHODS) - (size == 1) for size in sizes)
    return follow(args, records, measure, methods * len(args.temperatures), _said, machine.of_batches)


def _said(record: Record) -> str:
    speed = record["new_tokens"] / record["seconds"]
    return f"{record['batch']} sequences, {record['method']}: {rate_text(speed)} tokens/s"

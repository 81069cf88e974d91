"""``triforce-tree bench workloads``: texts that branch, as published work builds them."""

import argparse
from functools import partial

from triforce_tree.cli import options
from triforce_tree.cli.bench.machine.following import follow
from triforce_tree.cli.bench.running import records_of
from triforce_tree.cli.texts import documents
from triforce_tree.eval import text
from triforce_tree.eval.report import machine
from triforce_tree.eval.results import Record, Records
from triforce_tree.eval.workloads import measure as workloads
from triforce_tree.eval.workloads.shapes import chosen
from triforce_tree.runtime.stats import rate_text

# On a CPU trees have so many times the tokens, so that all of them take minutes.
_CPU_SCALE = 1 / 32


def run(args: argparse.Namespace) -> int:
    named = chosen(args.workloads)
    source, texts = documents(args)
    engine = options.engine_of(args)
    assert engine.tokenizer is not None
    scale = args.scale or (1.0 if engine.hierarchy.target.device.type == "cuda" else _CPU_SCALE)
    settings = {
        "benchmark": "workloads",
        "scale": scale,
        "new_tokens": args.new_tokens,
        "seed": args.seed,
        "text": source,
        "target": args.target or "embedded",
        **options.recorded(args, "levels"),
    }
    records = records_of(args, settings)
    scaled = [workload.scaled(scale) for workload in named]
    longest = max(max(workload.lengths) for workload in scaled)
    [tokens] = text.prompts(texts, engine.tokenizer, longest + args.new_tokens, 1)
    run = workloads.Run(engine, scaled, tokens, args.new_tokens, args.parts)
    return follow(args, records, partial(workloads.measure, run), len(run.keys()), _said, _rows)


def _rows(records: Records) -> dict[str, list[Record]]:
    return {"attention": machine.of_attention(records), "decoding": machine.of_decoding(records)}


def _said(record: Record) -> str:
    if "reason" in record:
        what = str(record["reason"])
    elif "us" in record:
        what = f"{record['us']:.1f} microseconds"
    else:
        what = f"{rate_text(record['new_tokens'] / record['seconds'])} tokens/s"
    return f"{record['workload']}, {record['way']}: {what}"

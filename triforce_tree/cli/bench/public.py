"""``triforce-tree bench pg19 | narrativeqa | longbench | infinitebench``: speed and answers."""

import argparse
from collections.abc import Mapping, Sequence

from triforce_tree.cli import options
from triforce_tree.cli.bench.running import finish, records_of, series_of
from triforce_tree.cli.console import Interrupt, bar, json_line
from triforce_tree.engine import Engine
from triforce_tree.eval import speed
from triforce_tree.eval.baselines import usable_methods
from triforce_tree.eval.public import answers, rows
from triforce_tree.eval.public.catalogue import DATA_SETS, task_of
from triforce_tree.eval.public.prompts import Prompts, beginnings, template_of
from triforce_tree.eval.report.tables import answers_of, speed_of
from triforce_tree.eval.results import Record, header

Cut = Mapping[int, Sequence[list[int]]]


def run(args: argparse.Namespace) -> int:
    data = DATA_SETS[args.data_set]
    task = task_of(data, args.task)
    template = None if task is None else template_of(args.templates, args.task, task)
    found = rows.examples(data, args.task, args.data, args.prompts)
    settings = {
        "benchmark": data.name,
        "task": args.task,
        "data": args.data or data.repository,
        "data_digest": rows.digest(found),
        "template": template,
        "metric": None if task is None else task.metric_name,
        "new_tokens": args.new_tokens,
        "seed": args.seed,
        **options.pair_names(args),
        **options.recorded(args, "levels"),
    }
    records = records_of(args, settings)
    engine = options.engine_of(args)
    methods = args.methods or usable_methods(engine)
    if "speed" in args.parts:
        speed.check_methods(engine, methods)
    prompts = _prompts(args, engine, found, template)
    _check_positions(args, engine, prompts, 0 if task is None else task.answer_tokens)
    cells = len(found) * len(prompts) * len(args.temperatures)
    total = cells * (len(methods) * ("speed" in args.parts) + 2 * ("answers" in args.parts))
    progress = bar("generations")
    asking = progress.add_task("measuring", total=total)

    def said(record: Record) -> str:
        how = record["method"] if "method" in record else f"answers by {record['through']}"
        return f"{how}, {record['length']:,} tokens, T={record['temperature']:g}"

    with Interrupt() as interrupt, progress:
        series = series_of(args, records, interrupt, (progress, asking), said)
        timing = speed.Timing(methods, args.temperatures, args.new_tokens)
        for length, cut in prompts.items():
            if "speed" in args.parts:
                speed.measure(engine, cut, timing, series, {"kind": "speed", "length": length})
        if task is not None and "answers" in args.parts:
            asked = answers.Questions(found, prompts, task)
            answers.measure(engine, asked, args.temperatures, series, lambda count: interrupt.check())
    code = finish(args, records, interrupt.requested)
    if args.json:
        json_line(
            {
                **header(args.seed),
                "interrupted": interrupt.requested,
                "rows": speed_of(records),
                "answers": answers_of(records),
            }
        )
    return code


def _prompts(
    args: argparse.Namespace,
    engine: Engine,
    found: Sequence[rows.Example],
    template: str | None,
) -> Cut:
    """Token ids of each prompt, by length."""
    assert engine.tokenizer is not None
    if template is None:
        return {length: beginnings(found, engine.tokenizer, length) for length in args.lengths}
    made = Prompts(engine.tokenizer, template)
    cut: dict[int, list[list[int]]] = {length: [] for length in args.lengths}
    for example in found:
        for length in args.lengths:
            cut[length].append(made.prompt(example, length))
    return cut


def _check_positions(args: argparse.Namespace, engine: Engine, prompts: Cut, answer_tokens: int) -> None:
    """Raise ValueError before anything is measured where a prompt and what follows exceed the model."""
    new = max(
        args.new_tokens if "speed" in args.parts else 0, answer_tokens if "answers" in args.parts else 0
    )
    for cut in prompts.values():
        for prompt in cut:
            engine.hierarchy.target.check_length(len(prompt), new)

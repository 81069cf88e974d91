"""Settings side by side, on the same texts, positions and seeds: docs/results/variants_MACHINE.json.

    python -m scripts.benchmarks variants --shapes 8b --variants "tree=chain:4" "tree=chain:4 gamma=12"

Each text is prefilled once, and every variant decodes from the same positions of it, with the same seeds, as
the default settings do. The same command goes on with the next text.
"""

import argparse
import itertools
import statistics
from collections.abc import Sequence

from scripts.benchmarks.common.results import Record
from scripts.benchmarks.texts.command import (
    PAIR,
    SHAPES,
    device_for_shapes,
    files_by_shape,
    found_texts,
    grid_parser,
    option,
    print_rows,
)
from scripts.benchmarks.texts.grid import TimeLimit
from triforce_tree import Engine
from triforce_tree.eval.results import Records
from triforce_tree.eval.text import token_ids
from triforce_tree.eval.texts.registry import prompts
from triforce_tree.runtime.executor import free_memory
from triforce_tree.tune.meters import Meter
from triforce_tree.tune.plan import Plan
from triforce_tree.tune.tuner import Tuner

FILE = "variants_{machine}.json"
DEFAULT = "defaults"
_PLACES = 2


def rows(part: str, header: Record, samples: list[Record]) -> list[Record]:
    """A row for each variant and temperature, over texts, positions and seeds.

    ``speed``: all time with the defaults over all time with the variant, from the same places; ``error``: its
    standard error over texts (jackknife). Means of single ratios would favour what varies more.
    """
    names = ("context", "temperature", "variant")
    usual = {_place(s): s["ms_per_token"] for s in samples if s["variant"] == DEFAULT}
    found = []
    for cell in dict.fromkeys(tuple(s[name] for name in names) for s in samples):
        mine = [s for s in samples if tuple(s[name] for name in names) == cell]
        texts = dict.fromkeys(s["text"] for s in mine)
        times = [[(usual[_place(s)], s["ms_per_token"]) for s in mine if s["text"] == text] for text in texts]
        error = _error(times) if len(times) > 1 else None
        found.append(
            {
                "part": part, "machine": header["hardware"], "model": header["settings"]["model"],
                **dict(zip(names, cell, strict=True)),
                "texts": len(texts), "runs": len(mine),
                "median_ms_per_token": round(statistics.median(s["ms_per_token"] for s in mine), 4),
                "mean_ms_per_token": round(statistics.fmean(s["ms_per_token"] for s in mine), 4),
                "tokens_per_pass": round(statistics.fmean(s["tokens_per_pass"] for s in mine), 2),
                "speed": round(_speed(times), 4),
                "error": None if error is None else round(error, 4),
            }
        )  # fmt: skip
    return found


def _error(times: Sequence[Sequence[tuple[float, float]]]) -> float:
    """The standard error of :func:`_speed` over texts, from the speeds without each of them."""
    without = [_speed([*times[:left], *times[left + 1 :]]) for left in range(len(times))]
    return (len(times) - 1) ** 0.5 * statistics.pstdev(without)


def _speed(times: Sequence[Sequence[tuple[float, float]]]) -> float:
    """Time with the defaults over that with a variant."""
    own, other = (sum(pair[i] for text in times for pair in text) for i in (0, 1))
    return own / other


def _place(sample: Record) -> tuple[object, ...]:
    return tuple(sample[name] for name in ("text", "context", "temperature", "position", "seed"))


def measured(
    engine: Engine, tokens: Sequence[int], args: argparse.Namespace, known: Record, limit: TimeLimit
) -> list[Record]:
    """Generations of all variants after positions near the end of one text."""
    context = len(tokens)
    plan = Plan((context,), tuple(args.temperatures), args.new_tokens, places=_PLACES)
    space = Tuner(engine, tokens, plan, Records(None, {})).space(context)
    configs = {DEFAULT: space.start} | {
        text: space.start.changed(dict(option(word) for word in text.split())) for text in args.variants
    }
    meter = Meter(engine.hierarchy, tokens, args.new_tokens, space.extent())
    found = []
    try:
        for (name, config), temperature in itertools.product(configs.items(), args.temperatures):
            seeds = range(args.seed, args.seed + (args.seeds if temperature else 1))
            for position, seed in itertools.product(plan.starts(context), seeds):
                run = meter.run(config, position, temperature, args.new_tokens, seed)
                passes = run.levels[-1].forwards
                sample = {
                    **known, "temperature": temperature, "variant": name, "position": position, "seed": seed,
                    "ms_per_token": run.ms_per_token, "tokens_per_pass": len(run.tokens) / max(1, passes),
                }  # fmt: skip
                limit.say(f"T={temperature:g}, {run.ms_per_token:.2f} ms: {name}")
                found.append(sample)
    finally:
        meter.close()
    return found


def main(words: Sequence[str] | None = None) -> int:
    made = grid_parser("variants", __doc__, (122_880,), SHAPES, [PAIR])
    made.add_argument(
        "--variants", nargs="+", required=True, metavar="SETTINGS", help='each "NAME=VALUE NAME=VALUE ..."'
    )
    args = made.parse_args(words)
    device = device_for_shapes(made, args)
    limit = TimeLimit(args.seconds)
    texts, sources, missing = found_texts(made, args, one_a_kind=False)
    more = {"variants": args.variants, "new_tokens": args.new_tokens, "seeds": args.seeds}
    for grid, file in files_by_shape(args, "variants", device, sources, rows, **more):
        for text in missing:
            file.note(text)
        engine = grid.engine(device, args.seed)
        complete = True
        try:
            for source, context in itertools.product(sources, args.contexts):
                known = {"text": source.name, "kind": source.kind, "context": context}
                if file.find(**known) is not None:
                    continue
                if not (complete := not limit.reached()):
                    break
                try:
                    [tokens] = prompts(source, token_ids(engine.tokenizer, texts.read(source)), context)
                except ValueError as error:
                    file.note(str(error))
                    continue
                limit.say(f"{source.name}, {context:,} tokens")
                for sample in measured(engine, tokens, args, known, limit):
                    file.add(sample)
        finally:
            engine.close()
            free_memory()
        print_rows(file, limit, complete)
        if not complete:
            return 3
    return 0

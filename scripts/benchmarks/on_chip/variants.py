"""Settings side by side, on the same texts, positions and seeds: docs/results/variants_MACHINE.json.

    python -m scripts.benchmarks variants --shapes 8b --variants "tree=chain:4" "tree=chain:4 gamma=12"

Each text is prefilled once, and every variant decodes from the same positions of it, with the same seeds, as
the default settings do. The same command goes on with the next text.
"""

import argparse
import itertools
import statistics
from collections.abc import Iterator, Sequence

from scripts.benchmarks.common.results import Record, ResultsFile
from scripts.benchmarks.texts.command import PAIR, SHAPES, grid_parser, measure_by_text, option
from scripts.benchmarks.texts.grid import TimeLimit
from triforce_tree import Engine
from triforce_tree.eval.results import Records
from triforce_tree.tune.meters import Meter
from triforce_tree.tune.plan import Plan
from triforce_tree.tune.tuner import Tuner

DEFAULT = "defaults"
_PLACES = 2
_CONTEXT = 122_880


def rows(part: str, header: Record, samples: list[Record]) -> list[Record]:
    """A row for each variant and temperature, over texts, positions and seeds.

    ``speed``: all time with the defaults over all time with the variant, from the same places; ``error``: its
    standard error over texts (jackknife). Means of single ratios would favour what varies more.
    """
    names, varied = ("context", "temperature", "variant"), _varied(header["settings"]["variants"])
    usual = {_place(s): s["ms_per_token"] for s in samples if s["variant"] == DEFAULT}
    found = []
    for cell in dict.fromkeys(tuple(s[name] for name in names) for s in samples):
        mine = [s for s in samples if tuple(s[name] for name in names) == cell]
        texts = dict.fromkeys(s["text"] for s in mine)
        of_texts = {
            text: [(usual[_place(s)], s["ms_per_token"]) for s in mine if s["text"] == text] for text in texts
        }
        times = list(of_texts.values())
        error = _error(times) if len(times) > 1 else None
        found.append(
            {
                "part": part, "machine": header["hardware"], "model": header["settings"]["model"],
                "varied": varied, **dict(zip(names, cell, strict=True)),
                "texts": len(texts), "runs": len(mine),
                "median_ms_per_token": round(statistics.median(s["ms_per_token"] for s in mine), 4),
                "mean_ms_per_token": round(statistics.fmean(s["ms_per_token"] for s in mine), 4),
                "tokens_per_pass": round(statistics.fmean(s["tokens_per_pass"] for s in mine), 2),
                "speed": round(_speed(times), 4),
                "error": None if error is None else round(error, 4),
                "speeds": {text: round(_speed([own]), 4) for text, own in of_texts.items()},
            }
        )  # fmt: skip
    return found


def _varied(variants: Sequence[str]) -> str:
    """The names of the settings that differ from the defaults in some variant."""
    return " ".join(sorted({option(word)[0] for text in variants for word in text.split()}))


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
    engine: Engine, tokens: Sequence[int], args: argparse.Namespace, limit: TimeLimit
) -> Iterator[Record]:
    """Generations of all variants after positions near the end of one text."""
    context = len(tokens)
    plan = Plan((context,), tuple(args.temperatures), args.new_tokens, places=_PLACES)
    space = Tuner(engine, tokens, plan, Records(None, {})).space(context)
    configs = {DEFAULT: space.start} | {
        text: space.start.changed(dict(option(word) for word in text.split())) for text in args.variants
    }
    meter = Meter(engine.hierarchy, tokens, args.new_tokens, space.extent())
    try:
        for (name, config), temperature in itertools.product(configs.items(), args.temperatures):
            seeds = range(args.seed, args.seed + (args.seeds if temperature else 1))
            for position, seed in itertools.product(plan.starts(context), seeds):
                run = meter.run(config, position, temperature, args.new_tokens, seed)
                passes = run.levels[-1].forwards
                limit.say(f"T={temperature:g}, {run.ms_per_token:.2f} ms: {name}")
                yield {
                    "temperature": temperature, "variant": name, "position": position, "seed": seed,
                    "ms_per_token": run.ms_per_token, "tokens_per_pass": len(run.tokens) / max(1, passes),
                }  # fmt: skip
    finally:
        meter.close()


def main(words: Sequence[str] | None = None) -> int:
    made = grid_parser("variants", __doc__, (_CONTEXT,), SHAPES, [PAIR])
    made.add_argument(
        "--variants", nargs="+", required=True, metavar="SETTINGS", help='each "NAME=VALUE NAME=VALUE ..."'
    )
    args = made.parse_args(words)

    def compared(
        engine: Engine, tokens: list[int], key: Record, file: ResultsFile, limit: TimeLimit
    ) -> list[Record]:
        # A text is measured as a whole, or not at all.
        return list(measured(engine, tokens, args, limit))

    cells = [{"context": context} for context in args.contexts]
    # Other settings, or lengths, are parts of their own.
    others = [str(context) for context in args.contexts if context != _CONTEXT]
    label = "-".join([*_varied(args.variants).split(), *others])
    more = {"variants": args.variants, "new_tokens": args.new_tokens, "seeds": args.seeds}
    return measure_by_text(
        made, args, "variants", rows, cells, compared, one_a_kind=False, label=label, **more
    )

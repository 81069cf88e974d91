"""Default settings beside those that ``tune`` finds for the cell: docs/results/tuned_MACHINE.json.

For each text, context and temperature ``tune`` searches for some time, as ``triforce-tree tune`` does; then
both settings decode from other positions of the text, which the search did not see, with the same seeds. (The
fastest of many measurements is so by chance too: its own times would flatter it.) The same command goes on
with the next cell.
"""

import itertools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from scripts.benchmarks.common.results import Record, ResultsFile
from scripts.benchmarks.texts.command import PAIR, SHAPES, grid_parser, measure_by_text
from scripts.benchmarks.texts.grid import TimeLimit
from scripts.benchmarks.texts.rows import OF_MEDIAN
from triforce_tree import Engine
from triforce_tree.eval.results import Records, repeated_share
from triforce_tree.tune.meters import Meter, Sample
from triforce_tree.tune.plan import Plan, Watch
from triforce_tree.tune.search import Options
from triforce_tree.tune.tuner import Tuner

CONTEXTS = (16_384,)
_PAIRS = 6


@dataclass(frozen=True)
class Search:
    """What is measured of each cell.

    Attributes:
        seconds: of a search; the first measurements are made however long they take.
        new_tokens: of each generation.
        pairs: generations with either settings, each from a position and with a seed of its own.
        seed: of all draws.
        limit: prints what is measured.
    """

    seconds: float
    new_tokens: int
    pairs: int
    seed: int
    limit: TimeLimit

    def measured(self, engine: Engine, tokens: Sequence[int], temperature: float) -> Record:
        """Search settings for prompts of this length, then compare them with the defaults."""
        context, begun = len(tokens), time.perf_counter()
        plan = Plan((context,), (temperature,), self.new_tokens, seconds=self.seconds, seed=self.seed)
        records = Records(None, {})
        tuner = Tuner(engine, tokens, plan, records, Watch(measured=self._show))
        [entry] = tuner.entries(lambda _: None)
        space = tuner.space(context)
        [default, *_] = space.starts()
        usual = space.complete(default)
        found: Record = {
            "changed": {name: value for name, value in entry.options.items() if usual.get(name) != value},
            "complete": tuner.complete,
            "tune_seconds": time.perf_counter() - begun,
            "tried": len({str(sorted(r["options"].items())) for r in records.all if "options" in r}),
            "plain_ms_per_token": entry.plain_ms_per_token,
        }
        settings = {"default": space.measured(default), "tuned": space.measured(entry.options)}
        meter = Meter(engine.hierarchy, tokens, self.new_tokens, space.extent())
        try:
            samples = {
                name: self._runs(engine, meter, plan.starts(context), options, temperature)
                for name, options in settings.items()
            }
        finally:
            meter.close()
        for name, runs in samples.items():
            found[f"{name}_time"] = [_time_of_token(run) for run in runs]
            found[f"{name}_repeated"] = [repeated_share(run.tokens) for run in runs]
        return found

    def _runs(
        self, engine: Engine, meter: Meter, places: Sequence[int], options: Options, temperature: float
    ) -> list[Sample]:
        """Generations that begin in the middle between the positions of the search."""
        config = engine.with_options(**options).hierarchy.config
        apart = (places[0] - places[1]) // 2
        return [
            meter.run(config, place - apart, temperature, self.new_tokens, self.seed + len(places) + number)
            for number, place in zip(range(self.pairs), itertools.cycle(places), strict=False)
        ]

    def _show(self, record: Record) -> None:
        result = f"{record['ms_per_token']:.2f} ms" if "ms_per_token" in record else record["error"]
        options = " ".join(f"{name}={value}" for name, value in record["options"].items())
        self.limit.say(f"{result}: {options}")


def _time_of_token(run: Sample) -> float:
    """Milliseconds; on a CPU, which other programs may share, as a share of those of the target alone."""
    return run.ms_per_token / (run.alone_ms or 1.0)


def rows(part: str, header: Record, samples: list[Record]) -> list[Record]:
    """A row for each cell. ``share``: the speed with default settings, as a share of that with tuned ones.

    Times of a token are in milliseconds, on a CPU in shares of plain decoding's.
    """
    made = []
    for s in samples:
        shares = [t / d for d, t in zip(s["default_time"], s["tuned_time"], strict=True)]
        error = OF_MEDIAN * statistics.stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else None
        names = ("text", "kind", "context", "temperature", "complete", "tried", "changed")
        made.append(
            {
                "part": part, "machine": header["hardware"], "model": header["settings"]["model"],
                **{name: s[name] for name in names},
                "tune_seconds": round(s["tune_seconds"]),
                "runs": len(shares),
                "share": round(statistics.median(shares), 4),
                "share_error": None if error is None else round(error, 4),
                "default_time": round(statistics.median(s["default_time"]), 4),
                "tuned_time": round(statistics.median(s["tuned_time"]), 4),
                "plain_ms_per_token": round(s["plain_ms_per_token"], 4),
                "repeated_8grams": round(statistics.median(s["default_repeated"]), 4),
            }
        )  # fmt: skip
    return made


def main(words: Sequence[str] | None = None) -> int:
    made = grid_parser("tuned", __doc__, CONTEXTS, SHAPES, [PAIR])
    made.add_argument("--tune-seconds", type=float, default=240.0, help="of the search in each cell")
    made.set_defaults(pairs=_PAIRS)
    args = made.parse_args(words)
    if args.pairs < 1:
        made.error(f"--pairs {args.pairs}: at least 1 is needed to compare settings")

    def searched(
        engine: Engine, tokens: list[int], key: Record, file: ResultsFile, limit: TimeLimit
    ) -> list[Record]:
        search = Search(args.tune_seconds, args.new_tokens, args.pairs, args.seed, limit)
        return [search.measured(engine, tokens, key["temperature"])]

    places = itertools.product(args.contexts, args.temperatures)
    cells = [{"context": context, "temperature": temperature} for context, temperature in places]
    more = {"tune_seconds": args.tune_seconds, "new_tokens": args.new_tokens, "pairs": args.pairs}
    return measure_by_text(made, args, "tuned", rows, cells, searched, one_a_kind=True, **more)

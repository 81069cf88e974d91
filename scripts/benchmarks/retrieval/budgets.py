"""What a token is expected to take by budget and chunk of level 1: docs/results/budgets_MACHINE.json.

    python -m scripts.benchmarks budgets                                     # the embedded pair on a CPU
    python -m scripts.benchmarks budgets --shapes 7b 8b --contexts 16384 32768 65536 122880

Sampled texts differ from settings to settings, and their speeds by more than a budget changes. So acceptance
is measured along one given text: the overlap of level 1 with the target, at T = 0 how often both have the
same most probable token. With the seconds of the stages, measured once, it gives the time of a token for
each number of rounds (Leviathan et al., arXiv 2211.17192, equation 1), of which the least is taken. What a
round gathers is taken to be the same for all, see --gathered; trees behind chains are left out. The same
command goes on with the next text.
"""

import argparse
import itertools
import math
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from scripts.benchmarks.common.results import Record, ResultsFile
from scripts.benchmarks.texts.command import PAIR, SHAPES, grid_parser, measure_by_text
from scripts.benchmarks.texts.grid import TimeLimit
from triforce_tree import Engine
from triforce_tree.decoding.choice.estimates import tokens_of
from triforce_tree.decoding.choice.passes import PassKind, StageSeconds
from triforce_tree.eval.overlap import LevelProbs
from triforce_tree.eval.results import Records
from triforce_tree.tune.meters import Meter
from triforce_tree.tune.plan import Plan
from triforce_tree.tune.tuner import Tuner

_CELL = ("context", "temperature", "budget", "chunk")


def expected_ms(sample: Record, gathered: float) -> float:
    """Milliseconds of a token with the best number of rounds."""
    most, seconds = sample["gamma"], StageSeconds(**sample["seconds"])
    times = []
    for rounds in range(1, max(2, math.ceil(most / gathered) + 1)):
        chain = min(most, rounds * gathered)
        taken = seconds.of(PassKind(3, rounds), chain / most)
        times.append(1e3 * taken / tokens_of(sample["overlap"], chain))
    return min(times)


def rows(part: str, header: Record, samples: list[Record]) -> list[Record]:
    """A row for each context, temperature, budget and chunk: overlaps by kind of text, means over them."""
    gathered, found = header["settings"]["gathered"], []
    for cell in sorted({tuple(s[name] for name in _CELL) for s in samples}):
        mine = [s for s in samples if tuple(s[name] for name in _CELL) == cell]
        times = [expected_ms(s, gathered) for s in mine]
        stages = {
            name: round(1e3 * statistics.median(s["seconds"][name] for s in mine), 4)
            for name in ("plain", "draft", "retrieval", "chain", "root")
        }
        found.append(
            {
                "part": part, "machine": header["hardware"], "model": header["settings"]["model"],
                **dict(zip(_CELL, cell, strict=True)),
                "default": mine[0]["default"],
                "text": mine[0]["text"] if len(mine) == 1 else f"{len(mine)} texts",
                "texts": len(mine),
                "overlap": round(statistics.fmean(s["overlap"] for s in mine), 4),
                "overlaps": {s["text"]: round(s["overlap"], 4) for s in mine},
                "stage_ms": stages,
                "expected_ms": round(statistics.fmean(times), 4),
            }
        )  # fmt: skip
    return found


def _shares(step: LevelProbs, temperature: float) -> Tensor:
    """The probability of acceptance at each position."""
    if temperature == 0:
        return (step.retrieval.argmax(-1) == step.target.argmax(-1)).float()
    return torch.minimum(step.retrieval, step.target).sum(-1)


def measured(
    engine: Engine,
    tokens: Sequence[int],
    context: int,
    args: argparse.Namespace,
    before: Sequence[Record],
) -> list[Record]:
    """Overlaps of all budgets and chunks after one text, and stage times that no text ``before`` has."""
    plan = Plan((context,), tuple(args.temperatures), args.new_tokens)
    space = Tuner(engine, tokens, plan, Records(None, {})).space(context)
    start = space.start.changed({"levels": 3, "other_trees": ()})
    usual = start.retrieval.budget, start.retrieval.chunk
    cells = sorted({usual, *itertools.product(args.budgets, args.chunks)})
    meter = Meter(engine.hierarchy, tokens, args.new_tokens, space.extent())
    found = []
    try:
        for budget, chunk in cells:
            if 2 * budget > context:
                continue
            config = start.changed({"budget": budget, "chunk": chunk})
            cell = {"context": context, "budget": budget, "chunk": chunk}
            alike = (s["seconds"] for s in before if all(s[name] == cell[name] for name in cell))
            seconds = next(alike, None) or vars(meter.stage_seconds(config, 0.0))
            for temperature in args.temperatures:
                steps = meter.probs(config, context, args.new_tokens, temperature)
                overlap = float(torch.cat([_shares(step, temperature) for step in steps]).mean())
                found.append(
                    {
                        "temperature": temperature, "budget": budget, "chunk": chunk,
                        "default": (budget, chunk) == usual, "gamma": config.gamma, "overlap": overlap,
                        "seconds": seconds,
                    }
                )  # fmt: skip
    finally:
        meter.close()
    return found


def main(words: Sequence[str] | None = None) -> int:
    made = grid_parser("budgets", __doc__, (16_384,), SHAPES, [PAIR])
    add = made.add_argument
    add("--budgets", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16_384, 32_768], help="to compare")
    add("--chunks", type=int, nargs="+", default=[8, 16, 32], help="to compare")
    add("--gathered", type=float, default=3.0, help="tokens that a round adds to the chain")
    args = made.parse_args(words)

    def sized(
        engine: Engine, tokens: list[int], key: Record, file: ResultsFile, limit: TimeLimit
    ) -> list[Record]:
        return measured(engine, tokens, key["context"], args, file.samples)

    cells = [{"context": context} for context in args.contexts]
    return measure_by_text(
        made, args, "budgets", rows, cells, sized, one_a_kind=True, further=args.new_tokens,
        gathered=args.gathered,
    )  # fmt: skip

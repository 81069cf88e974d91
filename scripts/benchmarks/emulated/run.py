"""Decoding as on a consumer card, which a larger GPU emulates: docs/results/cards_MACHINE.jsonl.

    python -m scripts.benchmarks cards --plan                       # plans and bounds, on any machine
    python -m scripts.benchmarks cards --models 7b                  # measured on a GPU
    python -m scripts.benchmarks cards --models 30b-a3b-4bit --contexts 4096 122880
    python -m scripts.benchmarks cards --tiny                       # the same code, on any machine

The allocator is capped at the card's memory, copies between host and device take the time of its link,
kernels have its tiles, and plans its rates. What the link takes is measured so. All other time is that of the
larger GPU; a row projects it by the ratio of the memory bandwidths, and that of a prefill by the ratio of the
FLOPs, both by data sheet. What is measured stays in the file, and the same command goes on where the last one
ended. Weights of 4 bits are rounded by our own format, that of level 1's copy, since its kernels need no
other library; no option of ``load`` does so.
"""

import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from scripts.benchmarks.common.command import (
    TINY_OPTIONS,
    device_for,
    machine_of,
    pair_shapes,
    results_folder,
)
from scripts.benchmarks.common.results import (
    OURS,
    PLAIN,
    Record,
    ResultsFile,
    content_at,
    header,
    inflated_vocabulary,
    write,
)
from scripts.benchmarks.emulated.card import CARDS, HOSTS, Card, bounds, planned, sizes_of, tiles
from scripts.benchmarks.emulated.tables import PLANS
from scripts.benchmarks.sources.registry import DOCUMENTATION
from scripts.benchmarks.texts import rows as texts
from scripts.benchmarks.texts.command import (
    found_texts,
    grid_of,
    measure_grid,
    parsed,
    part_of_file,
    texts_parser,
)
from scripts.benchmarks.texts.grid import Grid, GridRun, TimeLimit
from scripts.inflate.shapes import SHAPES, Shape
from triforce_tree import Engine
from triforce_tree.cli.parsing import field
from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.kernels.exchange.link import Link
from triforce_tree.kv.offload.bandwidth import copy_bandwidth
from triforce_tree.planning.memory_map import Sizes
from triforce_tree.planning.memory_plan import MemoryPlan


class Model(NamedTuple):
    """A shape, and the bits of its linear layers and experts."""

    shape: str
    bits: int

    @property
    def name(self) -> str:
        return self.shape + (f" in {self.bits} bits" if self.bits < 16 else "")


MODELS = {
    "7b": Model("llama-2-7b", 16),
    "8b": Model("llama-3.1-8b", 16),
    "8b-4bit": Model("llama-3.1-8b", 4),
    "30b-a3b-4bit": Model("qwen3-30b-a3b", 4),
}


class CardRun(GridRun):
    """Measures a grid of one context under a card's limits.

    Args:
        card: that is emulated.
        link: that carries the copies.
        rate: bytes a second that it was measured to carry.
    """

    def __init__(self, *args: Any, card: Card, link: Link, rate: float) -> None:
        super().__init__(*args)
        self._card, self._link, self._make = card, link, self._engine
        self._engine = self._planned_engine
        self._prefill_gb, self._rate = 0.0, rate

    def _planned_engine(self) -> Engine:
        """Returns the engine; its plan and its bounds go to the header of the part."""
        engine, [context] = self._make(), self.grid.contexts
        plan = engine.memory_plan(context, self.grid.new_tokens)
        assert plan is not None, "a limit of memory makes a plan"
        sizes = Sizes.of(engine.target, None, engine.config)
        self.file.mine["plan"] = plan.as_dict()
        self.file.mine["bounds"] = bounds(self._card, sizes, plan, context)
        self.file.mine["measured_link_gbps"] = self._rate / 1e9
        return engine

    def _feed(self, program: DecodingProgram, prompt: list[int]) -> None:
        if self._program is not program:
            # The first prefill compiles kernels.
            program.prefill([prompt])
        before = sum(self._link.carried)
        super()._feed(program, prompt)
        if (carried := sum(self._link.carried) - before) and not self._prefill_gb:
            self._prefill_gb = carried / 1e9

    def decode(self, *args: Any, **more: Any) -> Record:
        before = self._link.carried[0]
        measured = super().decode(*args, **more)
        carried = self._link.carried[0] - before
        return measured | {"link_gb_per_token": carried / 1e9 / len(measured["tokens"])}

    def add(self, sample: Record) -> None:
        super().add(sample | {"prefill_link_gb": self._prefill_gb})


def rows(part: str, about: Record, samples: list[Record]) -> list[Record]:
    """Returns a row for each text, context and temperature: what was measured, the plan and the bounds, and
    ``projected``, which was not measured.
    """
    card, host = CARDS[about["settings"]["card"]], HOSTS.get(about["hardware"])
    made = []
    for row in texts.rows(part, about, samples):
        place = {name: row[name] for name in ("text", "context", "temperature")}
        here = [s for s in samples if all(s[name] == value for name, value in place.items())]
        link_ms = {
            name: 1e12 / card.link
            * statistics.median(s["link_gb_per_token"] for s in here if s["method"] == method)
            for name, method in (("plain", PLAIN), ("ours", OURS))
        }  # fmt: skip
        prefill_link = 1e9 * here[0]["prefill_link_gb"] / card.link
        bound = about["bounds"]
        row |= {
            "card": card.name, "plan": about["plan"], "bounds": bound,
            "measured_link_gbps": about["measured_link_gbps"], "link_ms_per_token": link_ms,
            "prefill_link_seconds": prefill_link,
            "bound_ms_per_token": {
                "plain": bound["plain"]["ms"], "ours": bound["pass"]["ms"] / row["tokens_per_pass"],
            },
        }  # fmt: skip
        if host is not None:
            slower = host.read / card.rates.read
            times = {"plain": row["plain_ms_per_token"], "ours": row["ms_per_token"]}
            projected = {
                name: link_ms[name] + slower * max(0.0, ms - link_ms[name]) for name, ms in times.items()
            }
            prefill = row["prefill_seconds"] * host.flops / card.rates.flops
            row["projected"] = {
                "ms_per_token": projected["ours"], "plain_ms_per_token": projected["plain"],
                "speedup": projected["plain"] / projected["ours"],
                "prefill_seconds": max(prefill_link, prefill),
            }  # fmt: skip
        made.append(row)
    return made


def plan_row(card: Card, model: Model, context: int, new_tokens: int, given: Record) -> Record:
    """Returns the plan, the bounds and the tiles of a prompt on the card, all computed from sizes."""
    shape = Shape.parse(model.shape)
    options = card.options | given
    sizes = sizes_of(shape, SHAPES["llama-68m"], model.bits, HierarchyConfig.from_options(**options))
    made = planned(card, sizes, options, context, new_tokens)
    row: Record = {"card": card.name, "model": model.name, "context": context, "settings": options}
    if not isinstance(made, MemoryPlan):
        return row | {"refused": made}
    found = {"plan": made.as_dict(), "bounds": bounds(card, sizes, made, context)}
    return row | found | {"tiles": tiles(card, shape, made)}


def _place(row: Record) -> list[Any]:
    """Returns what distinguishes a plan from others."""
    return [row[name] for name in ("card", "model", "context", "settings")]


def write_plans(args: Any) -> int:
    """Writes and prints the plans of the command line's models and contexts; others stay in the file."""
    card = CARDS[args.card]
    made = [
        plan_row(card, MODELS[name], context, args.new_tokens, dict(args.set))
        for name in args.models
        for context in args.contexts
    ]
    path = results_folder(args.out, False) / PLANS
    new = [_place(row) for row in made]
    others = [row for row in content_at(path)["rows"] if _place(row) not in new]
    write(path, header(args.seed) | {"rows": [*others, *made]})
    for row in made:
        print(json.dumps(row))
    return 0


def grids(args: Any, device: torch.device, sources: Sequence[Any]) -> Iterator[tuple[Grid, ResultsFile]]:
    """Yields for each model and context its grid and its part of the results file."""
    card = CARDS[args.card]
    path = results_folder(args.out, args.tiny) / f"cards_{machine_of(device)}.jsonl"
    tiny = TINY_OPTIONS | {"offload": True, "levels": 3} if args.tiny else {}
    options = card.options | tiny | dict(args.set)
    for name in args.models:
        model = MODELS[name]
        shapes = pair_shapes(model.shape, args.tiny)
        for context in args.contexts:
            grid = replace(grid_of(args, shapes, sources, (context,), options), bits=model.bits)
            plan = {
                "shape": model.shape, "model": f"{model.name}, inflated", "options": options,
                "vocabulary": inflated_vocabulary(shapes[0]), "card": card.name, "context": context,
            }  # fmt: skip
            changed = [f"{key}-{value}" for key, value in sorted(dict(args.set).items())]
            part = "-".join([card.name, name, str(context), *changed])
            yield grid, part_of_file(path, part, plan, args, device, rows)


@contextmanager
def own_cache() -> Iterator[None]:
    """Is a context with an empty cache folder: times of stages depend on the link and on the target's bits,
    which the user's table of them does not know.
    """
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, {"TRIFORCE_TREE_CACHE": folder}):
        yield


def main(words: Sequence[str] | None = None) -> int:
    made = texts_parser("cards", __doc__, (122_880,))
    add = made.add_argument
    add("--card", choices=list(CARDS), default="rtx-4090", help="the card that is emulated")
    add("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="shapes, with their bits")
    add("--plan", action="store_true", help=f"compute plans and bounds, and write {PLANS}")
    add("--plain-tokens", type=int, default=4, help="of plain decoding")
    add("--set", type=field, nargs="+", default=[], metavar="NAME=VALUE", help="engine options")
    made.set_defaults(kinds=[DOCUMENTATION], seeds=1, temperatures=[0.0, 0.6])
    args = parsed(made, words)
    if args.plan:
        return write_plans(args)
    args.pairs = 0
    device = device_for(args.tiny)
    if device.type == "cpu" and not args.tiny:
        made.error("there is no GPU here; --plan computes, and --tiny runs tiny models on the CPU")
    limit = TimeLimit(args.seconds)
    found, sources, missing = found_texts(made, args, True)
    card = CARDS[args.card]
    with card.emulate(device) as slow:
        rate = copy_bandwidth(device)
        for grid, file in grids(args, device, sources):
            run = CardRun(grid, file, found, device, limit, args.seed, card=card, link=slow, rate=rate)
            with own_cache():
                complete = measure_grid(run, missing)
            if not complete:
                return 3
    return 0

"""Trained drafters beside the small draft, by context and kind of text: docs/results/drafters_MACHINE.jsonl.

    python -m scripts.benchmarks drafters --drafters eagle3=FOLDER mtp=FOLDER
    python -m scripts.benchmarks drafters --drafters eagle3=FOLDER --shapes 7b 8b --ways default
    python -m scripts.benchmarks drafters --drafters eagle3=FOLDER --target smollm2.gguf \
        --draft smollm2 --contexts 2048 7168

The embedded pair's target, or ``--target``, is decoded with its draft and with each drafter, as it is or
widened to a larger shape (``scripts/inflate``). ``--ways`` are ``default``, all settings as a user has them;
``chain`` and ``tree``, one shape for every drafter, two levels and one round, so that tokens a pass are those
of the drafter alone. Each measurement has plain decoding beside it. What is measured stays in the file, and
the same command goes on where the last one ended.
"""

import argparse
import itertools
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from scripts.benchmarks.common.command import machine_of, pair_shapes, results_folder
from scripts.benchmarks.common.given_models import Models, digest_of
from scripts.benchmarks.common.results import Record
from scripts.benchmarks.texts.command import (
    PAIR,
    SHAPES,
    device_for_shapes,
    found_texts,
    grid_of,
    grid_parser,
    measure_grid,
    parsed,
    part_of_file,
)
from scripts.benchmarks.texts.grid import GridRun, TimeLimit
from scripts.benchmarks.texts.rows import rows
from triforce_tree.loading.checkpoints import PAIR as EMBEDDED

CONTEXTS = (2048, 16_384, 65_536, 122_880)
DRAFT = "draft"
_ALONE: Record = {"levels": 2, "rounds": 1}
WAYS: Mapping[str, Record] = {
    "default": {}, "chain": {"tree": "chain:5", **_ALONE}, "tree": {"tree": "best-first:6,6,5,4,3", **_ALONE},
}  # fmt: skip


def drafter_rows(part: str, header: Record, samples: list[Record]) -> list[Record]:
    """Returns the rows of ``texts.rows`` with the drafter and the way."""
    named = {name: header["settings"][name] for name in ("drafter", "way")}
    return [row | named for row in rows(part, header, samples)]


def named(text: str) -> tuple[str, Path]:
    """Returns name and folder of ``NAME=FOLDER``."""
    name, equals, folder = text.partition("=")
    if not (equals and name.isidentifier() and name != DRAFT):
        raise argparse.ArgumentTypeError(f"{text!r} is no drafter; write NAME=FOLDER, with a name of letters")
    return name, Path(folder)


def main(words: Sequence[str] | None = None) -> int:
    made = grid_parser("drafters", __doc__, CONTEXTS, SHAPES, [PAIR])
    add = made.add_argument
    add("--drafters", type=named, nargs="+", default=[], metavar="NAME=FOLDER", help="trained drafters")
    add("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="trees and settings")
    add("--target", default=str(EMBEDDED / "target"), help="folder or GGUF file that they were trained for")
    add("--draft", default=str(EMBEDDED / "draft"), help="folder of its draft, or none")
    made.set_defaults(seeds=1)
    args = parsed(made, words)
    device = device_for_shapes(made, args)
    try:
        digests = {name: digest_of(folder) for name, folder in args.drafters}
    except FileNotFoundError as error:
        made.error(str(error))
    folders: dict[str, Path | None] = {} if args.draft == "none" else {DRAFT: None}
    folders |= dict(args.drafters)
    texts, sources, missing = found_texts(made, args, one_a_kind=True)
    limit = TimeLimit(args.seconds)
    path = results_folder(args.out, args.tiny) / f"drafters_{machine_of(device)}.jsonl"
    embedded = Path(args.target) == EMBEDDED / "target"
    title = "embedded pair" if embedded else Path(args.target).stem
    for shape in args.shapes:
        wide, draft_shape = pair_shapes(SHAPES[shape], args.tiny)
        draft = None if args.draft == "none" else args.draft
        positions = max(args.contexts) + args.new_tokens
        models = Models(args.target, draft, wide, draft_shape, device, args.seed, positions=positions)
        for way, (name, folder) in itertools.product(args.ways, folders.items()):
            options = {**WAYS[way], **dict(args.set)}
            plan = {
                "shape": shape, "model": f"{title}, {wide} inflated" if wide else title, "options": options,
                "drafter": name, "way": way, "weights": digests.get(name),
                "vocabulary": models.vocabulary(),
            }  # fmt: skip
            part = re.sub(r"[^\w.-]+", "_", "-".join([shape, *([] if embedded else [title]), name, way]))
            file = part_of_file(path, part, plan, args, device, drafter_rows)
            grid = grid_of(args, (wide, draft_shape), sources, args.contexts, options)
            run = GridRun(
                grid, file, texts, device, limit, args.seed, partial(models.engine, folder, options)
            )
            if not measure_grid(run, missing):
                return 3
    return 0

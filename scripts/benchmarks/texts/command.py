"""The command lines of ``any_text`` and ``never_slower``: shapes, texts, contexts, a time limit."""

import argparse
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from scripts.benchmarks.common.command import (
    device_for,
    machine_of,
    pair_shapes,
    parser,
    results_folder,
)
from scripts.benchmarks.common.results import (
    PAIR_VOCABULARY,
    RESULTS,
    Record,
    ResultsFile,
    Rows,
    inflated_vocabulary,
    settings_of,
)
from scripts.benchmarks.sources.registry import (
    SOURCES,
    MissingTextError,
    Texts,
    TextSource,
    named,
)
from scripts.benchmarks.texts.grid import Grid, GridRun, TimeLimit
from scripts.benchmarks.texts.rows import rows
from triforce_tree.cli.parsing import field

PAIR = "pair"
SHAPES = {"7b": "llama-2-7b", "8b": "llama-3.1-8b", "13b": "llama-2-13b", PAIR: None}

_CPU_PAIRS = 5
_TINY_CONTEXT = 1024


def measure(
    words: Sequence[str] | None,
    name: str,
    doc: str | None,
    contexts: Sequence[int],
    one_a_kind: bool,
    paired: bool = False,
) -> int:
    """Measures what the results file lacks; the exit code is 3 where the time limit ended it.

    Args:
        name: of the benchmark, and the beginning of its results file's name.
        contexts: by default.
        one_a_kind: take the first text of a kind that is here, rather than all of them.
        paired: a run of plain decoding beside each of ours; by default several on a CPU, whose clock is less
            steady.
    """
    made = grid_parser(name, doc, contexts, SHAPES, ["7b", "8b"])
    args = parsed(made, words)
    device = device_for_shapes(made, args)
    if args.pairs is None and paired:
        args.pairs = _CPU_PAIRS if device.type == "cpu" else 1
    limit = TimeLimit(args.seconds)
    texts, sources, missing = found_texts(made, args, one_a_kind)
    for grid, file in files_by_shape(args, name, device, sources, rows):
        if not measure_grid(GridRun(grid, file, texts, device, limit, args.seed), missing):
            return 3
    return 0


def files_by_shape(
    args: argparse.Namespace,
    name: str,
    device: torch.device,
    sources: Sequence[TextSource],
    make_rows: Rows,
) -> Iterator[tuple[Grid, ResultsFile]]:
    """Yields for each of the command line's shapes its grid and its part of the results file.

    What is measured with other options than the defaults is a part of its own.
    """
    path = results_folder(args.out, args.tiny) / f"{name}_{machine_of(device)}.jsonl"
    for shape in args.shapes:
        shapes = pair_shapes(SHAPES[shape], args.tiny)
        grid, wide = grid_of(args, shapes, sources, args.contexts, dict(args.set)), shapes[0]
        model = "embedded pair" if wide is None else f"{wide} inflated"
        entries = PAIR_VOCABULARY if wide is None else inflated_vocabulary(wide)
        plan = {"shape": shape, "model": model, "options": grid.options, "vocabulary": entries}
        named = [shape, *(f"{name}-{value}" for name, value in sorted(grid.options.items()))]
        part = re.sub(r"[^\w.-]+", "_", "-".join(named))
        yield grid, part_of_file(path, part, plan, args, device, make_rows)


def part_of_file(
    path: Path, part: str, plan: Record, args: argparse.Namespace, device: torch.device, make_rows: Rows
) -> ResultsFile:
    """Returns a part of a results file. A new file begins as a copy of that of its name in docs/results,
    unless the run is tiny.

    Args:
        plan: what is measured, for the settings of the part.
    """
    settings = settings_of(plan, args.seed, device.type == "cpu")
    return ResultsFile(path, part, settings, make_rows, None if args.tiny else RESULTS / path.name)


def device_for_shapes(made: argparse.ArgumentParser, args: argparse.Namespace) -> torch.device:
    """Returns the device by :func:`device_for`; exits if inflated shapes are asked for without a GPU."""
    device = device_for(args.tiny)
    inflated = [shape for shape in args.shapes if shape != PAIR]
    if device.type == "cpu" and inflated and not args.tiny:
        made.error(f"there is no GPU here for {', '.join(inflated)}; use --shapes pair, or --tiny")
    return device


def found_texts(
    made: argparse.ArgumentParser, args: argparse.Namespace, one_a_kind: bool
) -> tuple[Texts, list[TextSource], list[str]]:
    """Returns the reader of texts, the texts that are here, and what to print of the others; exits without
    any.
    """
    try:
        texts = Texts(args.texts)
        return texts, *chosen_sources(texts, args.kinds, one_a_kind)
    except (ValueError, OSError) as error:
        made.error(str(error))


def grid_of(
    args: argparse.Namespace,
    shapes: tuple[str | None, str],
    sources: Sequence[TextSource],
    contexts: Sequence[int],
    options: Record,
) -> Grid:
    """Returns the grid of the command line's temperatures, seeds and lengths.

    Args:
        shapes: of the target and the draft, by :func:`pair_shapes`.
    """
    seeds = tuple(range(args.seed, args.seed + args.seeds))
    return Grid(
        *shapes, tuple(sources), tuple(contexts), tuple(args.temperatures), seeds, args.new_tokens,
        args.plain_tokens, args.pairs or 0, options,
    )  # fmt: skip


def measure_grid(run: GridRun, missing: Sequence[str]) -> bool:
    """Measures what the run's file lacks and prints its rows; whether it was all."""
    for text in missing:
        run.file.note(text)
    complete = run.measure()
    run.file.write()
    for row in run.file.rows:
        print(json.dumps(row))
    if not complete:
        run.limit.say("the time limit ends this run; the same command goes on from here")
    return complete


def grid_parser(
    name: str, doc: str | None, contexts: Sequence[int], shapes: Iterable[str], default: Sequence[str]
) -> argparse.ArgumentParser:
    """Returns the parser of a benchmark that measures grids; ``shapes`` are the models that it knows."""
    made = texts_parser(name, doc, contexts)
    add = made.add_argument
    add("--shapes", nargs="+", choices=list(shapes), default=list(default), help="models; pair: not inflated")
    add("--plain-tokens", type=int, default=48, help="of plain decoding")
    add(
        "--pairs",
        type=int,
        help="runs of each text and seed, each beside one of plain decoding; 0: plain decoding once",
    )
    add(
        "--set",
        type=field,
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="engine options",
    )
    return made


def parsed(made: argparse.ArgumentParser, words: Sequence[str] | None) -> argparse.Namespace:
    """Returns the arguments; prompts of a tiny run are short by default."""
    args = made.parse_args(words)
    if args.tiny:
        made.set_defaults(contexts=[_TINY_CONTEXT])
        args = made.parse_args(words)
    return args


def texts_parser(name: str, doc: str | None, contexts: Sequence[int]) -> argparse.ArgumentParser:
    """Returns a parser with texts, their contexts and temperatures, and a time limit."""
    made = parser(f"benchmarks {name}", doc)
    add = made.add_argument
    add("--contexts", type=int, nargs="+", default=list(contexts), help="prompt tokens")
    add("--kinds", nargs="+", help="kinds of text, or texts by name; by default all")
    add("--temperatures", type=float, nargs="+", default=[0.0, 0.6, 1.0], help="0 is greedy")
    add("--seeds", type=int, default=2, help="how many, where tokens are drawn")
    add("--new-tokens", type=int, default=128, help="of each text")
    add("--texts", type=Path, help="file that `texts` wrote; by default what is installed")
    add("--seconds", type=float, help="end before this many, with what is measured")
    return made


def chosen_sources(
    texts: Texts, kinds: Sequence[str] | None, one_a_kind: bool
) -> tuple[list[TextSource], list[str]]:
    """Returns the texts that are wanted and here, and what to print of the others.

    Raises:
        ValueError: a kind is unknown, or no text is here.
    """
    wanted = kinds or list(dict.fromkeys(source.kind for source in SOURCES))
    found: list[TextSource] = []
    missing: list[str] = []
    for kind in wanted:
        before = len(found)
        for source in named(kind):
            if one_a_kind and len(found) > before:
                break
            try:
                texts.read(source)
            except MissingTextError as error:
                missing.append(str(error))
                continue
            found.append(source)
    if not found:
        raise ValueError(f"no text is here: {missing[0]}")
    return found, missing

"""``triforce-tree bench verify``: the command of a results file again on this machine, and the ratios."""

import argparse
import tempfile
from importlib import import_module
from pathlib import Path

from triforce_tree.cli.bench.running import show
from triforce_tree.cli.console import json_line, screen
from triforce_tree.eval.report import verify


def run(args: argparse.Namespace) -> int:
    theirs = verify.cells_of(args.results)
    if args.mine is not None:
        return _compare(args, theirs, args.mine)
    words = verify.command_of(args.results)
    if args.device:
        words += ["--device", args.device]
    if args.out:
        return _measured(args, theirs, words, args.out)
    with tempfile.TemporaryDirectory() as folder:
        return _measured(args, theirs, words, str(Path(folder) / "mine.jsonl"), kept=False)


def _measured(
    args: argparse.Namespace, theirs: verify.Cells, words: list[str], out: str, kept: bool = True
) -> int:
    # Imported here: the parser names this module.
    from triforce_tree.cli.arguments import parser

    screen().print(f"triforce-tree {' '.join(words)}")
    words = [*words, "--out", out]
    own = parser().parse_args(words)
    own.words, own.kept = words, kept
    code = int(import_module(own.module).run(own))
    return code or _compare(args, theirs, out)


def _compare(args: argparse.Namespace, theirs: verify.Cells, path: str) -> int:
    mine = verify.cells_of(path)
    show([verify.compared(theirs, mine)])
    if args.json:
        rows = [
            {**dict(place), "figure": name, "file": value, "here": mine.get(place, {}).get(name)}
            for place, figures in theirs.items()
            for name, value in figures.items()
        ]
        json_line({"file": args.results, "rows": rows})
    return 0

"""``triforce-tree bench verify``: the command of a results file again on this machine, and the ratios."""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from triforce_tree.cli.bench.running import show
from triforce_tree.cli.console import json_line, screen
from triforce_tree.eval.report import verify
from triforce_tree.eval.report.code_digest import ROOT
from triforce_tree.eval.report.rows import Cells


def run(args: argparse.Namespace) -> int:
    theirs = verify.cells_of(args.results)
    if args.mine is not None:
        return _compare(args, theirs, args.mine)
    with tempfile.TemporaryDirectory() as folder:
        if verify.is_of_scripts(args.results):
            code, made = _by_scripts(args, args.out or folder)
        else:
            code, made = _by_bench(args, args.out or str(Path(folder) / "mine.jsonl"))
        return code or _compare(args, theirs, made)


def _by_bench(args: argparse.Namespace, out: str) -> tuple[int, str]:
    """The exit code of the file's ``bench`` command, and the results file that it wrote."""
    # Imported here: the parser names this module.
    from triforce_tree.cli.arguments import parser
    from triforce_tree.cli.entry import check

    words = [*verify.command_of(args.results), *args.extra]
    if args.device:
        words += ["--device", args.device]
    screen().print(f"triforce-tree {' '.join(words)}")
    words = [*words, "--out", out]
    own = parser().parse_args(words)
    own.words, own.kept = words, bool(args.out)
    check(own)
    return int(import_module(own.module).run(own)), out


def _by_scripts(args: argparse.Namespace, out: str) -> tuple[int, str]:
    """The same for a file of a checkout's scripts, which write into the folder ``out``.

    Raises:
        ValueError: this is no checkout, or ``--device`` was given.
    """
    if not (ROOT / "scripts" / "benchmarks" / "remeasure.py").is_file():
        raise ValueError(
            f"{args.results!r} was measured by scripts that a checkout of the repository has and this "
            "installation has not; run bench verify in a checkout, or give --mine FILE"
        )
    if args.device:
        raise ValueError(f"--device {args.device} is for files of bench --out; scripts take --extra --device")
    words: Sequence[str] = [str(Path(args.results).resolve()), "--out", str(Path(out).resolve())]
    done = subprocess.run(
        [sys.executable, "-m", "scripts.benchmarks", "remeasure", *words, "--extra", *args.extra],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout.strip()


def _compare(args: argparse.Namespace, theirs: Cells, path: str) -> int:
    mine = verify.cells_of(path, beside=args.results)
    show(args, verify.compared(theirs, mine))
    if args.json:
        rows = [
            {**dict(place), "figure": name, "file": value, "here": mine.get(place, {}).get(name)}
            for place, figures in theirs.items()
            for name, value in figures.items()
        ]
        json_line({"file": args.results, "rows": rows})
    return 0

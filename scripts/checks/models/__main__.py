"""Compares tiny random models of all classes of transformers with model.generate, on every path.

    python -m scripts.checks.models --jobs 2                       # all; goes on where it was ended
    python -m scripts.checks.models --only llama gemma3 --paths "2 levels" batch --out /tmp/models.jsonl
    python -m scripts.checks.models --keep --only jamba lfm2       # these anew, all other rows as they are
    python -m scripts.checks.models --device cuda --out docs/results/models_gpu.jsonl
    python -m scripts.benchmarks tables                            # docs/models.md from the results

Each model is random and has everything special about its family left on; its windows, chunks and original
rotary lengths are shorter than the prompts. Exit code 1 where a text differs or anything but a refusal is
raised.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from scripts.benchmarks.common.results import RESULTS, content_at, header, write
from scripts.checks.models import workers
from scripts.checks.models.build import variants_of
from scripts.checks.models.classes import Family, families
from scripts.checks.models.outcomes import BAD, Row
from scripts.checks.models.paths import PATHS
from scripts.checks.models.sample import SAMPLE
from scripts.checks.report import last_line, parser
from triforce_tree.runtime.files.writing import check_writable

FILE = "models.jsonl"


class File:
    """The results file; rows of another commit, of other versions or another device are dropped.

    Args:
        path: where it is.
        device: where the models ran.
        keep: keep them, with the commit that they were measured at.

    Attributes:
        older: keys of the rows that were kept.
    """

    def __init__(self, path: Path, device: str, keep: bool = False) -> None:
        self.path = check_writable(path)
        self.head: dict[str, Any] = header(0) | {"device": device}
        self.rows: dict[tuple[str, str, str], Row] = {}
        self.dropped, self.older = 0, set[tuple[str, str, str]]()
        if path.exists() and path.stat().st_size:
            try:
                held = content_at(path)
            except ValueError as error:
                raise SystemExit(str(error)) from error
            same = all(held.get(name) == self.head[name] for name in ("commit", "versions", "device"))
            rows = [Row.from_dict(row) for row in held["rows"]]
            alike = all(held.get(name) == self.head[name] for name in ("versions", "device"))
            if keep and alike and not same:
                rows = [replace(row, commit=row.commit or held["commit"]) for row in rows]
                same = True
            self.rows = {row.key: row for row in rows} if same else {}
            self.older = {row.key for row in self.rows.values() if row.commit}
            self.dropped = 0 if same else len(rows)

    def add(self, rows: Sequence[Row]) -> None:
        self.rows |= {row.key: row for row in rows}
        self.older -= {row.key for row in rows}
        ordered = [self.rows[key].as_dict() for key in sorted(self.rows)]
        write(self.path, self.head | {"paths": list(PATHS), "rows": ordered})


def chosen(only: Sequence[str], sample: bool) -> list[Family]:
    """Returns the classes that are asked for, by model type or class.

    Raises:
        SystemExit: a name that no class has.
    """
    known = families()
    if unknown := set(only) - known.keys() - {family.model_type for family in known.values()}:
        raise SystemExit(f"no class of transformers is named {', '.join(sorted(unknown))}")
    found = [f for f in known.values() if not only or f.name in only or f.model_type in only]
    return [f for f in found if not sample or f.name in SAMPLE]


def main(words: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    add = made.add_argument
    add("--only", nargs="+", default=[], metavar="NAME", help="model types or classes")
    add("--paths", nargs="+", default=list(PATHS), choices=list(PATHS), metavar="PATH", help=", ".join(PATHS))
    add("--sample", action="store_true", help="the classes that the tests run")
    add("--out", type=Path, default=RESULTS / FILE, help="the results file")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="where the models run")
    add("--jobs", type=int, default=1, help="processes")
    add("--limit", type=float, default=120, help="seconds for one path of a model")
    add(
        "--keep",
        action="store_true",
        help="keep rows of other code, with their commit, and do what is named anew",
    )
    add("--json", action="store_true", help="print one line of JSON alone")
    return tried(made.parse_args(words))


def tried(args: argparse.Namespace) -> int:
    """Tries what the file lacks, and prints the counts."""
    console = Console(stderr=True)
    file = File(args.out, args.device, args.keep)
    if file.dropped:
        console.print(f"{args.out}: {file.dropped} rows of other code are dropped")
    keys: set[tuple[str, str, str]] = set()
    jobs = []
    for family in chosen(args.only, args.sample):
        for feature_set in variants_of(family):
            of = {(family.name, feature_set, path): path for path in args.paths}
            keys |= of.keys()
            if left := tuple(path for key, path in of.items() if key not in file.rows or key in file.older):
                jobs.append(workers.Job(family.name, family.model_type, feature_set, left))
    columns = (
        TextColumn("{task.description:<40.40}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=args.json) as bar:
        task = bar.add_task("models", total=len(jobs))

        def done(job: workers.Job, rows: list[Row]) -> None:
            file.add(rows)
            bar.update(task, advance=1, description=job.model_class)
            for row in rows:
                if row.outcome in BAD:
                    bar.console.print(f"{row.model_class}, {row.feature_set}, {row.path}: {row.outcome}: "
                                      f"{row.reason}", style="red", markup=False, soft_wrap=True)  # fmt: skip

        workers.run(jobs, args.device, args.jobs, args.limit, done)
    rows = [file.rows[key] for key in sorted(keys & file.rows.keys())]
    return told(rows, args.json)


def told(rows: Sequence[Row], as_json: bool) -> int:
    """Prints how many paths ended how; the exit code."""
    counts: dict[str, Counter[str]] = {path: Counter() for path in PATHS}
    for row in rows:
        counts[row.path][row.outcome] += 1
    bad = [row.as_dict() for row in rows if row.outcome in BAD]
    if as_json:
        last_line({"counts": {path: dict(found) for path, found in counts.items() if found}, "bad": bad})
        return int(bool(bad))
    outcomes = sorted({row.outcome for row in rows})
    table = Table("path", *outcomes)
    for path, found in counts.items():
        if found:
            table.add_row(path, *(str(found[outcome]) for outcome in outcomes))
    Console().print(table)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())

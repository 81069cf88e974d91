"""Write the tables of README.md and docs/ from the results files.

Figures in tables are never typed by hand. Figures in the text between them are, and nothing checks them.

A table stands between <!-- table: NAME --> and <!-- end table -->; NAME is one of TABLES below.
"""

import argparse
import re
from collections.abc import Sequence

from scripts.benchmarks import front, pages
from scripts.benchmarks.attention import tables as attention
from scripts.benchmarks.cards import tables as cards
from scripts.benchmarks.common.markdown import Record, Table
from scripts.benchmarks.common.results import ROOT, content_at
from scripts.benchmarks.drafters import tables as drafters
from scripts.benchmarks.emulated import tables as emulated
from scripts.benchmarks.exact import tables as exact
from scripts.benchmarks.peers import tables as peers
from scripts.benchmarks.registry import BENCHMARKS
from scripts.benchmarks.requests import tables as requests
from scripts.benchmarks.texts import tables as texts
from scripts.checks.models import table as models_table
from triforce_tree.bench.tables import grid
from triforce_tree.runtime.files.writing import replace_file

RESULTS = ROOT / "docs" / "results"
MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end table -->)", re.DOTALL)


def held(file: str) -> Record | None:
    """Returns the content of a results file, where there is one."""
    path = RESULTS / file
    return content_at(path) if path.exists() else None


# What the files hold that no benchmark of the registry writes.
_OTHERS = {
    "models.jsonl": "every class of transformers on every path, on a CPU: scripts.checks.models",
    "models_gpu.jsonl": "the same with captured graphs on a GPU",
}


def files(_: Record) -> str:
    """Returns a line for each results file: what it measures, and commit, date and hardware of its runs."""
    lines = []
    # Measurements that files are made of have a second suffix.
    for path in sorted(path for path in RESULTS.glob("*.jsonl") if path.stem.isidentifier()):
        content = held(path.name) or {}
        runs = (content.get("parts") or {"": content}).values()
        about = [known.about for known in BENCHMARKS.values() if known.wrote(path.name)]
        columns = (
            ", ".join(dict.fromkeys(str(run[name]) for run in runs if run.get(name)))
            for name in ("commit", "date", "hardware")
        )
        lines.append([f"[{path.name}]({path.name})", about[0] if about else _OTHERS[path.name], *columns])
    return grid(["file", "what it measures", "commit", "date", "hardware"], lines, 5)


def notes(_: Record) -> str:
    """Returns a line for each note of docs/log, the newest first."""
    lines = []
    for path in sorted((ROOT / "docs" / "log").glob("2*.md"), reverse=True):
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        question, _, date = title.rpartition(" (")
        lines.append(f"- {date.rstrip(')')}: [{question}]({path.name})\n")
    return "".join(lines)


TABLES = {
    "log": Table(texts.ANY_TEXT, notes, ""),
    "pages": Table(texts.ANY_TEXT, lambda _: pages.index(), ""),
    "files": Table(texts.ANY_TEXT, files, texts.COMMAND),
    **attention.TABLES, **models_table.TABLES, **texts.TABLES,
    **requests.TABLES, **cards.TABLES, **exact.TABLES, **drafters.TABLES, **peers.TABLES,
    **emulated.TABLES, **front.TABLES,
}  # fmt: skip


def text_of(name: str) -> str:
    """Returns a table, or the command that would make its figures."""
    if name not in TABLES:
        raise SystemExit(f"unknown table {name!r}; known: {', '.join(TABLES)}")
    shown = TABLES[name]
    content = held(shown.file)
    return (content and shown.make(content)) or f"Not measured yet: `{shown.command}`.\n"


def filled(text: str) -> str:
    return MARKED.sub(lambda m: m[1] + text_of(m[2]) + m[3], text)


def main(words: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(
        prog="python -m scripts.benchmarks tables", description=__doc__.partition("\n")[0]
    )
    made.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a table is old")
    made.add_argument("--plots", action="store_true", help="draw the plots as well, which needs matplotlib")
    args = made.parse_args(words)
    if args.plots:
        try:
            from scripts.benchmarks import plots
        except ModuleNotFoundError as error:
            made.error(f"--plots needs {error.name}: pip install matplotlib")

        for path in plots.draw(RESULTS):
            print(f"{path.relative_to(ROOT)}: written")
    old = False
    generated = {RESULTS / name for name in pages.PAGES}
    for path in (ROOT / "README.md", *sorted({*(ROOT / "docs").rglob("*.md"), *generated})):
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if (fresh := filled(pages.source(path.name) if path in generated else text)) != text:
            old = True
            if not args.check:
                replace_file(path, fresh)
            done = "out of date; run python -m scripts.benchmarks tables" if args.check else "written"
            print(f"{path.relative_to(ROOT)}: {done}")
    return int(args.check and old)

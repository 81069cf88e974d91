"""Write the tables of README.md and docs/ from the results files, so that no figure is typed by hand.

A table stands between <!-- table: NAME --> and <!-- end table -->; NAME is one of TABLES below.
"""

import argparse
import json
import re
from collections.abc import Sequence

from scripts.benchmarks.attention import tables as attention
from scripts.benchmarks.common.code_digest import ROOT, mark
from scripts.benchmarks.common.markdown import Record, Table, not_measured
from scripts.benchmarks.cpu import tables as cpu
from scripts.benchmarks.linear import tables as linear
from scripts.benchmarks.offload import tables as offload
from scripts.benchmarks.on_chip import tables as on_chip

RESULTS = ROOT / "docs" / "results"
MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end table -->)", re.DOTALL)


def held(file: str) -> Record | None:
    """The content of a results file, where there is one."""
    path = RESULTS / file
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def front(content: Record) -> str | None:
    return on_chip.front(content, held(offload.FILE) or {"rows": [], "parts": {}}, offload.FILE)


TABLES = {
    "front": Table(on_chip.FILE, front, f"{on_chip.COMMAND} 7b"),
    **on_chip.TABLES, **offload.TABLES, **attention.TABLES, **linear.TABLES, **cpu.TABLES,
}  # fmt: skip


def text_of(name: str) -> str:
    if name not in TABLES:
        raise SystemExit(f"unknown table {name!r}; known: {', '.join(TABLES)}")
    shown = TABLES[name]
    content = held(shown.file)
    if content is None:
        return not_measured(shown.command, shown.file)
    return shown.make(content) or not_measured(shown.command)


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
        from scripts.benchmarks import plots

        for path in plots.draw(RESULTS):
            print(f"{path.relative_to(ROOT)}: written")
    old = False
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text(encoding="utf-8")
        if (fresh := filled(text)) != text:
            old = True
            if not args.check:
                path.write_text(fresh, encoding="utf-8")
            done = "out of date; run python -m scripts.benchmarks tables" if args.check else "written"
            print(f"{path.relative_to(ROOT)}: {done}")
    # Files whose figures are older than the code under them.
    for path in sorted(RESULTS.glob("*.json")):
        content = held(path.name) or {}
        if told := mark(content.get("parts") or content.get("evaluated") or {"": content}):
            print(f"docs/results/{path.name}:{told}")
    return int(args.check and old)

"""Write the tables of README.md and docs/ from the results files, so that no figure is typed by hand.

A table stands between <!-- table: NAME --> and <!-- end table -->; NAME is one of TABLES below.
"""

import argparse
import json
import re
from collections.abc import Sequence
from typing import Any

from scripts.benchmarks.attention import tables as attention
from scripts.benchmarks.common.code_digest import ROOT, mark
from scripts.benchmarks.common.markdown import Table, not_measured
from scripts.benchmarks.cpu import tables as cpu
from scripts.benchmarks.linear import tables as linear
from scripts.benchmarks.offload import tables as offload
from scripts.benchmarks.on_chip import tables as on_chip

RESULTS = ROOT / "docs" / "results"
MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end table -->)", re.DOTALL)


def front(content: dict[str, Any]) -> str | None:
    path = RESULTS / offload.FILE
    other = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": [], "parts": {}}
    return on_chip.front(content, other, offload.FILE)


TABLES = {
    "front": Table(on_chip.FILE, front, f"{on_chip.COMMAND} 7b"),
    **on_chip.TABLES, **offload.TABLES, **attention.TABLES, **linear.TABLES, **cpu.TABLES,
}  # fmt: skip


def text_of(name: str) -> str:
    if name not in TABLES:
        raise SystemExit(f"unknown table {name!r}; known: {', '.join(TABLES)}")
    shown = TABLES[name]
    path = RESULTS / shown.file
    if not path.exists():
        return not_measured(shown.command, shown.file)
    return shown.make(json.loads(path.read_text(encoding="utf-8"))) or not_measured(shown.command)


def filled(text: str) -> str:
    return MARKED.sub(lambda m: m[1] + text_of(m[2]) + m[3], text)


def aged() -> list[str]:
    """A line for each results file whose figures are older than the code under them."""
    lines = []
    for path in sorted(RESULTS.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        told = mark(content.get("parts") or content.get("evaluated") or {"": content})
        lines += [f"docs/results/{path.name}:{told}"] if told else []
    return lines


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.benchmarks tables", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a table is old")
    parser.add_argument(
        "--plots", action="store_true", help="draw the pictures as well, which needs matplotlib"
    )
    args = parser.parse_args(words)
    if args.plots:
        from scripts.benchmarks import plots

        for path in plots.draw(RESULTS):
            print(f"{path.relative_to(ROOT)}: written")
    old = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text(encoding="utf-8")
        fresh = filled(text)
        if fresh != text:
            old.append(path.relative_to(ROOT))
            if not args.check:
                path.write_text(fresh, encoding="utf-8")
    for path in old:
        print(
            f"{path}: "
            + ("out of date; run python -m scripts.benchmarks tables" if args.check else "written")
        )
    for line in aged():
        print(line)
    return int(args.check and bool(old))

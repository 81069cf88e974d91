"""Write the tables of README.md and docs/ from the results files, so that no figure is typed by hand.

A table stands between <!-- table: NAME --> and <!-- end table -->; NAME is one of TABLES below.
"""

import argparse
import json
import re
from collections.abc import Sequence

from scripts.benchmarks.attention import tables as attention
from scripts.benchmarks.common.code_digest import ROOT, mark
from scripts.benchmarks.common.markdown import Columns, Record, Table, cell, file_note, listing, rows_of
from scripts.benchmarks.cpu import tables as cpu
from scripts.benchmarks.linear import tables as linear
from scripts.benchmarks.offload import tables as offload
from scripts.benchmarks.on_chip import tables as on_chip
from scripts.benchmarks.requests import tables as requests
from scripts.benchmarks.retrieval import tables as retrieval
from scripts.benchmarks.texts import tables as texts
from scripts.benchmarks.verification import tables as verification
from scripts.checks.models import table as models_table

RESULTS = ROOT / "docs" / "results"
# The table on README's first screen: (part, batch, context) in the order of the lines; then parts offloaded.
_FRONT = (("7b", 1, 122_880), ("8b", 1, 122_880), ("batch", 6, 19_456))
_OFFLOADED = {
    "7b": "cache on the host",
    "host-attention": "the same with attention on the CPU",
    "13b": "weights and cache on the host",
}
FRONT: Columns = {
    "model": "{shape}", "prompt": "{where}", "T": "{temperature:g}", "ms/token": "**{ms_per_token:.1f}**",
    # With attention on the CPU, ordinary decoding with it too.
    "ordinary decoding, same kernels": "{plain_ms:,.1f}", "speed-up": "**{gain:.1f}x**",
    "repeated 8-grams": "{repeated_8grams:pct}",
}  # fmt: skip
_FRONT_NOTE = (
    "One {hardware}, bf16, 256 new tokens, real texts, medians over prompts, decode only. "
    '"Inflated": all layers of these models in shape and bytes, with the function of the embedded pair. '
    "Details, other baselines and files: [docs/benchmarks.md](docs/benchmarks.md), "
    "[docs/offloading.md](docs/offloading.md). "
)
NOTHING: Record = {"rows": [], "parts": {}}
MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end table -->)", re.DOTALL)


def held(file: str) -> Record | None:
    """The content of a results file, where there is one."""
    path = RESULTS / file
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def front_rows(content: Record) -> list[Record]:
    """What three levels bring on one GPU, from two results files."""
    rows = []
    for part, batch, context in _FRONT:
        where = f"{batch} x {context:,} tokens" if batch > 1 else f"{context:,} tokens"
        found = [r for r in rows_of(content, part) if (r["batch"], r["context"]) == (batch, context)]
        rows += [r | {"where": where} for r in sorted(found, key=lambda r: r["temperature"])]
    for part, what in _OFFLOADED.items():
        for r in rows_of(held(offload.FILE) or NOTHING, part):
            where = f"{r['context']:,} tokens, {what}, {r['gpu_memory_cap_gib']:g} GiB of GPU"
            rows.append(r | {"where": where})
    for r in rows:
        r["plain_ms"] = r.get("attended_baseline_ms_per_token", r["baseline_ms_per_token"])
        r["gain"] = r.get("speedup_to_fastest_baseline", r["speedup"])
    return rows


def front_note(content: Record, rows: list[Record]) -> str:
    note = cell(_FRONT_NOTE, content["parts"]["7b"])
    files = {on_chip.FILE: (content, on_chip.HEADLINES)}
    files |= {offload.FILE: (held(offload.FILE) or NOTHING, tuple(_OFFLOADED))}
    for file, (found, names) in files.items():
        note += file_note(file, {name: found["parts"][name] for name in names if name in found["parts"]})
    return note.replace(".\n", ". ", 1)


front = listing(FRONT, front_rows, front_note, left=2)
TABLES = {
    "front": Table(on_chip.FILE, front, f"{on_chip.COMMAND} 7b"),
    **on_chip.TABLES, **offload.TABLES, **attention.TABLES, **linear.TABLES, **cpu.TABLES,
    **models_table.TABLES, **texts.TABLES, **retrieval.TABLES, **verification.TABLES,
    **requests.TABLES,
}  # fmt: skip


def text_of(name: str) -> str:
    """A table, or the command that would make its figures."""
    if name not in TABLES:
        raise SystemExit(f"unknown table {name!r}; known: {', '.join(TABLES)}")
    shown = TABLES[name]
    if (content := held(shown.file)) is None:
        return f"Not measured yet: `{shown.command}` writes `docs/results/{shown.file}`.\n"
    return shown.make(content) or f"Not measured yet: `{shown.command}`.\n"


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

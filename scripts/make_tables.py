"""Write the tables of README.md and docs/ from the results files, so that no figure is typed by hand.

    python scripts/make_tables.py           # fills every table
    python scripts/make_tables.py --check   # for CI: fails where one is out of date
    python scripts/make_tables.py --plots   # pictures too, which need matplotlib

A table stands between <!-- table: NAME --> and <!-- end table -->; NAME is one of TABLES below.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import arch_tables
import front_table
import host_tables
import kernel_tables
import linear_tables
import markdown_tables
import offload_tables
import on_chip_tables
import parallel_tables
import resident_tables
import setting_tables

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end table -->)", re.DOTALL)


def cpu(result: dict[str, Any]) -> str:
    rows = result["rows"]
    temperatures = sorted({r["temperature"] for r in rows})
    methods = list(dict.fromkeys(r["method"] for r in rows))
    columns = ["method"]
    for t in temperatures:
        columns += [f"ms/token, T={t:g}", "speed-up", "repeated 8-grams"]
    lines = []
    for method in methods:
        line = [method]
        for t in temperatures:
            row = next((r for r in rows if r["method"] == method and r["temperature"] == t), None)
            if row is None:
                line += ["", "", ""]
                continue
            gain = row["speedup_vs_best_baseline"]
            line.append(f"{row['ms_per_token']:.1f}")
            line.append("" if gain is None else f"{gain:.2f}x")
            line.append(markdown_tables.percent(row["repeated_8grams"]))
        lines.append(line)
    versions = result["versions"]
    first = rows[0]
    note = (
        f"{first['context']:,} prompt tokens, {first['new_tokens']} new ones, medians over "
        f"{result['prompts']} prompts, decode only; {result['hardware']}, {result['threads']} threads, "
        f"fp32, torch {versions['torch']}, transformers {versions['transformers']}, commit "
        f"{result['commit']}. Speed-up against the fastest of transformers-static, -dynamic and "
        "-assistant. File: `docs/results/cpu_16k.json`.\n"
    )
    return markdown_tables.table(columns, lines) + "\n" + note


def acceptance(result: dict[str, Any]) -> str:
    lines = [
        [
            row["method"],
            f"{row['temperature']:g}",
            ", ".join(f"{name} {value:.2f}" for name, value in row["acceptance"].items()),
        ]
        for row in result["rows"]
        if row["acceptance"]
    ]
    return markdown_tables.table(["method", "temperature", "acceptance"], lines)


def pair(result: dict[str, Any]) -> str:
    needles = sorted(result.get("needle", {}).items(), key=lambda item: int(item[0]))
    lines = [[f"needle, {int(length):,} tokens (exact, greedy)", f"{share:.2f}"] for length, share in needles]
    if "loss_16k" in result:
        lines.append(["loss at 16K of context, nats a token", f"{result['loss_16k']:.3f}"])
    if "draft_overlap" in result:
        lines.append(["draft against target, mean sum of min(p, q)", f"{result['draft_overlap']:.3f}"])
    for name, share in result.get("retrieval_overlap", {}).items():
        context, _, budget = name.partition("/")
        what = f"retrieval against full cache, {int(context):,} tokens, budget {int(budget):,}"
        lines.append([what, f"{share:.3f}"])
    return markdown_tables.table(["embedded pair, held-out text", "figure"], lines)


_KERNEL = "python scripts/bench_tree_attention.py --out docs/results"
_ON_CHIP = f"{on_chip_tables.COMMAND} 7b"
# name -> (results file, what makes the table, what makes the file)
TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str], str]] = {
    "cpu_16k": ("cpu_16k.json", cpu, "python scripts/bench_cpu.py"),
    "cpu_16k_acceptance": ("cpu_16k.json", acceptance, "python scripts/bench_cpu.py"),
    "pair": ("pair.json", pair, "python scripts/eval_pair.py"),
    **{
        f"tree_attention_{make.__name__}": ("tree_attention_h200.json", make, _KERNEL)
        for make in (
            kernel_tables.cells,
            kernel_tables.aims,
            kernel_tables.layouts,
            kernel_tables.splits,
            kernel_tables.costs,
            kernel_tables.gate,
        )
    },
    "front": (on_chip_tables.FILE, front_table.front, _ON_CHIP),
    "kernels_by_arch": (arch_tables.FITS, arch_tables.fits, "python scripts/kernels_by_arch.py"),
    "tiles": (arch_tables.TILES, arch_tables.tiles, "python scripts/bench_tiles.py"),
    "linear_layers": (linear_tables.FILE, linear_tables.layers, linear_tables.COMMAND),
    **{f"on_chip_{make.__name__}": (on_chip_tables.FILE, make, _ON_CHIP) for make in on_chip_tables.TABLES},
    **{
        f"offload_{make.__name__}": (offload_tables.FILE, make, f"{offload_tables.COMMAND} 7b")
        for make in offload_tables.TABLES
    },
    "view_or_copy": (setting_tables.VIEW_FILE, setting_tables.view_or_copy, setting_tables.VIEW_COMMAND),
    "tuned": (setting_tables.TUNE_FILE, setting_tables.tuned, setting_tables.TUNE_COMMAND),
    **{f"host_{make.__name__}": (host_tables.FILE, make, host_tables.COMMAND) for make in host_tables.TABLES},
    "host_ratios_xeon": (host_tables.XEON_FILE, host_tables.ratios_xeon, host_tables.XEON_COMMAND),
    "host_ratios": (host_tables.EPYC_FILE, host_tables.ratios, host_tables.EPYC_COMMAND),
    "host_ratios_avx2": (host_tables.AVX2_FILE, host_tables.ratios_avx2, host_tables.AVX2_COMMAND),
    "resident": (resident_tables.FILE, resident_tables.resident, resident_tables.COMMAND),
    "parallel_speed": (parallel_tables.FILE, parallel_tables.speed, parallel_tables.COMMAND),
}


def table(name: str) -> str:
    if name not in TABLES:
        raise SystemExit(f"unknown table {name!r}; known: {', '.join(TABLES)}")
    file, make, command = TABLES[name]
    path = RESULTS / file
    if not path.exists():
        return f"Not measured yet: `{command}` writes `docs/results/{file}`.\n"
    return make(json.loads(path.read_text(encoding="utf-8")))


def filled(text: str) -> str:
    return MARKED.sub(lambda m: m[1] + table(m[2]) + m[3], text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a table is old")
    parser.add_argument("--plots", action="store_true", help="draw the pictures as well")
    args = parser.parse_args()
    on_chip = RESULTS / on_chip_tables.FILE
    if args.plots and on_chip.exists():
        import on_chip_plots

        for path in on_chip_plots.plots(json.loads(on_chip.read_text(encoding="utf-8")), RESULTS):
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
        print(f"{path}: {'out of date; run python scripts/make_tables.py' if args.check else 'written'}")
    return int(args.check and bool(old))


if __name__ == "__main__":
    sys.exit(main())

"""The table on README's first screen: what three levels bring on one GPU, from two results files."""

import json
from pathlib import Path

import offload_tables
from markdown_tables import Record, percent, rows_of, table

# (results file's part, batch, context) in the order of the lines.
_LINES = (("7b", 1, 122_880), ("8b", 1, 122_880), ("batch", 6, 19_456))
_OFFLOADED = (
    ("7b", "cache on the host"),
    ("host-attention", "the same with attention on the CPU"),
    ("13b", "weights and cache on the host"),
)
_TEMPERATURES = (0.0, 0.6, 1.0)


def front(on_chip: Record) -> str:
    path = Path(__file__).parents[1] / "docs" / "results" / offload_tables.FILE
    offload = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
    lines = []
    for part, batch, context in _LINES:
        rows = [r for r in rows_of(on_chip, part) if (r["batch"], r["context"]) == (batch, context)]
        where = f"{batch} x {context:,} tokens" if batch > 1 else f"{context:,} tokens"
        lines += _lines(rows, where)
    for part, what in _OFFLOADED:
        for row in rows_of(offload, part):
            place = f"{what}, {row['gpu_memory_cap_gib']:g} GiB of GPU"
            lines += _lines([row], f"{row['context']:,} tokens, {place}")
    part = on_chip["parts"]["7b"]
    columns = [
        "model", "prompt", "T", "ms/token", "ordinary decoding, same kernels", "speed-up",
        "repeated 8-grams",
    ]  # fmt: skip
    note = (
        f"One {part['hardware']}, bf16, 256 new tokens, real texts, medians over prompts, decode only. "
        '"Inflated": all layers of these models in shape and bytes, with the function of the embedded pair. '
        "Details, other baselines and files: [docs/benchmarks.md](docs/benchmarks.md), "
        "[docs/offloading.md](docs/offloading.md).\n"
    )
    return table(columns, lines, left=2) + "\n" + note


def _lines(rows: list[Record], where: str) -> list[list[str]]:
    return [
        [
            r["shape"],
            where,
            f"{r['temperature']:g}",
            f"**{r['ms_per_token']:.1f}**",
            # With attention on the CPU, ordinary decoding with it too.
            f"{r.get('attended_baseline_ms_per_token', r['baseline_ms_per_token']):,.1f}",
            f"**{r.get('speedup_to_fastest_baseline', r['speedup']):.1f}x**",
            percent(r["repeated_8grams"]),
        ]
        for t in _TEMPERATURES
        for r in rows
        if r["temperature"] == t
    ]

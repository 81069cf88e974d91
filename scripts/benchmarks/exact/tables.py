"""The table of bit-exact decoding in docs/exact.md, from docs/results/bit_exact_h200.jsonl."""

import statistics
from collections.abc import Sequence

from scripts.benchmarks.common.markdown import Columns, Record, Table, listing, noted
from scripts.benchmarks.common.results import grouped

FILE = "bit_exact_h200.jsonl"
COMMAND = "python -m scripts.benchmarks exact"
COLUMNS: Columns = {
    "model": "{shape}", "prompt": "{prompt:,}", "levels": "{levels}", "texts": "{prompts}",
    "tokens": "{tokens:,}",
    "**differences**": "?**{partings}**", "without `exact`": "?{partings_without_exact}", "ties": "?{ties}",
    "ms a token": "?{ms_exact:.2f}", "without `exact`, ms": "?{ms:.2f}", "ratio": "?{ratio:.2f}x",
}  # fmt: skip
_NOTE = (
    "{hardware}, bf16, torch {versions[torch]}; differences from plain decoding of the same mode; ties of "
    "the two largest logits; times of single prompts and their ratios, each a median, where no other program "
    "used the GPU. "
)


def rows_of(part: str, header: Record, records: Sequence[Record]) -> list[Record]:
    """Returns a row for each shape and number of levels: what parted from plain decoding, and times.

    Args:
        part, header: of the results file.
        records: each the ``tokens`` that one prompt got, by shape, levels, exact and prompt; ``ms`` a token
            where it was decoded alone, ``ties`` where they were counted.
    """
    modes = grouped(records, "shape", "levels", "exact")

    def of(shape: str, levels: int, exact: bool) -> tuple[list[Record], list[tuple[Record, Record]]]:
        """Returns the records of a mode, and beside each that of plain decoding, where there is one."""
        own = modes.get((shape, levels, exact), [])
        plain = {r["prompt"]: r for r in modes.get((shape, 1, exact), ())}
        return own, [(r, plain[r["prompt"]]) for r in own if r["prompt"] in plain]

    rows = []
    for shape, levels in dict.fromkeys((r["shape"], r["levels"]) for r in records if r["exact"]):
        (own, compared), (inexact, beside) = (of(shape, levels, exact) for exact in (True, False))
        counted = [plain for _, plain in compared if "ties" in plain]
        parted = sum(a["tokens"] != b["tokens"] for a, b in beside)
        row: Record = {
            "part": part,
            "shape": shape,
            "prompt": header["settings"]["prompt"],
            "levels": levels,
            "prompts": len(compared),
            "tokens": sum(len(r["tokens"]) for r, _ in compared),
        }
        if levels > 1:
            row["partings"] = sum(a["tokens"] != b["tokens"] for a, b in compared)
            row["partings_without_exact"] = f"{parted} of {len(beside)} texts"
        if counted:
            tokens = sum(len(r["tokens"]) for r in counted)
            row["ties"] = f"{sum(r['ties'] for r in counted)} of {tokens:,} tokens"
        times = _times(own, inexact)
        if times:
            median = [statistics.median(column) for column in zip(*times, strict=True)]
            row |= {"ms_exact": median[0], "ms": median[1], "ratio": median[2]}
        # Plain decoding is what others are compared with: it has times alone.
        if levels > 1 or "ratio" in row:
            rows.append(row)
    return rows


def _times(exact: Sequence[Record], inexact: Sequence[Record]) -> list[tuple[float, float, float]]:
    """Returns milliseconds a token of prompts that were decoded alone, and their ratio, without the first
    prompt.
    """
    others = {r["prompt"]: r["ms"] for r in inexact if "ms" in r and r["prompt"] > 0}
    both = [(r["ms"], others[r["prompt"]]) for r in exact if "ms" in r and r["prompt"] in others]
    return [(ms_exact, ms, ms_exact / ms) for ms_exact, ms in both]


TABLES = {"bit_exact": Table(FILE, listing(COLUMNS, caption=noted(_NOTE, FILE), left=1), COMMAND)}

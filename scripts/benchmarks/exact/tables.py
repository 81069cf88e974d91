"""The table of bit-exact decoding in docs/exact.md, from docs/results/bit_exact_h200.jsonl."""

import statistics
from collections.abc import Sequence

from scripts.benchmarks.common.markdown import Columns, Record, Table, listing, noted
from scripts.benchmarks.common.results import grouped

FILE = "bit_exact_h200.jsonl"
COMMAND = "python -m scripts.benchmarks exact"
COLUMNS: Columns = {
    "model": "{shape}", "prompt": "{prompt:,}", "levels": "{levels}", "at once": "{batch}",
    "texts": "?{prompts}", "tokens": "?{tokens:,}",
    "**differences**": "?**{partings}**", "without `exact`": "?{partings_without_exact}", "ties": "?{ties}",
    "ms a token": "?{ms_exact:.2f}", "without `exact`, ms": "?{ms:.2f}", "ratio": "?{ratio:.2f}x",
}  # fmt: skip
_NOTE = (
    "{hardware}, bf16, torch {versions[torch]}; differences from plain decoding of the same mode; ties of "
    "the two largest logits; times and their ratios, each a median over prompts or batches, where no other "
    "program used the GPU. "
)


def rows_of(part: str, header: Record, records: Sequence[Record]) -> list[Record]:
    """Returns a row for each shape and number of levels with what parted from plain decoding and times of
    single prompts, and one with times of batches.

    Args:
        part, header: of the results file.
        records: each the ``tokens`` that one prompt got, by shape, levels, exact and prompt; the ``batch`` of
            prompts that were decoded with it, the ``first`` of them, and ``ms`` a token of each; ``ties``
            where they were counted.
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
        place: Record = {
            "part": part, "shape": shape, "prompt": header["settings"]["prompt"], "levels": levels
        }  # fmt: skip
        row = place | {
            "batch": 1,
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
        row |= times.pop(1, {})
        # Plain decoding is what others are compared with: it has times alone.
        if levels > 1 or "ratio" in row:
            rows.append(row)
        rows += [place | {"batch": batch} | found for batch, found in times.items()]
    return rows


def _times(exact: Sequence[Record], inexact: Sequence[Record]) -> dict[int, Record]:
    """Returns medians of the milliseconds a token and of their ratio, by the number of prompts at once. The
    first prompt and the first batch of each size do not count.
    """
    found: dict[int, Record] = {}
    for (batch,), ours in grouped(exact, "batch").items():
        first = {r["first"]: r["ms"] for r in ours}
        others = {r["first"]: r["ms"] for r in inexact if r["batch"] == batch}
        both = [(first[n], others[n]) for n in sorted(first.keys() & others.keys())[1:]]
        if both:
            found[batch] = {
                "ms_exact": statistics.median(ms for ms, _ in both),
                "ms": statistics.median(ms for _, ms in both),
                "ratio": statistics.median(ms / other for ms, other in both),
            }
    return found


TABLES = {"bit_exact": Table(FILE, listing(COLUMNS, caption=noted(_NOTE, FILE), left=1), COMMAND)}

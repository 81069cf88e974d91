"""The table of docs/results/draft_kinds.json: drafts before and after further distillation, by kind."""

import statistics

from scripts.benchmarks.common.markdown import Columns, Record, Table, listing, noted

FILE = "draft_kinds.json"
COMMAND = (
    "python -m scripts.train_pair.kinds.evaluate --texts texts.json.xz --drafts before=OLD after=run/mean"
)
# What is measured, and the heading of its column; what is written greedily has the last one alone.
FIGURES = {1.0: "overlap at T=1", 0.8: "overlap at T=0.8", 0.0: "greedy match"}
_NOTE = (
    "Each cell: {named}. Means over the kind's texts; {settings[windows]} windows of each text and "
    "{settings[rows]} continuations of {settings[new]} tokens at each T, behind 1,024 tokens or more. "
    "{hardware}, torch {versions[torch]}, transformers {versions[transformers]}, seed {seed}, {date}. "
)


def _by_kind(content: Record) -> list[Record]:
    """A row for each kind and what it was measured on, with the drafts' figures side by side."""
    found: dict[tuple[str, str], list[Record]] = {}
    for row in content["rows"]:
        found.setdefault((row["kind"], row["on"]), []).append(row)
    rows = []
    for (kind, on), same in found.items():
        row: Record = {"kind": kind, "on": on}
        # Keys without a point, which a format string would take for an attribute.
        for number, figure in enumerate(FIGURES.values()):
            means = [statistics.fmean(r[draft][figure] for r in same) for draft in content["drafts"]]
            row[f"figure_{number}"] = ", ".join(f"{mean:.3f}" for mean in means)
        rows.append(row)
    return rows


_COLUMNS: Columns = {
    "kind": "{kind}",
    "measured on": "{on}",
    **{f: f"{{figure_{i}}}" for i, f in enumerate(FIGURES.values())},
}
TABLES = {
    "draft_kinds": Table(
        FILE,
        listing(
            _COLUMNS,
            _by_kind,
            lambda content, rows: noted(_NOTE, FILE)(
                {**content, "named": ", ".join(content["drafts"])}, rows
            ),
            left=2,
        ),
        COMMAND,
    )
}

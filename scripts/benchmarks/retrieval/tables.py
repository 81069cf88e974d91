"""The tables of docs/retrieval.md."""

from collections.abc import Sequence

from scripts.benchmarks.common.markdown import (
    Columns,
    Record,
    Table,
    cell,
    file_note,
    grid,
)

FILE = "retrieval_policies.json"
COMMAND = "python -m scripts.benchmarks retrieval"
_FIRST: Columns = {"policy": "{policy}", "chunk": "{chunk}"}


def by_place(content: Record) -> str | None:
    """A line a policy, a column for each model, context, budget and text."""
    rows: Sequence[Record] = content["rows"]
    if not rows:
        return None
    places = dict.fromkeys((r["model"], r["context"], r["budget"], r["text"]) for r in rows)
    found = {(r["policy"], r["chunk"], r["model"], r["context"], r["budget"], r["text"]): r for r in rows}
    lines = []
    for policy, chunk in dict.fromkeys((r["policy"], r["chunk"]) for r in rows):
        cells = [found.get((policy, chunk, *place)) for place in places]
        lines.append([policy, str(chunk), *("" if r is None else cell("{overlap:.3f}", r) for r in cells)])
    headings = [f"{model}, {text}: {context:,} / {budget:,}" for model, context, budget, text in places]
    note = "Prompt / budget in tokens; temperature 1, fp32. "
    return grid([*_FIRST, *headings], lines) + "\n" + note + file_note(FILE, content["evaluated"])


TABLES = {
    "retrieval-policies": Table(FILE, by_place, COMMAND),
}

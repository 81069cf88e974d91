"""The tables of docs/retrieval.md, and of budgets in docs/defaults.md."""

from collections.abc import Sequence

from scripts.benchmarks.common.markdown import (
    Columns,
    Record,
    Table,
    cell,
    file_note,
    grid,
    listing,
    origin,
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


# Expected times by budget and chunk; see ``budgets.py``.
BUDGETS_FILE = "budgets_{machine}.json"
BUDGETS_COMMAND = "python -m scripts.benchmarks budgets"
BUDGETS: Columns = {
    "model": "{model}", "texts": "{texts}", "context": "{context:,}", "budget": "{budget:,}",
    "chunk": "{chunk}",
    "accepted, T = 0": "{overlap[0]:.3f}", "0.6": "{overlap[1]:.3f}", "1": "{overlap[2]:.3f}",
    "level 1, ms": "{stage_ms[retrieval]:.1f}", "level 2, ms": "{stage_ms[chain]:.1f}",
    "expected ms/token, T = 0.6": lambda row: _time(row, 1), "T = 1": lambda row: _time(row, 2),
}  # fmt: skip
_TEMPERATURES = (0.0, 0.6, 1.0)


def _time(row: Record, number: int) -> str:
    """Bold where it is the least of its context."""
    shown = f"{row['expected_ms'][number]:.1f}"
    return f"**{shown}**" if row["least"][number] == row["expected_ms"][number] else shown


def by_size(content: Record) -> list[Record]:
    """A row for each size of a context, with its temperatures side by side."""
    sizes: dict[tuple[str, int, int, int], dict[float, Record]] = {}
    for row in content["rows"]:
        key = row["part"], row["context"], row["budget"], row["chunk"]
        sizes.setdefault(key, {})[row["temperature"]] = row
    found = []
    for key, by_temperature in sorted(sizes.items()):
        if not all(t in by_temperature for t in _TEMPERATURES):
            continue
        rows = [by_temperature[t] for t in _TEMPERATURES]
        both = {name: [row[name] for row in rows] for name in ("overlap", "expected_ms")}
        found.append(rows[0] | both | {"place": key[:2]})
    for row in found:
        alike = [other["expected_ms"] for other in found if other["place"] == row["place"]]
        row["least"] = [min(times) for times in zip(*alike, strict=True)]
    return found


def _told(part: Record) -> str:
    return f"{part['settings']['gathered']:g} tokens gathered in a round"


def _budgets(machine: str, command: str) -> Table:
    file = BUDGETS_FILE.format(machine=machine)

    def caption(content: Record, rows: Sequence[Record]) -> str:
        texts = sorted({text for row in rows for text in row["overlaps"]})
        return f"Texts: {', '.join(texts)}. " + origin(content, rows, file, _told)

    return Table(file, listing(BUDGETS, by_size, caption, left=1), command)


TABLES = {
    "retrieval-policies": Table(FILE, by_place, COMMAND),
    "budgets_cpu": _budgets("cpu", f"{BUDGETS_COMMAND} --contexts 16384 32768 65536"),
    "budgets_h200": _budgets("h200", f"{BUDGETS_COMMAND} --shapes 7b 8b --contexts 65536 122880"),
}

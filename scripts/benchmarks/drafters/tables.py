"""Tables of ``drafters``: accepted tokens by context and by kind of text, and milliseconds a token."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from scripts.benchmarks.common.markdown import Record, Table, file_note
from scripts.benchmarks.common.results import RESULTS, grouped
from scripts.benchmarks.sources.registry import KINDS
from scripts.benchmarks.texts.tables import origin_of, over_contexts
from triforce_tree.bench.tables import grid

# Of whichever card was at hand; acceptance does not depend on it. Measurements have a second suffix.
_MEASURED = [path.name for path in sorted(RESULTS.glob("drafters_h*.jsonl")) if path.stem.isidentifier()]
FILE = _MEASURED[-1] if _MEASURED else "drafters_h200.jsonl"
COMMAND = "python -m scripts.benchmarks drafters --texts texts.json.xz --drafters eagle3=FOLDER"
# Contexts whose acceptance is compared.
SHORT, LONG = 2048, 65_536


def _cells(rows: Sequence[Record], *names: str) -> dict[tuple[Any, ...], list[Record]]:
    return dict(sorted(grouped(rows, *names).items()))


def _median(rows: Sequence[Record], name: str) -> float:
    return statistics.median(row[name] for row in rows)


def _table(
    content: Record, file: str, ways: Sequence[str], column: str, columns: Sequence[Any],
    shown: Callable[[Sequence[Record]], str], kept: bool,
) -> str | None:  # fmt: skip
    """Returns a line for each model, way, temperature and drafter, with medians over the rows of a column.

    Args:
        column, columns: a field of the rows, and its values.
        shown: makes a cell of its rows.
        kept: whether to add the ratio of the longer to the shorter of two contexts.
    """
    rows = [row for row in content["rows"] if row["way"] in ways]
    here = [value for value in columns if any(row[column] == value for row in rows)]
    if not here:
        return None
    lines = []
    for (model, way, temperature, drafter), found in _cells(
        rows, "model", "way", "temperature", "drafter"
    ).items():
        by_column = {value: [row for row in found if row[column] == value] for value in here}
        line = [model, way, f"{temperature:g}", drafter]
        line += [shown(cell) if cell else "" for cell in by_column.values()]
        if kept:
            short, long = by_column.get(SHORT), by_column.get(LONG)
            ratio = (
                _median(long, "tokens_per_pass") / _median(short, "tokens_per_pass")
                if short and long
                else None
            )
            line.append("" if ratio is None else f"{ratio:.2f}")
        lines.append(line)
    named = [f"{value:,}" if isinstance(value, int) else value for value in here]
    headings = ["model", "way", "T", "drafter", *named, *(["65,536 to 2,048"] if kept else [])]
    return f"{grid(headings, lines, 4)}\n{_origin(content, rows, file)}"


def _origin(content: Record, rows: Sequence[Record], file: str) -> str:
    """Returns where the rows come from, once for each model."""
    models: dict[str, Record] = {}
    parts = {row["part"]: content["parts"][row["part"]] for row in rows}
    for row in rows:
        notes = models.setdefault(row["model"], parts[row["part"]] | {"notes": []})["notes"]
        notes += [note for note in parts[row["part"]]["notes"] if note not in notes]
    return f"{origin_of({'parts': models})} {file_note(file, parts)}"


def _tokens(rows: Sequence[Record]) -> str:
    return f"{_median(rows, 'tokens_per_pass'):.2f}"


def _speed(rows: Sequence[Record]) -> str:
    return f"{_median(rows, 'ms_per_token'):.2f} ({_median(rows, 'speedup'):.1f}x)"


def by_context(content: Record, file: str) -> str | None:
    """Returns tokens a pass by context, medians over texts."""
    contexts = sorted({row["context"] for row in content["rows"]})
    return _table(content, file, ("chain", "tree"), "context", contexts, _tokens, kept=True)


def by_kind(content: Record, file: str) -> str | None:
    """Returns tokens a pass by kind of text, medians over contexts."""
    return _table(content, file, ("chain", "tree"), "kind", KINDS, _tokens, kept=False)


def speed(content: Record, file: str) -> str | None:
    """Returns milliseconds a token and speed-ups with default settings, medians over texts."""
    contexts = sorted({row["context"] for row in content["rows"]})
    return _table(content, file, ("default",), "context", contexts, _speed, kept=False)


def plot_contexts(axis: Any, rows: list[Record]) -> None:
    """Plots tokens a pass by context for the model with the most contexts, over the texts of its longest one:
    a panel for each temperature, a colour for each drafter, dashed lines for chains.
    """
    contexts = {model: {row["context"] for row in found} for (model,), found in _cells(rows, "model").items()}
    model = max(contexts, key=lambda model: len(contexts[model]))
    longest = {row["text"] for row in rows if row["context"] == max(contexts[model])}
    mine = [row for row in rows if row["model"] == model and row["text"] in longest]
    drafters, panels = sorted({row["drafter"] for row in mine}), _cells(mine, "temperature")
    axes = axis.figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    axis.remove()
    for panel, ((temperature,), own) in zip(axes, panels.items(), strict=True):
        for (drafter, way), found in _cells(own, "drafter", "way").items():
            by_length = _cells(found, "context")
            medians = [_median(cell, "tokens_per_pass") for cell in by_length.values()]
            style, colour = "-" if way == "tree" else "--", f"C{drafters.index(drafter)}"
            label = drafter if way == "tree" else None
            panel.plot(
                [n for (n,) in by_length], medians, f"o{style}", color=colour, markersize=3, label=label
            )
        over_contexts(panel, own)
        panel.set_ylim(bottom=1)
        panel.set_title(f"{model}, T = {temperature:g}", fontsize=9)
    axes[0].set_ylabel(f"tokens a pass, medians of {len(longest)} texts")
    axes[-1].legend(fontsize=7, title="tree (dashed: chain)", title_fontsize=7)


def _alone(content: Record) -> list[Record]:
    return [row for row in content["rows"] if row["way"] in ("chain", "tree")]


PLOTS = {"drafters_by_context": (FILE, _alone, (8, 4.5, 0), plot_contexts)}
TABLES = {
    f"drafters_{name}": Table(FILE, partial(make, file=FILE), COMMAND)
    for name, make in (("context", by_context), ("kind", by_kind), ("speed", speed))
}

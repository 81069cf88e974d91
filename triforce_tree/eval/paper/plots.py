"""Plots of the paper's tables and figures: lines of this run, and the published points."""

from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

from triforce_tree.eval.paper import plan
from triforce_tree.eval.paper.plan import Line
from triforce_tree.eval.paper.published import items
from triforce_tree.eval.paper.tables import shown_items, sizes_of
from triforce_tree.eval.paper.values import of_cell, value
from triforce_tree.eval.results import Records

_ACROSS = 3
# Of every item that has one: (title, which of its lines), one plot each.
_PLOTS: dict[str, Sequence[tuple[str, Callable[[Line], bool]]]] = {
    "table-1": [("Table 1: acceptance by policy", lambda line: True)],
    "table-2": [
        ("Table 2: speed-up", lambda line: line.column == "speed-up"),
        ("Table 2: acceptance", lambda line: line.column == "acceptance"),
    ],
    "table-3": [("Table 3: speed-up, offloaded", lambda line: line.column == "speed-up")],
    "table-4": [("Table 4: batches, speed-up", lambda line: True)],
    "table-5": [("Table 5: speed-up", lambda line: True)],
    "table-7": [("Table 7: speed-up by new tokens", lambda line: True)],
    "table-8": [
        ("Table 8 (a): speed-up by gamma 1", lambda line: line.row.startswith("(a)")),
        ("Table 8 (b): speed-up by gamma 2", lambda line: line.row.startswith("(b)")),
    ],
    "figure-3": [("Figure 3 (b): acceptance by budget", lambda line: line.row.startswith("(b)"))],
    "figure-5": [("Figure 5: speed-up by context", lambda line: "limit" not in line.row)],
    "figure-6": [
        ("Figure 6 (a): speed-up by budget", lambda line: _is(line, "(a)", "speed-up")),
        ("Figure 6 (a): acceptance by budget", lambda line: _is(line, "(a)", "acceptance")),
        ("Figure 6 (b): speed-up by chunk", lambda line: _is(line, "(b)", "speed-up")),
        ("Figure 6 (b): acceptance by chunk", lambda line: _is(line, "(b)", "acceptance")),
        ("Figure 6 (c): tokens a pass by tree", lambda line: line.row.startswith("(c)")),
    ],
}


def png(records: Records) -> bytes | None:
    """One picture of all items of a run; None where nothing is measured."""
    from matplotlib.figure import Figure

    if not records.all:
        return None
    parts: list[Callable[[Any], None]] = []
    for name in shown_items(records):
        if name == "figure-3":
            parts += _attention(records)
        lines = plan.lines(name, sizes_of(records))
        for title, chosen in _PLOTS.get(name, ()):
            found = [line for line in lines if chosen(line)]
            if any(value(line, column, records) is not None for line in found for column in line.cells):
                parts.append(_bars(name, title, found, records))
    if not parts:
        return None
    down = -(-len(parts) // _ACROSS)
    figure = Figure(figsize=(6.2 * _ACROSS, 4.2 * down), layout="constrained")
    axes = figure.subplots(down, _ACROSS, squeeze=False).ravel()
    for axis in axes[len(parts) :]:
        axis.set_axis_off()
    for part, axis in zip(parts, axes, strict=False):
        part(axis)
    held = BytesIO()
    figure.savefig(held, format="png", dpi=100, metadata={"Software": None})
    return held.getvalue()


def _is(line: Line, part: str, column: str) -> bool:
    return line.row.startswith(part) and line.column == column


def _bars(item: str, title: str, lines: Sequence[Line], records: Records) -> Callable[[Any], None]:
    """Horizontal bars: published, this run by column."""
    columns = [c for c in (plan.HERE, plan.PAPER, plan.OURS) if any(c in line.cells for line in lines)]
    sources: dict[str, list[float | None]] = {
        "paper": [_published(item, line) for line in lines],
        **{c: [value(line, c, records) for line in lines] for c in columns},
    }
    known = {name: found for name, found in sources.items() if any(v is not None for v in found)}
    colours = {"paper": "C7", plan.HERE: "C0", plan.PAPER: "C0", plan.OURS: "C1"}

    def draw(axis: Any) -> None:
        height = 0.8 / max(1, len(known))
        for number, (name, found) in enumerate(known.items()):
            at = [n + number * height for n, v in enumerate(found) if v is not None]
            axis.barh(at, [v for v in found if v is not None], height, label=name, color=colours[name])
        one = len({line.column for line in lines}) == 1
        labels = [line.row if one else f"{line.row}: {line.column}" for line in lines]
        axis.set_yticks([n + 0.4 - height / 2 for n in range(len(lines))], labels, fontsize=6)
        axis.invert_yaxis()
        axis.set_title(title, fontsize=9)
        axis.legend(fontsize=6)

    return draw


def _published(item: str, line: Line) -> float | None:
    figure = items()[item].figure(line.row, line.column)
    return None if figure is None else figure.value


def _attention(records: Records) -> list[Callable[[Any], None]]:
    """Figure 3 (a), a bar a layer, and (c), a line a layer over new tokens; of the first prompt."""
    lines = [line for line in plan.lines("figure-3", sizes_of(records)) if line.figure == "recovered"]
    found = of_cell(records, lines[0].cells[plan.HERE])
    if not found:
        return []
    record = found[0]

    def sparse(axis: Any) -> None:
        axis.bar(range(len(record["recovered"])), record["recovered"])
        axis.axhline(0.96, color="C7", linestyle="--", label="paper: almost all layers above, 4K of 120K")
        axis.set_title(f"Figure 3 (a): attention recovered by {record['budget']:,} tokens", fontsize=9)
        axis.set(xlabel="layer", ylim=(0, 1))
        axis.legend(fontsize=6)

    def local(axis: Any) -> None:
        for layer, kept in enumerate(zip(*record["kept"], strict=True)):
            axis.plot(range(1, len(kept) + 1), kept, linewidth=0.9, label=f"layer {layer}")
        axis.set_title("Figure 3 (c): attention to the prompt kept", fontsize=9)
        axis.set(xlabel="new tokens", ylim=(0, 1))
        axis.legend(fontsize=5, ncols=4)

    return [sparse, local]

"""PNG plots of results files; they need matplotlib, which ``pip install 'triforce-tree[plot]'`` brings."""

import importlib.util
from collections.abc import Callable
from functools import partial
from io import BytesIO
from typing import Any

from triforce_tree.eval import needle
from triforce_tree.eval.paper import plots as paper_plots
from triforce_tree.eval.paper import tables as paper
from triforce_tree.eval.public.answers import OURS, PLAIN
from triforce_tree.eval.report import machine
from triforce_tree.eval.report.tables import answers_of, cells, speed_of
from triforce_tree.eval.results import Records


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def png(records: Records) -> bytes | None:
    """The plot of a results file; None where it has nothing to show."""
    from matplotlib.figure import Figure

    if records.settings.get("benchmark") == paper.BENCHMARK:
        return paper_plots.png(records)
    made: list[Callable[[Records, Any], float]] = [_speed, _answers, _needle, _tasks]
    made += [partial(_bars, view=view) for view in machine.VIEWS]
    parts = [part for part in made if part(records, None)]
    if not parts:
        return None
    figure = Figure(figsize=(8, 0.8 + sum(part(records, None) for part in parts)), layout="constrained")
    heights = [part(records, None) for part in parts]
    axes = figure.subplots(len(parts), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, axis in zip(parts, axes, strict=True):
        part(records, axis)
    held = BytesIO()
    figure.savefig(held, format="png", dpi=120, metadata={"Software": None})
    return held.getvalue()


def _speed(records: Records, axis: Any) -> float:
    """Milliseconds a token, a bar a method; returns inches, and draws where there is an axis."""
    rows = speed_of(records)
    if axis is not None:
        labels = [f"{r['method']}, {r['context']:,}, T={r['temperature']:g}" for r in rows]
        ours = ["C0" if r["method"].startswith("triforce") else "C7" for r in rows]
        bars = axis.barh(range(len(rows)), [r["ms_per_token"] for r in rows], color=ours)
        axis.bar_label(bars, fmt="%.2f", fontsize=7, padding=2)
        _named(axis, labels, "ms a token, decoding alone")
    return _inches(len(rows))


def _answers(records: Records, axis: Any) -> float:
    """Scores of all levels beside the target's own."""
    rows = answers_of(records)
    if axis is not None:
        for offset, by in ((-0.2, OURS), (0.2, PLAIN)):
            places = [at + offset for at in range(len(rows))]
            axis.barh(places, [r[by] or 0.0 for r in rows], 0.38, label=by)
        labels = [f"{r['length']:,}, T={r['temperature']:g}" for r in rows]
        _named(axis, labels, f"mean {records.settings.get('metric', 'score')}")
        axis.set_xlim(0, 1)
        axis.legend(fontsize=7)
    return _inches(2 * len(rows))


def _needle(records: Records, axis: Any) -> float:
    """Accuracy by length and depth, of the first way to decode."""
    found = [r for r in records.all if "depth" in r]
    if not found:
        return 0.0
    depths = sorted({r["depth"] for r in found})
    if axis is not None:
        lengths = sorted({r["length"] for r in found})
        needle.draw(axis, found, found[0]["through"], lengths, depths)
    return 1.5 + 0.4 * len(depths)


def _tasks(records: Records, axis: Any) -> float:
    """RULER's tasks by length."""
    rows = [(place, value) for place, value in cells(records).items() if place[1][0] == "task"]
    if axis is not None:
        labels = [", ".join(value for _, value in place) for place, _ in rows]
        axis.barh(range(len(rows)), [value["accuracy"] for _, value in rows])
        _named(axis, labels, "share of answers found")
        axis.set_xlim(0, 1)
    return _inches(len(rows))


def _bars(records: Records, axis: Any, view: machine.View) -> float:
    """A bar a row."""
    rows = view.drawn(records)
    if axis is not None:
        bars = axis.barh(range(len(rows)), [length for _, length in rows])
        axis.bar_label(bars, fmt="%.3g", fontsize=7, padding=2)
        _named(axis, [label for label, _ in rows], view.axis)
    return _inches(len(rows))


def _inches(bars: int) -> float:
    return 0.6 + 0.22 * bars if bars else 0.0


def _named(axis: Any, labels: list[str], what: str) -> None:
    axis.set_yticks(range(len(labels)), labels, fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel(what, fontsize=8)

"""Pictures of docs/benchmarks.md from docs/results/on_chip_h200.json."""

from pathlib import Path
from typing import Any

from markdown_tables import Record, rows_of
from on_chip_tables import HEADLINES, STAGES, setting


def plots(result: Record, folder: Path) -> list[Path]:
    """Pictures of what has been measured; the paths written."""
    import matplotlib

    matplotlib.use("Agg")
    made = []
    for name, draw in (
        ("on_chip_lengths", _plot_lengths),
        ("on_chip_levels", _plot_levels),
        ("on_chip_ablations", _plot_ablations),
    ):
        figure = draw(result)
        if figure is not None:
            figure.tight_layout()
            figure.savefig(folder / f"{name}.png", dpi=120)
            made.append(folder / f"{name}.png")
    return made


def _plot_lengths(result: Record) -> Any:
    import matplotlib.pyplot as plt

    found = sorted(rows_of(result, "lengths"), key=lambda r: r["context"])
    if not found:
        return None
    figure, axis = plt.subplots(figsize=(7, 4))
    for temperature in sorted({r["temperature"] for r in found}):
        mine = [r for r in found if r["temperature"] == temperature and r["speedup"]]
        axis.plot(
            [r["context"] for r in mine], [r["speedup"] for r in mine], "o-", label=f"T={temperature:g}"
        )
    axis.set_xscale("log", base=2)
    ticks = sorted({r["context"] for r in found})
    axis.set_xticks(ticks, [f"{n / 1024:g}K" for n in ticks], fontsize=7)
    axis.axhline(1, color="grey", linewidth=0.8)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("prompt, tokens")
    axis.set_ylabel("speed-up over plain decoding")
    axis.set_title(f"{found[0]['shape']}, batch 1")
    axis.legend()
    return figure


def _plot_levels(result: Record) -> Any:
    """A bar a pass: time in each level, its roof in the darker part of it."""
    import matplotlib.pyplot as plt

    found = rows_of(result, *HEADLINES)
    if not found:
        return None
    figure, axis = plt.subplots(figsize=(9, 0.5 * len(found) + 2))
    for at, row in enumerate(found):
        left = 0.0
        for index, name in enumerate(STAGES):
            stage = row["stages"].get(name)
            if stage is None:
                continue
            took, roof = stage["runs"] * stage["ms"], stage["runs"] * stage["roof_ms"]
            label = STAGES[name] if at == 0 else None
            axis.barh(at, took, 0.7, left=left, color=f"C{index}", alpha=0.45, label=label)
            axis.barh(at, roof, 0.7, left=left, color=f"C{index}")
            left += took
        rest = row["pass_ms"] - left
        if rest > 0:
            axis.barh(at, rest, 0.7, left=left, color="lightgrey")
    names = [f"{r['shape']}\n{r['batch']} x {r['context']:,}, T={r['temperature']:g}" for r in found]
    axis.set_yticks(range(len(found)), names, fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel("ms of a pass; full colour: the roof of each part; grey: the host")
    axis.legend(fontsize=7)
    return figure


def _plot_ablations(result: Record) -> Any:
    import matplotlib.pyplot as plt

    parts = {p: rows_of(result, p) for p in ("ablations-7b", "ablations-8b")}
    parts = {p: rows for p, rows in parts.items() if rows}
    if not parts:
        return None
    most = max(len(rows) for rows in parts.values())
    figure, axes = plt.subplots(1, len(parts), figsize=(6 * len(parts), 0.28 * most + 1.5), squeeze=False)
    for axis, rows in zip(axes[0], parts.values(), strict=True):
        colours = ["C1" if not r["setting"] else "C0" for r in rows]
        axis.barh(range(len(rows)), [r["speedup"] or 0.0 for r in rows], color=colours)
        axis.set_yticks(range(len(rows)), [setting(r["setting"]) for r in rows], fontsize=7)
        axis.invert_yaxis()
        axis.set_xlabel("speed-up over plain decoding")
        axis.set_title(rows[0]["shape"], fontsize=9)
    return figure

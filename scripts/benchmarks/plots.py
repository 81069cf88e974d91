"""Plots of docs/measurements.md and docs/kernel.md from the results files; needs matplotlib."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

from scripts.benchmarks.attention import tables as attention
from scripts.benchmarks.cards import tables as cards
from scripts.benchmarks.common.markdown import Record, rows_of
from scripts.benchmarks.common.results import content_at
from scripts.benchmarks.on_chip.tables import FILE, HEADLINES, STAGES
from scripts.benchmarks.texts import tables as texts

matplotlib.use("Agg")

import matplotlib.pyplot as plt


def draw(folder: Path) -> list[Path]:
    """Plots of what has been measured; the paths written."""
    made = []
    for name, (file, rows, size, plot) in PLOTS.items():
        found = rows(content_at(folder / file)) if (folder / file).exists() else []
        if found:
            figure, axis = plt.subplots(figsize=(size[0], size[1] + size[2] * len(found)))
            plot(axis, found)
            figure.tight_layout()
            figure.savefig(folder / f"{name}.png", dpi=120)
            plt.close(figure)
            made.append(folder / f"{name}.png")
    return made


def lengths(axis: Any, rows: list[Record]) -> None:
    """Plots the speed-up over the length of the prompt."""
    for temperature in sorted({r["temperature"] for r in rows}):
        mine = [r for r in rows if r["temperature"] == temperature and r["speedup"]]
        places, gains = [r["context"] for r in mine], [r["speedup"] for r in mine]
        axis.plot(places, gains, "o-", label=f"T={temperature:g}")
    axis.set_xscale("log", base=2)
    ticks = sorted({r["context"] for r in rows})
    axis.set_xticks(ticks, [f"{n / 1024:g}K" for n in ticks], fontsize=7)
    axis.axhline(1, color="grey", linewidth=0.8)
    axis.set_ylim(bottom=0)
    axis.set(xlabel="prompt, tokens", ylabel="speed-up over plain decoding")
    axis.set_title(f"{rows[0]['shape']}, batch 1")
    axis.legend()


def levels(axis: Any, rows: list[Record]) -> None:
    """A bar a pass: time in each level, its roof in the darker part of it."""
    for at, row in enumerate(rows):
        left = 0.0
        for index, name in ((i, n) for i, n in enumerate(STAGES) if n in row["stages"]):
            stage = row["stages"][name]
            took, roof = stage["runs"] * stage["ms"], stage["runs"] * stage["roof_ms"]
            label = STAGES[name] if at == 0 else None
            axis.barh(at, took, 0.7, left=left, color=f"C{index}", alpha=0.45, label=label)
            axis.barh(at, roof, 0.7, left=left, color=f"C{index}")
            left += took
        axis.barh(at, max(0.0, row["pass_ms"] - left), 0.7, left=left, color="lightgrey")
    names = [f"{r['shape']}\n{r['batch']} x {r['context']:,}, T={r['temperature']:g}" for r in rows]
    axis.set_yticks(range(len(rows)), names, fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel("ms of a pass; full colour: the roof of each part; grey: the host")
    axis.legend(fontsize=7)


def tree_attention(axis: Any, rows: list[Record]) -> None:
    """Plots percent of the roof, ours beside the peers."""
    names = ["ours", *(name for name in attention.SHORT if any(name in row["peers"] for row in rows))]
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        took = [row["ours_us"] if name == "ours" else row["peers"].get(name) for row in rows]
        known = [at for at, us in enumerate(took) if us is not None]
        heights = [100 * rows[at]["roof_us"] / took[at] for at in known]
        axis.bar([at + index * width for at in known], heights, width, label=name)
    batches = [f" x{r['batch']}" if r["batch"] > 1 else "" for r in rows]
    labels = [f"{r['hq']}/{r['hkv']}\nL={r['l']}\nT={r['t']}{b}" for r, b in zip(rows, batches, strict=True)]
    axis.set_xticks([i + 0.4 - width / 2 for i in range(len(rows))], labels, fontsize=8)
    axis.set_ylabel("percent of the roof")
    axis.set_title("Tree attention, one layer, bf16, head_dim 128, one H200")
    axis.legend(fontsize=7)


# Name -> results file, its rows, inches (width, height, height for each row), plot.
PLOTS: dict[str, tuple[str, Callable[[Record], list[Record]], tuple[float, float, float], Any]] = {
    "on_chip_lengths": (
        FILE, lambda c: sorted(rows_of(c, "lengths"), key=lambda r: r["context"]), (7, 4, 0), lengths
    ),
    "on_chip_levels": (FILE, lambda c: rows_of(c, *HEADLINES), (9, 2, 0.5), levels),
    "tree_attention_h200": (attention.FILE, lambda c: c["rows"], (11, 4.5, 0), tree_attention),
    **texts.PLOTS, **cards.PLOTS,
}  # fmt: skip

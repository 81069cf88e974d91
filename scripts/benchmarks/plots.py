"""Plots of the pages in docs/results from the results files; needs matplotlib."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

from scripts.benchmarks.attention import tables as attention
from scripts.benchmarks.cards import tables as cards
from scripts.benchmarks.common.markdown import Record
from scripts.benchmarks.common.results import content_at
from scripts.benchmarks.drafters import tables as drafters
from scripts.benchmarks.requests import tables as requests
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
    "tree_attention_h200": (attention.FILE, lambda c: c["rows"], (11, 4.5, 0), tree_attention),
    **texts.PLOTS, **cards.PLOTS, **requests.PLOTS, **drafters.PLOTS,
}  # fmt: skip

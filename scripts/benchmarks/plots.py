"""Pictures of docs/benchmarks.md and docs/kernel.md from the results files; needs matplotlib."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

from scripts.benchmarks.attention import tables as attention
from scripts.benchmarks.common.markdown import Record, rows_of
from scripts.benchmarks.on_chip.tables import FILE, HEADLINES, STAGES, setting

matplotlib.use("Agg")

import matplotlib.pyplot as plt


def draw(folder: Path) -> list[Path]:
    """Pictures of what has been measured; the paths written."""
    made = []
    for name, (file, make) in PICTURES.items():
        if not (folder / file).exists():
            continue
        figure = make(json.loads((folder / file).read_text(encoding="utf-8")))
        if figure is not None:
            figure.tight_layout()
            figure.savefig(folder / f"{name}.png", dpi=120)
            plt.close(figure)
            made.append(folder / f"{name}.png")
    return made


def lengths(content: Record) -> Any:
    """Speed-up over the length of the prompt."""
    found = sorted(rows_of(content, "lengths"), key=lambda r: r["context"])
    if not found:
        return None
    figure, axis = plt.subplots(figsize=(7, 4))
    for temperature in sorted({r["temperature"] for r in found}):
        mine = [r for r in found if r["temperature"] == temperature and r["speedup"]]
        places, gains = [r["context"] for r in mine], [r["speedup"] for r in mine]
        axis.plot(places, gains, "o-", label=f"T={temperature:g}")
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


def levels(content: Record) -> Any:
    """A bar a pass: time in each level, its roof in the darker part of it."""
    found = rows_of(content, *HEADLINES)
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
        if (rest := row["pass_ms"] - left) > 0:
            axis.barh(at, rest, 0.7, left=left, color="lightgrey")
    names = [f"{r['shape']}\n{r['batch']} x {r['context']:,}, T={r['temperature']:g}" for r in found]
    axis.set_yticks(range(len(found)), names, fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel("ms of a pass; full colour: the roof of each part; grey: the host")
    axis.legend(fontsize=7)
    return figure


def ablations(content: Record) -> Any:
    """Speed-up of each change of one setting."""
    parts = [rows for p in ("ablations-7b", "ablations-8b") if (rows := rows_of(content, p))]
    if not parts:
        return None
    size = (6 * len(parts), 0.28 * max(map(len, parts)) + 1.5)
    figure, axes = plt.subplots(1, len(parts), figsize=size, squeeze=False)
    for axis, rows in zip(axes[0], parts, strict=True):
        colours = ["C1" if not r["setting"] else "C0" for r in rows]
        axis.barh(range(len(rows)), [r["speedup"] or 0.0 for r in rows], color=colours)
        axis.set_yticks(range(len(rows)), [setting(r["setting"]) for r in rows], fontsize=7)
        axis.invert_yaxis()
        axis.set_xlabel("speed-up over plain decoding")
        axis.set_title(rows[0]["shape"], fontsize=9)
    return figure


def tree_attention(content: Record) -> Any:
    """Percent of the roof, ours beside the peers."""
    rows = content["rows"]
    names = ["ours", *(name for name in attention.SHORT if any(name in row["peers"] for row in rows))]
    figure, axis = plt.subplots(figsize=(11, 4.5))
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        took = [row["ours_us"] if name == "ours" else row["peers"].get(name) for row in rows]
        known = [at for at, us in enumerate(took) if us is not None]
        heights = [100 * rows[at]["roof_us"] / took[at] for at in known]
        axis.bar([at + index * width for at in known], heights, width, label=name)
    labels = [
        f"{r['hq']}/{r['hkv']}\nL={r['l']}\nT={r['t']}" + (f" x{r['batch']}" if r["batch"] > 1 else "")
        for r in rows
    ]
    axis.set_xticks([i + 0.4 - width / 2 for i in range(len(rows))], labels, fontsize=8)
    axis.set_ylabel("percent of the roof")
    axis.set_title("Tree attention, one layer, bf16, head_dim 128, one H200")
    axis.legend(fontsize=7)
    return figure


PICTURES: dict[str, tuple[str, Callable[[Record], Any]]] = {
    "on_chip_lengths": (FILE, lengths),
    "on_chip_levels": (FILE, levels),
    "on_chip_ablations": (FILE, ablations),
    "tree_attention_h200": (attention.FILE, tree_attention),
}

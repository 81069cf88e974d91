"""The table and the picture of docs/several_cards.md from docs/results/sequence_parallel_h200x2.json."""

import math
from typing import Any

from scripts.benchmarks.common.markdown import Columns, Record, Table, listing, noted

FILE = "sequence_parallel_h200x2.json"
POSITION = "by position"
COMMAND = "torchrun --nproc-per-node 2 -m scripts.benchmarks split"
COLUMNS: Columns = {
    "model": "{shape}", "tokens": "{context:,}", "split": "{way}", "cards": "{cards}",
    "**plain, ms**": "**{ms[plain]:.2f}**", "level 2, ms": "{ms[target]:.2f}",
    "level 1, ms": "{ms[retrieval]:.2f}", "KV a card, GiB": lambda row: f"{row['kv_bytes'] / 2**30:.1f}",
    "collectives a token": "?{collectives[plain][calls]}",
    "KB a token": lambda row: f"{row['collectives'].get('plain', {}).get('bytes', 0) / 1e3:,.0f}",
    "merging, ms": "?{merge_ms[plain]:.2f}",
}  # fmt: skip
_NOTE = (
    "{hardware} with NVLink, bf16, torch {versions[torch]}, CUDA graphs with NCCL's collectives in them. KV "
    "slots hold random numbers; a pass of level 2 has the tokens of gamma {options[gamma]} with runner-ups. "
)
# Bytes a second between cards of one machine and of two (NVLink 4, InfiniBand NDR); cards of a machine.
_LINKS, _MACHINE = (450e9, 50e9), 8


def measured(content: Record) -> list[Record]:
    rows = [row for row in content["rows"] if "ms" in row]
    return sorted(rows, key=lambda row: (row["shape"], row["context"], row["way"]))


def projected(rows: list[Record], cards: int) -> dict[str, float]:
    """Milliseconds of one plain token after the longer text on so many cards; see docs/several_cards.md.

    Tree Attention (arXiv 2408.04093, section 5) merges partial results in log2(cards) steps, of which each
    takes what two cards were measured to take; Ring Attention passes every card's keys and values to all
    others in cards - 1 steps. What does not grow with the text is taken to stay as it is.

    Args:
        rows: of a shorter and a longer text, by position.
    """
    (shorter, before), (longer, local) = (
        (row, row["ms"]["plain"] - row["merge_ms"]["plain"]) for row in rows
    )
    reading = (local - before) * longer["context"] / (longer["context"] - shorter["context"])
    own = local - reading + reading * longer["cards"] / cards
    merge, share = longer["merge_ms"]["plain"], longer["kv_bytes"] * longer["cards"] / cards
    return {
        "Tree Attention": own + merge * math.log2(cards),
        "Ring Attention": own + (cards - 1) * (1e3 * share / _LINKS[cards > _MACHINE] + merge),
    }


def shortest_and_longest(content: Record) -> list[Record]:
    """Rows by position of one model; none where fewer than two are measured."""
    rows = [row for row in measured(content) if row["way"] == POSITION]
    rows = sorted((row for row in rows if row["shape"] == rows[0]["shape"]), key=lambda row: row["context"])
    return [rows[0], rows[-1]] if len(rows) > 1 else []


def plot_projection(axis: Any, rows: list[Record]) -> None:
    """Milliseconds of a token over the number of cards."""
    row = rows[-1]
    cards = [2, 4, 8, 16, 32, 64, 128]
    for name in projected(rows, 2):
        axis.plot(cards, [projected(rows, n)[name] for n in cards], "o-", label=name)
    axis.plot(cards[:1], [row["ms"]["plain"]], "k*", markersize=11, label="measured")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(cards, [str(n) for n in cards])
    axis.set(xlabel="cards, 8 to a machine", ylabel="ms a token, plain decoding")
    axis.set_title(f"{row['shape']}, {row['context']:,} tokens: projected from two cards", fontsize=9)
    axis.legend(fontsize=8)


TABLES = {"sequence_parallel": Table(FILE, listing(COLUMNS, measured, noted(_NOTE, FILE), left=3), COMMAND)}
PLOTS = {"sequence_parallel_projection": (FILE, shortest_and_longest, (6, 3.6, 0), plot_projection)}

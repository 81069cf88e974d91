"""The table and the picture of docs/several_cards.md from docs/results/sequence_parallel_h200x2.jsonl."""

import math
from collections.abc import Iterable
from typing import Any

from scripts.benchmarks.common.markdown import Columns, Record, Table, listing, noted

FILE = "sequence_parallel_h200x2.jsonl"
POSITION, ONE, OFFLOADED = "by position", "one card", "one card, offloaded"
COMMAND = "torchrun --nproc-per-node 2 -m scripts.benchmarks split"
COLUMNS: Columns = {
    "model": "{shape}", "tokens": "{context:,}", "split": "{way}", "cards": "{cards}",
    "**plain, ms**": "**{ms[plain]:.2f}**", "level 2, ms": "{ms[target]:.2f}",
    "level 1, ms": "{ms[retrieval]:.2f}", "KV a card, GiB": lambda row: f"{row['kv_bytes'] / 2**30:.1f}",
    "collectives a token": "?{collectives[plain][calls]}",
    "KB a token": lambda row: f"{row['collectives'].get('plain', {}).get('bytes', 0) / 1e3:,.0f}",
    "merging, ms": "?{merge_ms[plain]:.2f}",
    "passing K and V on, ms": lambda row: f"{_ring_ms(row, row['cards']):,.1f}" if "ring" in row else "",
}  # fmt: skip
_NOTE = (
    "{hardware} with NVLink, bf16, torch {versions[torch]}, CUDA graphs with the collectives in them. KV "
    "slots hold random numbers; a pass of level 2 has a chain of {options[gamma]} tokens and a tree. "
    "Collectives of the layers; the logits' all-gather comes on top. "
)
# Bytes a second between cards of one machine and of two (NVLink 4, InfiniBand NDR); cards of a machine.
_LINKS, _MACHINE = (450e9, 50e9), 8


TEXTS: Columns = {
    "model": "{shape}", "tokens": "{context:,}", "split": "{way}", "cards": "{cards}", "text": "{text}",
    "**ms a token**": "**{ms_per_token:.2f}**", "plain decoding": "{plain_ms_per_token:.2f}",
    "speed-up": "{speedup:.2f}x", "tokens a pass": "{tokens_per_pass:.1f}",
    "speed-up kept": "?{kept:pct}", "prefill, s": "{prefill_seconds:.1f}",
}  # fmt: skip


def decoded(content: Record) -> list[Record]:
    """Returns a row for each text; ``kept`` is its speed-up over that on one card."""
    rows = [row | text for row in _ordered(content["rows"]) for text in row.get("texts", ())]
    alone = {_text_key(row): row["speedup"] for row in rows if row["way"] == ONE}
    return [row | {"kept": row["speedup"] / alone[_text_key(row)]} if _text_key(row) in alone else row
            for row in rows]  # fmt: skip


def _text_key(row: Record) -> tuple[Any, ...]:
    return row["shape"], row["context"], row["text"]


def _ring_ms(row: Record, cards: int) -> float:
    """Returns milliseconds of a token in which Ring Attention passes keys and values on, at the measured
    rate.
    """
    share = row["ring"]["ms"] * row["cards"] / cards
    return float((cards - 1) * share)


def measured(content: Record) -> list[Record]:
    return _ordered(row for row in content["rows"] if "ms" in row)


def _ordered(rows: Iterable[Record]) -> list[Record]:
    return sorted(rows, key=lambda row: (row["shape"], row["context"], row["way"]))


def projected(rows: list[Record], cards: int) -> dict[str, float]:
    """Returns milliseconds of one plain token after the longer text on so many cards; see
    docs/several_cards.md.

    Tree Attention (arXiv 2408.04093, section 5) merges partial results in log2(cards) steps, of which each
    takes what two cards were measured to take; Ring Attention passes every card's keys and values to all
    others in cards - 1 steps, within a machine at the measured rate if there is one. What does not grow with
    the text is taken to stay as it is.

    Args:
        rows: of a shorter and a longer text, by position.
    """
    (shorter, before), (longer, local) = (
        (row, row["ms"]["plain"] - row["merge_ms"]["plain"]) for row in rows
    )
    reading = (local - before) * longer["context"] / (longer["context"] - shorter["context"])
    own = local - reading + reading * longer["cards"] / cards
    merge, share = longer["merge_ms"]["plain"], longer["kv_bytes"] * longer["cards"] / cards
    passing = (cards - 1) * 1e3 * share / _LINKS[cards > _MACHINE]
    if "ring" in longer and cards <= _MACHINE:
        passing = _ring_ms(longer, cards)
    return {
        "Tree Attention": own + merge * math.log2(cards),
        "Ring Attention": own + passing + (cards - 1) * merge,
    }


def shortest_and_longest(content: Record) -> list[Record]:
    """Returns rows by position of the model with the longest text; none where it has a single one."""
    rows = sorted((r for r in measured(content) if r["way"] == POSITION), key=lambda row: row["context"])
    rows = [row for row in rows if row["shape"] == rows[-1]["shape"]]
    return [rows[0], rows[-1]] if len(rows) > 1 else []


def plot_projection(axis: Any, rows: list[Record]) -> None:
    """Plots milliseconds of a token over the number of cards."""
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


_TEXTS_NOTE = (
    "Greedy, default settings with three levels, the prompt prefilled; plain decoding in the same cache. "
    "{hardware}, bf16. Speed-up kept: of that on one card. "
)
TABLES = {
    "sequence_parallel": Table(FILE, listing(COLUMNS, measured, noted(_NOTE, FILE), left=3), COMMAND),
    "sequence_parallel_texts": Table(
        FILE, listing(TEXTS, decoded, noted(_TEXTS_NOTE, FILE), left=3), f"{COMMAND} --texts"
    ),
}
PLOTS = {"sequence_parallel_projection": (FILE, shortest_and_longest, (6, 3.6, 0), plot_projection)}

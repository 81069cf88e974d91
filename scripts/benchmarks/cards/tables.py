"""The page docs/results/several_cards.md from docs/results/sequence_parallel_h200x2.jsonl."""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from scripts.benchmarks.common.markdown import Caption, Columns, Record, Table, listing, noted
from scripts.benchmarks.common.results import RESULTS, content_at

FILE = "sequence_parallel_h200x2.jsonl"
POSITION, ONE, OFFLOADED = "by position", "one card", "one card, offloaded"
COMMAND = "torchrun --nproc-per-node 2 -m scripts.benchmarks split"
# Numbers of cards beyond two that a file may have been measured on.
_MORE_CARDS = (4, 8)
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


# Shown where a row has them: by the communication model.
PREDICTED: Columns = {
    "plain, predicted": "?{predicted_ms[plain]:.2f}", "level 2, predicted": "?{predicted_ms[target]:.2f}",
    "merging, predicted": "?{each[plain][merge][predicted_ms]:.2f}",
}  # fmt: skip
TEXTS: Columns = {
    "model": "{shape}", "tokens": "{context:,}", "split": "{way}", "cards": "{cards}", "text": "{text}",
    "**ms a token**": "**{ms_per_token:.2f}**", "plain decoding": "{plain_ms_per_token:.2f}",
    "speed-up": "{speedup:.2f}x", "tokens a pass": "{tokens_per_pass:.1f}",
    "speed-up kept": "?{kept:pct}", "prefill, s": "{prefill_seconds:.1f}",
}  # fmt: skip


def file_of(cards: int) -> str:
    """Returns the name of the file with measurements on so many cards; one card is beside two."""
    return FILE.replace("x2", f"x{max(2, cards)}")


def with_more_cards(content: Record, folder: Path = RESULTS) -> Record:
    """Returns the content of the file of two cards together with those of more cards, where they exist."""
    files = [folder / file_of(cards) for cards in _MORE_CARDS]
    more = [content_at(file) for file in files if file.exists()]
    parts = {name: part for each in (content, *more) for name, part in each["parts"].items()}
    return content | {"parts": parts, "rows": [row for each in (content, *more) for row in each["rows"]]}


def figures(rows: Sequence[Record], alone: Sequence[Record]) -> list[Record]:
    """Returns a record for each time in these rows: {machine, ranks, split, shape, context, what, ms,
    efficiency, predicted_ms}, and calls and bytes of a collective.

    ``efficiency`` is the time on one card, divided by the number of ranks and by the time on them; None where
    one card has no such time. ``predicted_ms`` is None where there is no model of the time.

    Args:
        alone: rows among which those of one card are.
    """
    one = {(row["shape"], row["context"]): _times(row) for row in alone if row["way"] == ONE}
    found = []
    for row in rows:
        # The first rows name no machine.
        about = {"machine": row.get("machine", "h200"), "ranks": row["cards"], "split": row["way"]}
        about |= {"shape": row["shape"], "context": row["context"]}
        base, predicted = one.get((row["shape"], row["context"]), {}), row.get("predicted_ms", {})
        for what, ms in _times(row).items():
            efficiency = base[what] / row["cards"] / ms if what in base else None
            known = {"ms": ms, "efficiency": efficiency, "predicted_ms": predicted.get(what)}
            found.append({**about, "what": what, **known})
        for stage, each in row.get("each", {}).items():
            found += [
                {**about, "what": f"{name}, {stage}", "efficiency": None, **one_kind}
                for name, one_kind in each.items()
            ]
    return found


def _times(row: Record) -> dict[str, float]:
    """Returns milliseconds by what was timed."""
    times = dict(row.get("ms", {}))
    for text in row.get("texts", ()):
        times[f"decoding of {text['text']}"] = text["ms_per_token"]
        times[f"plain decoding of {text['text']}"] = text["plain_ms_per_token"]
        times[f"prefill of {text['text']}"] = 1e3 * text["prefill_seconds"]
    return times


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
    return sorted(rows, key=lambda row: (row["shape"], row["context"], row["cards"], row["way"]))


def projected(rows: list[Record], cards: int) -> dict[str, float]:
    """Returns milliseconds of one plain token after the longer text on so many cards.

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
    """Returns the rows by position on two cards of the model with the longest text: of its shortest text and
    of its longest, then that of the longest on more cards; none where there is a single one.
    """
    every = [row for row in measured(with_more_cards(content)) if row["way"] == POSITION]
    rows = sorted((row for row in every if row["cards"] == 2), key=lambda row: row["context"])
    rows = [row for row in rows if row["shape"] == rows[-1]["shape"]]
    if len(rows) < 2:
        return []
    about = rows[-1]["shape"], rows[-1]["context"]
    more = [row for row in every if row["cards"] > 2 and (row["shape"], row["context"]) == about]
    return [rows[0], rows[-1], *more]


def plot_projection(axis: Any, rows: list[Record]) -> None:
    """Plots milliseconds of a token over the number of cards."""
    rows, measurements = rows[:2], rows[1:]
    row = rows[-1]
    cards = [2, 4, 8, 16, 32, 64, 128]
    for name in projected(rows, 2):
        axis.plot(cards, [projected(rows, n)[name] for n in cards], "o-", label=name)
    times = [each["ms"]["plain"] for each in measurements]
    axis.plot([each["cards"] for each in measurements], times, "k*", markersize=11, label="measured")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(cards, [str(n) for n in cards])
    axis.set(xlabel="cards, 8 to a machine", ylabel="ms a token, plain decoding")
    axis.set_title(f"{row['shape']}, {row['context']:,} tokens: projected from two cards", fontsize=9)
    axis.legend(fontsize=8)


_TEXTS_NOTE = (
    "Greedy, default settings with three levels, the prompt prefilled; plain decoding in the same cache. "
    "{hardware}, bf16. "
)


def _columns(content: Record) -> Columns:
    return {**COLUMNS, **(PREDICTED if any("predicted_ms" in row for row in measured(content)) else {})}


def _noted(template: str) -> Caption:
    def caption(content: Record, rows: Sequence[Record]) -> str:
        files = dict.fromkeys(file_of(row["cards"]) for row in rows)
        return noted(template, "`, `docs/results/".join(files))(content, rows)

    return caption


def _of_all_cards(make: Callable[[Record], str | None]) -> Callable[[Record], str | None]:
    return lambda content: make(with_more_cards(content))


TABLES = {
    "sequence_parallel": Table(
        FILE, _of_all_cards(listing(_columns, measured, _noted(_NOTE), left=3)), COMMAND
    ),
    "sequence_parallel_texts": Table(
        FILE,
        _of_all_cards(listing(TEXTS, decoded, _noted(_TEXTS_NOTE), left=3)),
        f"{COMMAND} --texts",
    ),
}
PLOTS = {"sequence_parallel_projection": (FILE, shortest_and_longest, (6, 3.6, 0), plot_projection)}

"""Speed by card, model and length, and a few of these rows for README.

Medians over texts of all kinds, with default settings. Greedy texts are left out: those of a small model
repeat themselves, which flatters every drafter.
"""

from collections.abc import Sequence

from scripts.benchmarks.common.markdown import Columns, Record, Table, file_named, listing
from scripts.benchmarks.common.results import PAIR_VOCABULARY, RESULTS, content_at
from scripts.benchmarks.texts import tables as texts
from scripts.benchmarks.texts.real_model import PAIR_SHAPE

SPEEDS: Columns = {
    "card": "{card}", "size of model": "{size}", "prompt, tokens": "{context:,}", "texts": "{what}",
    "T": "{temperature:g}", "ms a token": "**{ms_per_token:.1f}**",
    "plain decoding": "{plain_ms_per_token:,.1f}",
    "speed-up": "**{median:.1f}x** ({lowest:.1f}x to {highest:.1f}x)",
    "repeated 8-grams": "{repeated_8grams:pct}",
}  # fmt: skip
# README's columns, and its rows: what a card begins with, a size, a length; all at ``_TEMPERATURE`` or above.
FRONT: Columns = {
    "card": "{card}", "size of model": "{size}", "prompt, tokens": "{context:,}",
    "ms a token": "**{ms_per_token:.1f}**", "plain decoding": "{plain_ms_per_token:,.1f}",
    "speed-up": "**{median:.1f}x** ({lowest:.1f}x to {highest:.1f}x)",
}  # fmt: skip
_FRONT = [
    ("NVIDIA H200", "Llama-3.1-8B", 122_880),
    ("NVIDIA H200 limited", "Llama-2-7B", 122_880),
    ("none", "the embedded pair", 16_384),
    ("none", "SmolLM2-135M, with a draft", 4096),
]
_SIZES = {
    "llama-2-7b inflated": "Llama-2-7B", "llama-3.1-8b inflated": "Llama-3.1-8B",
    "llama-2-13b inflated": "Llama-2-13B", "embedded pair": "the embedded pair",
    "SmolLM2-135M-Instruct.Q4_1, llama-3.1-8b inflated": "SmolLM2-135M, widened to Llama-3.1-8B",
    "SmolLM2-135M-Instruct.Q4_1, YaRN to 32,768, llama-3.1-8b inflated":
        "SmolLM2-135M with YaRN, widened to Llama-3.1-8B",
    "SmolLM2-135M-Instruct.Q4_1": "SmolLM2-135M, with a draft",
    "SmolLM2-135M-Instruct.Q4_1, YaRN to 32,768": "SmolLM2-135M with YaRN, with a draft",
    "SmolLM2-135M-Instruct.Q4_1, no draft": "SmolLM2-135M, without a draft",
}  # fmt: skip
# Shorter prompts have one temperature in the table, and these lengths.
_TEMPERATURE = 0.6
_CONTEXTS, _CPU_CONTEXTS = (4096, 16_384, 65_536), (4096, 16_384)


def speed_rows(any_text: Record) -> list[Record]:
    """Returns medians over texts by card, size and length; ``origin`` is file, part and header."""
    long = _sampled(texts.ANY_TEXT, any_text)
    sizes = {r["model"] for r in long}
    grid = _sampled(texts.NEVER_SLOWER, content_at(RESULTS / texts.NEVER_SLOWER))
    shorter = [
        r for r in grid
        if r["model"] in sizes and r["context"] in _CONTEXTS and r["temperature"] == _TEMPERATURE
    ]  # fmt: skip
    real = _others(_sampled(texts.REAL_MODEL, content_at(RESULTS / texts.REAL_MODEL)))
    rows = sorted([*shorter, *long, *real], key=_place)
    on_cpu = _sampled(texts.NEVER_SLOWER_CPU, content_at(RESULTS / texts.NEVER_SLOWER_CPU))
    on_cpu = [r for r in on_cpu if r["context"] in _CPU_CONTEXTS]
    on_cpu += _others(_sampled(texts.REAL_MODEL_CPU, content_at(RESULTS / texts.REAL_MODEL_CPU)))
    return rows + [r | {"card": f"none: {r['card']}"} for r in on_cpu]


def front_rows(any_text: Record) -> list[Record]:
    """Returns a row of each kind of :func:`speed_rows`, at its lowest temperature."""
    rows = speed_rows(any_text)
    found = []
    for card, size, context in _FRONT:
        same = [
            r for r in rows
            if r["size"] == size and r["context"] == context and r["card"].startswith(card)
            and (" limited" in r["card"]) == (" limited" in card)
        ]  # fmt: skip
        found += sorted(same, key=lambda r: float(r["temperature"]))[:1]
    return found


def front_note(any_text: Record, rows: Sequence[Record]) -> str:
    """Returns the temperatures of the rows, and the files with the commits that they were measured with."""
    by_temperature = ", ".join(f"{t:g}" for t in sorted({r["temperature"] for r in rows}))
    return (
        f"Sampled at temperatures of {by_temperature}. The commit beside each file is the one that was "
        f"measured; figures of other code may differ. From {_files_of(rows)}.\n"
    )


def _files_of(rows: Sequence[Record]) -> str:
    """Returns the files of the rows, each with commits and dates."""
    files: dict[str, dict[str, Record]] = {}
    for r in rows:
        file, part, header = r["origin"]
        files.setdefault(file, {})[part] = header
    return ", ".join(file_named(file, headers) for file, headers in files.items())


def _others(rows: Sequence[Record]) -> list[Record]:
    """Returns the rows of models that others trained, at their lowest temperature."""
    found = [r for r in rows if not r["part"].startswith(PAIR_SHAPE)]
    lowest = min((r["temperature"] for r in found), default=None)
    return [r for r in found if r["temperature"] == lowest]


def _place(r: Record) -> tuple[bool, int, str, int, float]:
    """Returns the sort key: whole cards first, then size, length and temperature."""
    return (
        "gpu_memory" in r["settings"],
        [*_SIZES].index(r["model"]),
        r["card"],
        r["context"],
        r["temperature"],
    )


def _sampled(file: str, content: Record) -> list[Record]:
    """Returns the medians of a file's sampled texts."""
    return [
        r | {
            "card": limited(r), "size": _size(r), "what": f"{r['texts']} of {r['kinds']} kinds",
            "origin": (file, r["part"], content["parts"][r["part"]]),
        }
        for r in texts.summary(content)
        if r["temperature"] > 0 and r["model"] in _SIZES
    ]  # fmt: skip


def _size(r: Record) -> str:
    levels = r["settings"].get("levels")
    return _SIZES[r["model"]] + (f", levels={levels}" if levels else "")


def limited(r: Record) -> str:
    """Returns the card, and which of its memory may be used."""
    limit = r["settings"].get("gpu_memory", "").replace("GiB", " GiB")
    return r["machine"] + (f" limited to {limit}: the rest in host memory" if limit else "")


def speed_note(any_text: Record, rows: Sequence[Record]) -> str:
    """Returns the files, and the vocabularies of their models."""
    entries = {
        _SIZES[r["model"]]: r["origin"][2]["settings"].get("vocabulary") or PAIR_VOCABULARY for r in rows
    }
    sizes = ", ".join(f"{size} {n:,}" for size, n in entries.items())
    return f"Entries of the vocabularies: {sizes}. From {_files_of(rows)}.\n"


TABLES = {
    "front": Table(texts.ANY_TEXT, listing(FRONT, front_rows, front_note, left=2), texts.COMMAND),
    "by_card": Table(texts.ANY_TEXT, listing(SPEEDS, speed_rows, speed_note, left=4), texts.COMMAND),
}  # fmt: skip

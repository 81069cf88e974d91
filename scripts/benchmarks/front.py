"""Speed by card, model and length, a few of them for README, and seconds of whole requests.

Medians over texts of all kinds, with default settings. Greedy texts are left out: those of a small model
repeat themselves, which flatters every drafter.
"""

from collections.abc import Sequence

from scripts.benchmarks.common.markdown import Columns, Record, Table, file_named, file_note, listing
from scripts.benchmarks.common.results import PAIR_VOCABULARY, RESULTS, content_at
from scripts.benchmarks.on_chip import tables as on_chip
from scripts.benchmarks.requests import tables as requests
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
REQUESTS: Columns = {
    "card": "{card}", "size of model": "{size}", "prompt, tokens": "{context:,}", "texts": "{what}",
    "T": "{temperature:g}", "first answer, s": "**{cold:.1f}**", "plain, s": "{cold_plain:.1f}",
    "speed-up": "**{cold_gain:.1f}x**", "next answer, s": "**{next:.1f}**",
    "its plain, s": "{next_plain:.1f}", "its speed-up": "**{median:.1f}x**",
}  # fmt: skip
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
# New tokens of a whole request.
_ANSWER = 256
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


def request_rows(prefills: Record) -> list[Record]:
    """Returns seconds until a first and a next answer about one text, for the sizes and lengths of both
    files.

    Args:
        prefills: content of the file of prefills.
    """
    reading: dict[tuple[str, int], float] = {}
    # The engine may use flash-attn 4, which an installation without extras does not have.
    paths = {row["path"] for row in prefills["rows"]}
    usual = "cudnn" if "cudnn" in paths else "engine"
    for row in prefills["rows"]:
        if row["path"] == usual and row["kernels"]:
            key = f"{row['shape']} inflated", row["context"]
            reading[key] = min(row["seconds"], reading.get(key, row["seconds"]))
    made = []
    for r in speed_rows(content_at(RESULTS / texts.ANY_TEXT)):
        seconds = reading.get((r["model"], r["context"]))
        if seconds is not None and r["card"] == prefills["hardware"] and r["temperature"] == _TEMPERATURE:
            ours, plain = (_ANSWER * r[name] / 1e3 for name in ("ms_per_token", "plain_ms_per_token"))
            shape = r["model"].removesuffix(" inflated")
            (first, first_plain), (more, more_plain) = beside(shape, r["context"])
            row = r | {"cold": seconds + ours + first, "cold_plain": seconds + plain + first_plain}
            row |= {"next": ours + more, "next_plain": plain + more_plain}
            row |= {"cold_gain": row["cold_plain"] / row["cold"], "median": row["next_plain"] / row["next"]}
            made.append(row)
    return made


def beside(shape: str, context: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """Returns the seconds to the first token of a first and a next request, without the first one's prefill.

    Of the shape where it was measured, else of the shape that was, at this length if there: ours, and plain
    decoding's.
    """
    rows = content_at(RESULTS / requests.FILE)["rows"]
    as_long = [row for row in rows if row["context"] == context] or rows
    own = [row for row in as_long if row["shape"] == shape] or as_long

    def left(turn: str) -> tuple[float, float]:
        row = next(row for row in own if row["turn"] == turn)
        read = float(turn == "cold")
        ours, plain = (
            each["first_token_seconds"] - read * each["prefill_seconds"] for each in (row, row["plain"])
        )
        return ours, plain

    return left("cold"), left("second turn")


def request_note(prefills: Record, rows: Sequence[Record]) -> str:
    origins = {r["origin"][0] for r in rows}
    others = ", ".join(f"`docs/results/{name}`" for name in sorted(origins))
    return (
        f"First answer: seconds for the prompt, {_ANSWER} times the milliseconds above ({others}), and what "
        "else a request took until its first token. Next answer: the same without the prompt, but for the "
        "question. What else and the question were timed on Llama-2-7B alone "
        f"(`docs/results/{requests.FILE}`), and are added for other models as well. "
        f"{file_note(on_chip.PREFILL_FILE, {'': prefills})}"
    )


TABLES = {
    "front": Table(texts.ANY_TEXT, listing(FRONT, front_rows, front_note, left=2), texts.COMMAND),
    "by_card": Table(texts.ANY_TEXT, listing(SPEEDS, speed_rows, speed_note, left=4), texts.COMMAND),
    "front_requests": Table(
        on_chip.PREFILL_FILE, listing(REQUESTS, request_rows, request_note, left=4),
        "python -m scripts.benchmarks prefill",
    ),
}  # fmt: skip

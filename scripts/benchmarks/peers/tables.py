"""Tables of ``peers``: every engine and mode, and our default settings beside the fastest of the others."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from scripts.benchmarks.common.markdown import Columns, Record, Table, file_note, listing

FILE = "peers_{machine}.jsonl"
CPU = FILE.format(machine="cpu")
_COMMAND = "python -m scripts.benchmarks peers --models models --texts texts.json.xz"
OURS, DEFAULT, PLAIN = "ours", "default", "plain"
_NAMES = {OURS: "this project"}


def _name(row: Record) -> str:
    return f"{_NAMES.get(row['engine'], row['engine'])}, {row['mode']} ({row['format']})"


def medians(content: Record) -> list[Record]:
    """Returns medians over texts for each engine, format and mode by context, temperature and batch."""
    names = ("part", "batch", "context", "temperature", "bits", "engine", "format", "mode")
    found: dict[tuple[Any, ...], list[Record]] = {}
    for row in content["rows"]:
        if "missing" not in row:
            found.setdefault(tuple(row[name] for name in names), []).append(row)
    made = []
    for key, same in found.items():
        times = [row["ms_per_token"] for row in same]
        figures = {
            name: statistics.median(known)
            if (known := [r[name] for r in same if r[name] is not None])
            else None
            for name in ("prefill_s", "cpu_ms_per_token", "tokens_per_pass", "repeated_8grams", "as_ours")
        }
        made.append({
            **dict(zip(names, key, strict=True)), **figures, "ms_per_token": statistics.median(times),
            "lowest": min(times), "highest": max(times), "texts": len(same),
            "new_tokens": same[0]["new_tokens"],
        })  # fmt: skip
    return sorted(made, key=lambda row: tuple(row[name] for name in names))


def beside(content: Record) -> list[Record]:
    """Returns a row for each number of bits and place: ours, and the fastest mode of the other engines."""
    found: dict[tuple[Any, ...], list[Record]] = {}
    for row in medians(content):
        place = (row["part"], row["batch"], row["context"], row["temperature"], row["bits"])
        found.setdefault(place, []).append(row)
    made = []
    for same in found.values():

        def fastest(wanted: Callable[[Record], bool], same: list[Record] = same) -> Record | None:
            return min(filter(wanted, same), key=lambda row: row["ms_per_token"], default=None)

        ours = fastest(lambda row: (row["engine"], row["mode"]) == (OURS, DEFAULT))
        plain = fastest(lambda row: (row["engine"], row["mode"]) == (OURS, PLAIN))
        other = fastest(lambda row: row["engine"] != OURS)
        if ours is None or other is None:
            continue
        made.append(ours | {
            "plain": plain, "other": other, "name": _name(other),
            "ratio": other["ms_per_token"] / ours["ms_per_token"],
        })  # fmt: skip
    return made


def _times(row: Record) -> str:
    """Returns the median over texts, and the fastest and the slowest text."""
    return f"{row['ms_per_token']:.1f} ({row['lowest']:.1f} to {row['highest']:.1f})"


BESIDE: Columns = {
    "prompt, tokens": "{context:,}", "T": "{temperature:g}", "bits": "{bits}",
    "ours, ms a token": "{ms_per_token:.1f}", "ours, plain": "?{plain[ms_per_token]:.1f}",
    "fastest other engine": "{name}", "its ms a token": "{other[ms_per_token]:.1f}",
    "**our speed to its**": "**{ratio:.2f}x**",
    "CPU ms a token: ours": "{cpu_ms_per_token:.1f}", "its": "{other[cpu_ms_per_token]:.1f}",
    "first token, s: ours": "{prefill_s:.2f}", "its, s": "{other[prefill_s]:.2f}",
}  # fmt: skip
EVERY: Columns = {
    "engine, mode (weights)": _name, "bits": "{bits}", "prompt, tokens": "{context:,}",
    "T": "{temperature:g}", "batch": "{batch}", "ms a token": _times,
    "CPU ms a token": "{cpu_ms_per_token:.1f}",
    "first token, s": "{prefill_s:.2f}", "tokens a pass": "?{tokens_per_pass:.1f}",
    "repeated 8-grams": "{repeated_8grams:pct}", "greedy tokens as our plain ones": "?{as_ours:.0f}",
}  # fmt: skip


def _caption(content: Record, rows: Sequence[Record], missing: bool) -> str:
    """Returns machine, versions, and which engines are missing."""
    told = []
    for name in dict.fromkeys(row["part"] for row in rows):
        part = content["parts"][name]
        versions: dict[str, str] = {}
        for row in content["rows"]:
            if row["part"] == name:
                versions |= row.get("versions", {})
        versions.pop("python", None)
        shown = ", ".join(f"{package} {version}" for package, version in sorted(versions.items()))
        told.append(f"{name}: {part['hardware']}, {part['settings']['threads']} threads, {shown}.")
        absent = [row for row in content["rows"] if row["part"] == name and "missing" in row]
        if missing and absent:
            told += [f"Not measured: {_name(row)}{_where(row)}, because {row['missing']}." for row in absent]
    texts = ", ".join(
        f"{texts} at {context:,} tokens"
        for context, texts in dict.fromkeys((row["context"], row["texts"]) for row in rows)
    )
    shares = [row["other_programs"] for row in content["rows"] if "missing" not in row]
    told.append(
        f"{rows[0]['new_tokens']} new tokens, medians over texts ({texts}); the first token comes after the "
        "prompt was read, and ms a token is the time between it and the last one. Other programs used "
        f"{statistics.median(shares):.0%} of the CPUs' time (median), at most {max(shares):.0%}."
    )
    return " ".join([*told, file_note(CPU, content["parts"])])


def _where(row: Record) -> str:
    return f", {row['context']:,} tokens" if "context" in row else ""


TABLES = {
    "peers_cpu": Table(
        CPU, listing(BESIDE, beside, lambda content, rows: _caption(content, rows, False), left=0), _COMMAND
    ),
    "peers_cpu_all": Table(
        CPU, listing(EVERY, medians, lambda content, rows: _caption(content, rows, True)), _COMMAND
    ),
}

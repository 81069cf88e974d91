"""Makes tables of the measurements of ``triforce-tree bench``, and Markdown of tables."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triforce_tree.bench.baselines import BASELINES, DRAFTING, PLAIN_METHOD
from triforce_tree.bench.results import Record, Records
from triforce_tree.runtime.files.writing import replace_file

_SPEED_NOTE = (
    "to plain: to this engine without drafts; to transformers: to the fastest of its static, dynamic and "
    "assisted decoding that was timed"
)


def grid(headings: Sequence[str], lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """Returns a Markdown table, its first ``left`` columns aligned to the left, the others to the right."""
    rule = ["---"] * left + ["---:"] * (len(headings) - left)
    return "".join("| " + " | ".join(line) + " |\n" for line in (headings, rule, *lines))


@dataclass(frozen=True)
class Table:
    """A table of text, whose first column holds names; ``note`` is printed below it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def markdown(self) -> str:
        note = f"\n{self.note}\n" if self.note else ""
        return f"**{self.title}**\n\n{grid(self.columns, self.rows)}{note}"


def tables(records: Records) -> list[Table]:
    """Returns the tables of a results file of ``bench``, without empty ones."""
    return [table for table in (_speed(records), _needle(records)) if table.rows]


def write_beside(path: Path, records: Records, shown: Sequence[Table]) -> list[Path]:
    """Writes the tables of a run as Markdown beside its results file ``path``; returns the written paths."""
    if not shown:
        return []
    known = records.about
    versions = ", ".join(f"{name} {version}" for name, version in known["versions"].items())
    where = (
        f"{known['hardware']}, {versions}, commit {known['commit']}, seed {known['seed']}, {known['date']}. "
        f"Command: `{known['command']}`"
    )
    text = "\n".join(table.markdown() for table in shown)
    replace_file(path.with_suffix(".md"), f"{text}\n{where}\n")
    return [path.with_suffix(".md")]


def speed_of(records: Records) -> list[Record]:
    """Returns a record for each length, temperature and method, with medians over prompts.

    Speed-ups are relative to the fastest baseline at the same length and temperature.
    """
    timed = [r for r in records.all if "decode_seconds" in r]
    groups = {
        place: [r for r in timed if _key(r, "length", "temperature", "method") == place]
        for place in _distinct(timed, "length", "temperature", "method")
    }
    speed = {
        place: statistics.median(1e3 * r["decode_seconds"] / r["timed_tokens"] for r in group)
        for place, group in groups.items()
    }
    made: list[Record] = []
    for (length, temperature, method), group in groups.items():
        same = {m: ms for (n, t, m), ms in speed.items() if (n, t) == (length, temperature)}
        baselines, ms = [same[m] for m in BASELINES if m in same], same[method]
        rates = {
            name: statistics.median(r["acceptance"][name] for r in group if name in r["acceptance"])
            for name in sorted({name for r in group for name in r["acceptance"]})
        }
        made.append({
            "method": method, "temperature": temperature, "context": length,
            "new_tokens": records.settings["new_tokens"], "ms_per_token": round(ms, 3),
            "speedup_vs_best_baseline": round(min(baselines) / ms, 3) if baselines else None,
            "acceptance": {name: round(rate, 4) for name, rate in rates.items()},
            "repeated_8grams": round(statistics.median(r["repeated_8grams"] for r in group), 4),
            "prompts": len(group),
            "prompt_tokens": int(statistics.median(r["prompt_tokens"] for r in group)),
        })  # fmt: skip
    return made


def _speed(records: Records) -> Table:
    timed = speed_of(records)
    alone = [r for r in timed if r["method"] == PLAIN_METHOD]
    plain = {_key(r, "context", "temperature"): r["ms_per_token"] for r in alone}

    rows = [
        (
            row["method"],
            f"{row['prompts']} x {row['prompt_tokens']:,}",
            f"{row['temperature']:g}",
            f"{row['ms_per_token']:.2f}",
            _ratio(ms and ms / row["ms_per_token"]),
            _ratio(row["speedup_vs_best_baseline"]),
            _accepted(row),
            f"{100 * row['repeated_8grams']:.0f} %",
        )
        for row in timed
        for ms in [plain.get(_key(row, "context", "temperature"))]
    ]
    columns = (
        "method", "prompts", "T", "ms/token", "to plain", "to transformers", "acceptance", "repeated 8-grams"
    )  # fmt: skip
    return Table("decode time, medians over prompts", columns, rows, _SPEED_NOTE)


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _accepted(row: Record) -> str:
    """Returns the acceptance by level, or that all passes of a drafting method were plain ones."""
    if not row["acceptance"] and row["method"] in DRAFTING:
        return "all passes were plain"
    return ", ".join(f"{name} {value:.2f}" for name, value in row["acceptance"].items())


def _needle(records: Records) -> Table:
    """Returns the mean accuracy by depth and levels (downwards) and by prompt tokens (to the right)."""
    chosen = [r for r in records.all if "depth" in r]
    lengths = [length for (length,) in _distinct(chosen, "length")]
    rows = []
    for by, depth in _distinct(chosen, "through", "depth"):
        same = [r for r in chosen if _key(r, "through", "depth") == (by, depth)]
        found = [[float(r["found"]) for r in same if r["length"] == length] for length in lengths]
        means = [f"{statistics.fmean(each):.2f}" if each else "" for each in found]
        rows.append((f"{100 * depth:.0f} %", by, *means))
    columns = ("depth", "through", *(f"{n:,}" for n in lengths))
    return Table("needle accuracy, by prompt tokens", columns, rows)


def _key(record: Record, *names: str) -> tuple[Any, ...]:
    return tuple(record.get(name) for name in names)


def _distinct(records: Sequence[Record], *names: str) -> list[tuple[Any, ...]]:
    """Returns the keys in the order in which they were measured first."""
    return list(dict.fromkeys(_key(r, *names) for r in records))

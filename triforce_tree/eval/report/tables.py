"""What a results file of ``triforce-tree bench`` says: cells with figures, and tables for people."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from triforce_tree.eval.baselines import BASELINES, DRAFTING, PLAIN_METHOD, labelled
from triforce_tree.eval.paper import tables as paper
from triforce_tree.eval.public.answers import ANSWER, OURS, PLAIN
from triforce_tree.eval.report import machine
from triforce_tree.eval.report.table import Place as Place
from triforce_tree.eval.report.table import Table as Table
from triforce_tree.eval.results import Record, Records, speed_rows

_SPEED_NOTE = (
    "to plain: to this engine without drafts; to transformers: to the fastest of its static, dynamic and "
    "assisted decoding that was timed"
)


@contextmanager
def _of_this_form() -> Iterator[None]:
    """Raise ValueError where a record lacks what this version's have: files of others, or changed by hand."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its records are not of this version's form ({error}); measure again") from error


@_of_this_form()
def tables(records: Records) -> list[Table]:
    """The tables of a results file, without empty ones.

    Raises:
        ValueError: a record lacks a field.
    """
    if records.settings.get("benchmark") == paper.BENCHMARK:
        return paper.tables(records)
    made = [make(records) for make in (_speed, _answers, _needle, _ruler)]
    return [table for table in made if table.rows] + machine.tables(records)


@_of_this_form()
def cells(records: Records) -> dict[Place, dict[str, float]]:
    """The figures of each cell: what a reader's own run is compared by.

    Raises:
        ValueError: a record lacks a field.
    """
    if records.settings.get("benchmark") == paper.BENCHMARK:
        return paper.cells(records)
    found = machine.cells(records)
    for row in speed_of(records):
        place = (("tokens", f"{row['context']:,}"), *_at(row), ("method", row["method"]))
        ratio = row["speedup_vs_best_baseline"]
        found[place] = {"ms/token": row["ms_per_token"]} | ({"speed-up": ratio} if ratio else {})
    for row in answers_of(records):
        for by in (OURS, PLAIN):
            if row[by] is not None:
                place = (("tokens", f"{row['length']:,}"), *_at(row), ("through", by))
                found[place] = {records.settings["metric"]: row[by]}
    for name, value in (("depth", "found"), ("task", "score")):
        chosen = [r for r in records.all if name in r and value in r]
        for key in _distinct(chosen, "through", "length", name):
            same = [float(r[value]) for r in chosen if _key(r, "through", "length", name) == key]
            place = (("tokens", f"{key[1]:,}"), (name, str(key[2])), ("through", key[0]))
            found[place] = {"accuracy": statistics.fmean(same)}
    return found


def _at(row: Record) -> Place:
    return (("T", f"{row['temperature']:g}"),)


def speed_of(records: Records) -> list[Record]:
    """A row for each length, temperature and method: medians over prompts."""
    made: list[Record] = []
    timed = [r for r in records.all if "decode_seconds" in r]
    for (length,) in _distinct(timed, "length"):
        same = [r for r in timed if r.get("length") == length]
        context = records.settings["context"] if length is None else length
        rows = speed_rows(same, BASELINES.__contains__, context, records.settings["new_tokens"])
        for row in rows:
            at = [r for r in same if _key(r, "temperature", "method") == (row["temperature"], row["method"])]
            lengths = [r.get("prompt_tokens", context) for r in at]
            made.append({**row, "prompts": len(at), "prompt_tokens": int(statistics.median(lengths))})
    return made


def _speed(records: Records) -> Table:
    timed = speed_of(records)
    alone = [r for r in timed if r["method"] == PLAIN_METHOD]
    plain = {_key(r, "context", "temperature"): r["ms_per_token"] for r in alone}

    def to_plain(row: Record) -> float | None:
        ms = plain.get(_key(row, "context", "temperature"))
        return None if ms is None else ms / row["ms_per_token"]

    rows = [
        (
            labelled(row["method"]),
            f"{row['prompts']} x {row['prompt_tokens']:,}",
            f"{row['temperature']:g}",
            f"{row['ms_per_token']:.2f}",
            _ratio(to_plain(row)),
            _ratio(row["speedup_vs_best_baseline"]),
            _accepted(row),
            f"{100 * row['repeated_8grams']:.0f} %",
        )
        for row in timed
    ]
    columns = (
        "method", "prompts", "T", "ms/token", "to plain", "to transformers", "acceptance", "repeated 8-grams"
    )  # fmt: skip
    return Table("decode time, medians over prompts", columns, rows, _SPEED_NOTE)


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _accepted(row: Record) -> str:
    """Acceptance by level; of drafting methods whose passes were all plain, that."""
    if not row["acceptance"] and row["method"] in DRAFTING:
        return "all passes were plain"
    return ", ".join(f"{name} {value:.2f}" for name, value in row["acceptance"].items())


def answers_of(records: Records) -> list[Record]:
    """A row for each length and temperature: mean scores of both, and how many texts are the same."""
    answers = [r for r in records.all if r.get("kind") == ANSWER]
    made = []
    for length, temperature in _distinct(answers, "length", "temperature"):
        same = [r for r in answers if _key(r, "length", "temperature") == (length, temperature)]
        by = {name: {r["prompt"]: r for r in same if r["through"] == name} for name in (OURS, PLAIN)}
        both = by[OURS].keys() & by[PLAIN].keys()
        made.append(
            {
                "length": length,
                "temperature": temperature,
                **{name: _mean(r["score"] for r in found.values()) for name, found in by.items()},
                "prompts": max(map(len, by.values())),
                "prompt_tokens": int(statistics.median(r["prompt_tokens"] for r in same)),
                "compared": len(both),
                "identical": sum(by[OURS][n]["tokens"] == by[PLAIN][n]["tokens"] for n in both),
            }
        )
    return made


def _answers(records: Records) -> Table:
    metric = records.settings.get("metric", "score")
    rows = [
        (
            f"{row['prompts']} x {row['prompt_tokens']:,}",
            f"{row['temperature']:g}",
            _score(row[OURS]),
            _score(row[PLAIN]),
            f"{row['identical']} of {row['compared']}",
        )
        for row in answers_of(records)
    ]
    columns = ("prompts", "T", f"{metric}, all levels", f"{metric}, target alone", "identical texts")
    return Table(f"answers: mean {metric}, 0 to 1", columns, rows)


def _needle(records: Records) -> Table:
    return _accuracy(records, "needle accuracy", "depth", "found", lambda depth: f"{100 * depth:.0f} %")


def _ruler(records: Records) -> Table:
    return _accuracy(records, "share of answers found", "task", "score", str)


def _accuracy(records: Records, title: str, name: str, value: str, shown: Callable[[Any], str]) -> Table:
    """Means by ``name`` and levels downwards, by prompt tokens to the right."""
    chosen = [r for r in records.all if name in r and value in r]
    lengths = [length for (length,) in _distinct(chosen, "length")]
    rows = []
    for by, at in _distinct(chosen, "through", name):
        same = [r for r in chosen if _key(r, "through", name) == (by, at)]
        means = [_mean(float(r[value]) for r in same if r["length"] == length) for length in lengths]
        rows.append((shown(at), by, *map(_score, means)))
    return Table(f"{title}, by prompt tokens", (name, "through", *(f"{n:,}" for n in lengths)), rows)


def _score(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.fmean(found) if found else None


def _key(record: Record, *names: str) -> tuple[Any, ...]:
    return tuple(record.get(name) for name in names)


def _distinct(records: Sequence[Record], *names: str) -> list[tuple[Any, ...]]:
    """Keys in the order in which they were measured first."""
    return list(dict.fromkeys(_key(r, *names) for r in records))

"""Markdown tables of measured rows, and the lines below them that say where the figures come from.

Not named ``markdown``: in this folder that would hide PyPI's package of the name from whatever wants it.
"""

from collections.abc import Callable, Sequence
from typing import Any

Record = dict[str, Any]


def table(columns: Sequence[str], lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table with a head; the first ``left`` columns are set to the left, all others to the right."""
    rule = ["---"] * left + ["---:"] * (len(columns) - left)
    return "".join("| " + " | ".join(line) + " |\n" for line in (columns, rule, *lines))


def rows_of(result: Record, *parts: str) -> list[Record]:
    """Rows of a results file that belong to these parts, part by part."""
    return [row for part in parts for row in result["rows"] if row["part"] == part]


def number(value: float | None, unit: str = "") -> str:
    """Two decimals; nothing where nothing was measured."""
    return "" if value is None else f"{value:.2f}{unit}"


def percent(part: float, whole: float = 1.0) -> str:
    return f"{100 * part / whole:.0f} %"


def not_measured(command: str) -> str:
    """What stands in place of a table without figures: the command that would make them."""
    return f"Not measured yet: `{command}`.\n"


def made_on(result: Record, file: str) -> str:
    """Where the figures of a file of one run come from."""
    torch = result["versions"]["torch"]
    return (
        f"{result['hardware']}, torch {torch}, commit {result['commit']}, {result['date']}. "
        f"File: `docs/results/{file}`.\n"
    )


def origin(
    result: Record, rows: Sequence[Record], file: str, bandwidth: Callable[[Record], str], noted: str = "In"
) -> str:
    """Where the figures of these rows come from, each run once, and what its notes say.

    Args:
        result: the results file's content.
        rows: those in the table.
        file: name of the results file.
        bandwidth: says what was measured of the machine in a part's run.
        noted: how a sentence with a part's note begins, before the part's name.
    """
    runs: dict[str, list[str]] = {}
    notes = []
    for name in dict.fromkeys(row["part"] for row in rows):
        part = result["parts"][name]
        versions = part["versions"]
        run = (
            f"{part['hardware']}, {bandwidth(part)}, torch {versions['torch']}, transformers "
            f"{versions['transformers']}, engine {part['settings']['engine']}, {part['date']}."
        )
        runs.setdefault(run, []).append(name)
        notes += [f"{noted} {name}: {note}." for note in part["notes"]]
    lines = [f"{', '.join(names)}: {run}" for run, names in runs.items()]
    return " ".join([*lines, *notes]) + f" File: `docs/results/{file}`.\n"

"""Another machine's results beside one's own: the same cells, with ratios."""

import json
from pathlib import Path
from typing import Any

from triforce_tree.eval import results
from triforce_tree.eval.report.tables import Place, Table, cells

# What a row of a file in docs/results is about, and the figures that are compared.
_PLACE = ("part", "shape", "batch", "context", "new_tokens", "temperature", "setting", "workload", "way")
_FIGURES = ("ms_per_token", "speedup", "us", "tokens_per_second")
# Words of a recorded command that name files of the machine it ran on.
_FILES = ("--out", "--plot")

Cells = dict[Place, dict[str, float]]


def cells_of(path: str | Path) -> Cells:
    """The figures of a results file: of ``bench``, or of ``scripts/benchmarks`` (JSON with rows).

    Raises:
        ValueError: it is neither, or holds no figures.
        OSError: it cannot be read.
    """
    if Path(path).suffix == ".json":
        found = _of_rows(Path(path))
    else:
        records = results.read(path)
        try:
            found = cells(records)
        except ValueError as error:
            raise ValueError(f"{str(path)!r}: {error}") from error
    if not found:
        raise ValueError(f"{str(path)!r} holds no figures that can be compared; give another results file")
    return found


def _of_rows(path: Path) -> Cells:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        found = {}
        for row in rows:
            place = tuple((name, _word(row[name])) for name in _PLACE if name in row)
            found[place] = {name: float(row[name]) for name in _FIGURES if row.get(name) is not None}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{str(path)!r} is not a results file with rows; give another") from error
    return {place: figures for place, figures in found.items() if figures}


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def command_of(path: str | Path) -> list[str]:
    """The words of the command that made a results file of ``bench``, without files of its machine.

    Raises:
        ValueError: it cannot be run again from here.
        OSError: it cannot be read.
    """
    if Path(path).suffix == ".json":
        raise ValueError(
            f"{str(path)!r} is of python -m scripts.benchmarks; run that in a checkout with --out MINE.json, "
            "then give --mine MINE.json"
        )
    words = results.read(path).about.get("arguments", [])
    if words[:1] != ["bench"] or words[1:2] == ["verify"]:
        raise ValueError(f"{str(path)!r} does not name the bench command that made it; give --mine FILE")
    kept: list[str] = []
    words = iter(words)
    for word in words:
        if word in _FILES:
            next(words, None)
        elif word != "--json" and not word.startswith(tuple(f"{name}=" for name in _FILES)):
            kept.append(word)
    return kept


def compared(theirs: Cells, mine: Cells) -> Table:
    """Each figure of both, and mine over theirs."""
    rows = []
    for place, figures in theirs.items():
        cell = ", ".join(value if name != "T" else f"T={value}" for name, value in place)
        for name, value in figures.items():
            own = mine.get(place, {}).get(name)
            ratio = f"{own / value:.2f}" if own is not None and value else ""
            rows.append((cell, name, f"{value:.3g}", "not measured" if own is None else f"{own:.3g}", ratio))
    return Table("the file's figures, and those of this machine", ("cell", "", "file", "here", "ratio"), rows)

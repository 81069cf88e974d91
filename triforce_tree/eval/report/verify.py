"""Another machine's results beside one's own: the same cells, with ratios."""

import statistics
from pathlib import Path
from typing import Any

from triforce_tree.eval import results
from triforce_tree.eval.report.rows import Cells, Content, Figure, cells_of_rows, own_parts, told
from triforce_tree.eval.report.tables import Table, cells
from triforce_tree.runtime.files.json_files import read_json

# Words of a recorded command that name files of the machine it ran on.
_FILES = ("--out", "--plot")
# Cells without figures of this machine that are named.
_NAMED = 3


def cells_of(path: str | Path, beside: str | Path | None = None) -> Cells:
    """The figures of a results file: of ``bench``, or a JSON file of a checkout's scripts.

    Args:
        beside: the file that it is compared with; parts that it has taken over from there are left out.

    Raises:
        ValueError: it is neither, or holds no figures.
        OSError: it cannot be read.
    """
    try:
        if is_of_scripts(path):
            content = _content(path)
            found = cells_of_rows(own_parts(_content(beside), content) if beside is not None else content)
        else:
            found = cells(results.read(path))
    except ValueError as error:
        named = repr(str(path))
        raise ValueError(str(error) if named in str(error) else f"{named}: {error}") from error
    if not found:
        raise ValueError(f"{str(path)!r} holds no figures that can be compared; give another results file")
    return found


def is_of_scripts(path: str | Path) -> bool:
    """Whether a file is of a checkout's scripts; those of ``bench`` are JSON lines."""
    return Path(path).suffix == ".json"


def _content(path: str | Path) -> Content:
    try:
        content: Any = read_json(Path(path))
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error}); give another results file") from error
    if not isinstance(content, dict):
        raise ValueError("it is not a results file, which is a JSON object; give another")
    return content


def command_of(path: str | Path) -> list[str]:
    """The words of the command that made a results file of ``bench``, without files of its machine.

    Raises:
        ValueError: it cannot be run again from here.
        OSError: it cannot be read.
    """
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


def compared(theirs: Cells, mine: Cells) -> list[Table]:
    """Each figure of the cells of both, mine over theirs, and the ratios of each figure over all cells.

    Raises:
        ValueError: no cell is in both.
    """
    lacking = [place for place in theirs if place not in mine]
    if len(lacking) == len(theirs):
        raise ValueError(
            f"none of the file's {len(theirs)} cells was measured here: its first one is "
            f"{told(lacking[0])}, the first one here {told(next(iter(mine)))}; measure the same sizes and "
            "texts"
        )
    rows, ratios = [], dict[str, list[float]]()
    for place, figures in theirs.items():
        for name, value in figures.items() if place in mine else ():
            own = mine[place].get(name)
            ratio, said = _ratio(value, own)
            if ratio is not None:
                ratios.setdefault(name, []).append(ratio)
            rows.append((told(place), name, _shown(value), _shown(own), said))
    note = ""
    if lacking:
        named = "; ".join(told(place) for place in lacking[:_NAMED])
        more = "; ..." if len(lacking) > _NAMED else ""
        note = f"not measured here, {len(lacking)} of {len(theirs)} cells: {named}{more}"
    columns = ("cell", "", "file", "here", "ratio")
    made = [Table("the file's figures, and those of this machine", columns, rows, note)]
    if len(theirs) - len(lacking) > 1 and ratios:
        overall = [
            (name, str(len(r)), f"{statistics.median(r):.2f}", f"{min(r):.2f}", f"{max(r):.2f}")
            for name, r in ratios.items()
        ]
        made.append(Table("ratios over cells", ("figure", "cells", "median", "lowest", "highest"), overall))
    return made


def _ratio(value: Figure, own: Figure | None) -> tuple[float | None, str]:
    """Mine over theirs, and what is said of it."""
    if own is None:
        return None, ""
    if isinstance(value, str) or isinstance(own, str) or not value:
        return None, "same" if own == value else "differs"
    return own / value, f"{own / value:.2f}"


def _shown(figure: Figure | None) -> str:
    if figure is None:
        return "not measured"
    return figure if isinstance(figure, str) else f"{figure:.3g}"

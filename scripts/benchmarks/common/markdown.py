"""Markdown tables, declared as headings with format strings over the rows of a results file."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

from triforce_tree.bench.tables import grid

Record = dict[str, Any]
# Heading -> "{ms_per_token:.2f}" over a row, or a function of the row. A leading "?" lets a figure be absent.
Columns = Mapping[str, str | Callable[[Record], str]]
# The rows that a table shows of a results file's content, and the caption below them.
Rows = Callable[[Record], Sequence[Record]]
Caption = Callable[[Record, Sequence[Record]], str]


class _Cells(Formatter):
    """Format strings in which ``pct`` makes ``61 %`` of a share, and ``tera`` ``4.33`` of 4.33e12."""

    def format_field(self, value: Any, spec: str) -> Any:
        if spec == "pct":
            return f"{100 * value:.0f} %"
        return f"{value / 1e12:.2f}" if spec == "tera" else super().format_field(value, spec)


_CELLS = _Cells()


def cell(template: str | Callable[[Record], str], row: Record) -> str:
    """Returns one cell's text; with a leading "?" the empty text where the figure is missing or None."""
    if callable(template):
        return template(row)
    if not template.startswith("?"):
        return _CELLS.vformat(template, (), row)
    try:
        return _CELLS.vformat(template[1:], (), row)
    except (KeyError, TypeError):
        return ""


def us(value: float | None) -> str:
    """Microseconds; a dash where there are none."""
    if value is None:
        return "-"
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def all_rows(content: Record) -> list[Record]:
    return list(content["rows"])


def listing(
    columns: Columns | Callable[[Record], Columns],
    rows: Rows = all_rows,
    caption: Caption | None = None,
    left: int = 1,
) -> Callable[[Record], str | None]:
    """Makes a table of a results file's content, a line for each row; None where it has no such rows.

    Args:
        columns: or a function of the content that names them.
    """

    def make(content: Record) -> str | None:
        if not (found := rows(content)):
            return None
        named = columns(content) if callable(columns) else columns
        lines = [[cell(template, row) for template in named.values()] for row in found]
        return grid([*named], lines, left) + (f"\n{caption(content, found)}" if caption else "")

    return make


@dataclass(frozen=True)
class Table:
    """A table of README.md or docs/, and where it comes from.

    Attributes:
        file: in docs/results.
        make: the table's text from the file's content; None where the file lacks what it shows.
        command: makes the file.
    """

    file: str
    make: Callable[[Record], str | None]
    command: str


def file_note(file: str, runs: Mapping[str, Record]) -> str:
    """Returns the last sentence of a caption, which names the file.

    Args:
        file: name in docs/results.
        runs: headers with ``commit`` and ``date`` by the name of the part;
            a file with one run has one header of the name "".
    """
    return f"File: {file_named(file, runs)}.\n"


def file_named(file: str, runs: Mapping[str, Record]) -> str:
    """Returns the file's name, and the commit and date of each of its runs."""
    origins = dict.fromkeys((run.get("commit", ""), run.get("date", "")) for run in runs.values())
    told = ", ".join(f"{commit} of {date}" for commit, date in origins if commit)
    return f"`docs/results/{file}`" + (f" ({told})" if told else "")


def noted(template: str, file: str) -> Caption:
    """Returns a format string over the content and the header of the first row's part, where the file has
    parts, and
    the file."""

    def caption(content: Record, rows: Sequence[Record]) -> str:
        parts = content.get("parts")
        runs = {n: parts[n] for n in dict.fromkeys(row["part"] for row in rows)} if parts else {"": content}
        return cell(template, content | next(iter(runs.values()))) + file_note(file, runs)

    return caption

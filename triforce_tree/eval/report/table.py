"""A table for people, and what a cell of results is about."""

from collections.abc import Sequence
from dataclasses import dataclass

Place = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Table:
    """Text in cells, the first column for names."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        ruler = ["---", *["---:"] * (len(self.columns) - 1)]
        lines = [" | ".join(cells) for cells in (self.columns, ruler, *self.rows)]
        return f"**{self.title}**\n\n" + "\n".join(f"| {line} |" for line in lines) + "\n"

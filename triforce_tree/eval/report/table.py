"""A table of text cells, as reports show it."""

from collections.abc import Sequence
from dataclasses import dataclass

Place = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Table:
    """Text in cells, the first column for names; ``note`` stands below them."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def markdown(self) -> str:
        ruler = ["---", *["---:"] * (len(self.columns) - 1)]
        lines = [" | ".join(cells) for cells in (self.columns, ruler, *self.rows)]
        note = f"\n{self.note}\n" if self.note else ""
        return f"**{self.title}**\n\n" + "\n".join(f"| {line} |" for line in lines) + f"\n{note}"

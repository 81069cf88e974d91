"""The figures that TriForce publishes in its text, from ``published.json``.

The paper's plots (figures 3, 5 and 6) give no numbers; of them there is only what the text says.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_FILE = Path(__file__).with_name("published.json")
# What a row of the file may say otherwise than its table.
_PLACE = ("hardware", "model", "context")


@dataclass(frozen=True)
class Figure:
    """One number.

    Attributes:
        row, column: where it stands in its table.
        value: milliseconds where ``column`` ends in "ms/token", a share where it names a rate or a policy,
            else a factor.
        hardware, model, context: what it was measured with; "not stated" where the paper does not say.
    """

    row: str
    column: str
    value: float
    hardware: str
    model: str
    context: str

    @property
    def setup(self) -> str:
        """Returns model, card and context, for a cell of a table."""
        card = "card not stated" if self.hardware == "not stated" else self.hardware
        return f"{self.model}, {card}, {self.context}"


@dataclass(frozen=True)
class Item:
    """A table or a figure of the paper.

    Attributes:
        name: as in "table-1", "figure-3".
        section: of the paper's text.
        plot: what only a plot shows; empty for tables.
    """

    name: str
    title: str
    section: str
    figures: Sequence[Figure]
    plot: str = ""

    @property
    def heading(self) -> str:
        """Its name and title, for people."""
        kind, number = self.name.split("-")
        return f"{kind.capitalize()} {number} (section {self.section}): {self.title}"

    def figure(self, row: str, column: str) -> Figure | None:
        """Returns the published number at this place, if there is one."""
        return next((f for f in self.figures if (f.row, f.column) == (row, column)), None)


@cache
def items() -> Mapping[str, Item]:
    """Returns the numbers of all tables and figures by name."""
    found = {}
    for item in json.loads(_FILE.read_text(encoding="utf-8"))["items"]:
        places = [{name: row.get(name, item[name]) for name in _PLACE} for row in item["rows"]]
        figures = [
            Figure(row["row"], row["column"], row["value"], **place)
            for row, place in zip(item["rows"], places, strict=True)
        ]
        parts = (item["item"], item["title"], item["section"], figures, item.get("plot", ""))
        found[item["item"]] = Item(*parts)
    return found

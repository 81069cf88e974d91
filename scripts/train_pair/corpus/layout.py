"""The layout of plain-text manuals: paragraphs wrapped at 70 columns, titles underlined."""

import re
import textwrap

WIDTH = 70
SEPARATOR = "\f"  # after every document of a corpus file


def wrap(text: str, indent: str = "", first: str | None = None) -> str:
    """A paragraph filled at ``WIDTH`` columns; inner double spaces stay, words may break after hyphens.

    ``first`` replaces the indent of the first line, whose words are those that fit after ``indent``.
    """
    flat = re.sub(r"\s\s+", "  ", text.strip().replace("\n", " "))
    lines = textwrap.fill(
        flat, WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False
    )
    return lines if first is None else first + lines[len(indent) :]


def titled(title: str, line: str) -> str:
    """A title over a line of this character, after an empty line."""
    return f"\n{title}\n{line * len(title)}"

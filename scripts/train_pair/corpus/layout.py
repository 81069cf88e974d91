"""The layout of plain-text manuals: paragraphs wrapped at 70 columns, titles underlined."""

import re

WIDTH = 70
SEPARATOR = "\f"  # behind every document of a corpus file
CHUNKS = re.compile(r"\s+|[^\s-]*[A-Za-z]{2}-(?=[A-Za-z]{2})|\S+")


def wrap(text: str, indent: str = "", first: str | None = None) -> str:
    """Greedy fill at ``WIDTH`` columns; inner double spaces stay, words may break after hyphens."""
    lines: list[str] = []
    prefix = indent if first is None else first
    room, line, gap = WIDTH - len(indent), "", ""
    for chunk in CHUNKS.findall(text.strip()):
        if chunk.isspace():
            gap = chunk.replace("\n", " ")[:2]
        elif not line:
            line, gap = chunk, ""
        elif len(line) + len(gap) + len(chunk) <= room:
            line, gap = line + gap + chunk, ""
        else:
            lines.append(prefix + line)
            prefix, line, gap = indent, chunk, ""
    if line:
        lines.append(prefix + line)
    return "\n".join(lines)


def titled(title: str, line: str) -> str:
    """A title over a line of this character, behind an empty line."""
    return f"\n{title}\n{line * len(title)}"

"""The tables of docs/drafters.md about matched tokens."""

from scripts.benchmarks.common.markdown import Record, Table, file_note, grid

MATCHED, COMMAND = "matched.json", "python -m scripts.benchmarks matched"


def _shown(row: Record) -> str:
    """Tokens a pass; in brackets those of a pass with matched tokens."""
    text = f"{row['tokens_per_pass']:.1f}"
    return text if not row.get("matched_passes") else f"{text} ({row['tokens_per_matched_pass']:.1f})"


def by_setting(content: Record, part: str) -> str | None:
    """A line for each text, context and temperature, a column for each setting."""
    rows = [row for row in content["rows"] if row["part"] == part]
    if not rows:
        return None
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    lines: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in rows:
        place = (row["kind"], f"{row['context']:,}", f"{row['temperature']:g}")
        lines.setdefault(place, {})[row["setting"]] = _shown(row)
    cells = [[*place, *(found.get(name, "") for name in settings)] for place, found in lines.items()]
    what = (
        "Tokens a pass of all passes, in brackets of those with matched tokens"
        if part == "chosen"
        else "Tokens a pass of two levels with `best-first:6,5,4`, by matched tokens beside it"
    )
    note = (
        f"{what}; {content['new_tokens']} new tokens, {content['seeds']} seeds where tokens are drawn; "
        f"embedded pair, {content['hardware']}, {content['date']}. "
    )
    return grid(["kind", "context", "T", *settings], cells) + "\n" + note + file_note(MATCHED, {"": content})


TABLES = {
    "matched": Table(MATCHED, lambda content: by_setting(content, "chosen"), COMMAND),
    "merged": Table(MATCHED, lambda content: by_setting(content, "merged"), COMMAND),
}

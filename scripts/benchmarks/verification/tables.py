"""The table of docs/losslessness.md about what traversal verification accepts."""

from typing import Any

from scripts.benchmarks.common.markdown import Columns, Record, Table, listing, noted

FILE, COMMAND = "verification.json", "python -m scripts.benchmarks verification"
_LEVELS = {(2, "target"): "draft -> target", (3, "retrieval"): "draft -> retrieval"}
COLUMNS: Columns = {
    "verification": "{what}", "proposed": "{proposed}", "T": "{temperature:g}",
    "tokens, node by node": "{tokens_node_by_node:.2f}", "traversal": "{tokens_traversal:.2f}",
    "gain": "{gain:+.1%}", "standard error": "{gain_standard_error:.1%}",
}  # fmt: skip
_NOTE = (
    "Expected tokens of a verification, its own included, of trees drawn in decoding; embedded pair, "
    "{prompts} prompts of {context:,} tokens, {new_tokens} new ones each, budget 512, {hardware}. "
)


def rows(content: Record) -> list[Record]:
    """Rows of the file with names of the level and of what it verified."""
    return [row | _named(row) for row in content["rows"]]


def _named(row: Record) -> dict[str, Any]:
    beside = ", runner-ups" if row["runner_ups"] else ""
    if (row["levels"], row["level"]) in _LEVELS:
        return {"what": _LEVELS[row["levels"], row["level"]], "proposed": row["tree"]}
    proposed = f"{row['rounds']} rounds of {row['tree']}{beside}"
    return {"what": "retrieval -> target", "proposed": proposed}


TABLES = {"verification": Table(FILE, listing(COLUMNS, rows, noted(_NOTE, FILE), left=2), COMMAND)}

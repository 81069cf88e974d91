"""Tables of docs/benchmarks.md about settings: level 1 as a view or as copies, and what ``tune`` found."""

from markdown_tables import Record, made_on, number, percent, table

VIEW_FILE, VIEW_COMMAND = "view_or_copy_h200.json", "python scripts/view_or_copy.py --out docs/results"
TUNE_FILE, TUNE_COMMAND = "tune_h200.json", "triforce-tree tune --json"
_SHOWN = ("levels", "gamma", "tree", "budget", "chunk", "refresh", "leaves", "middle_bits")


def view_or_copy(result: Record) -> str:
    """Milliseconds of level 1's passes over the one and the other."""
    columns = ["chosen chunks of level 1", "a pass that chooses anew, ms", "one that does not, ms"]
    lines = [
        [row["level_1"], number(row["stage_ms"]["choose"]), number(row["stage_ms"]["middle"])]
        for row in result["rows"]
    ]
    own = result["options"]
    note = (
        f"{result['shapes'][0]} inflated, {result['rows'][0]['context']:,} tokens, budget {own['budget']:,}, "
        f"chunk {own['chunk']}, {own['middle_bits']} bits; in the order of the runs."
    )
    return table(columns, lines) + f"\n{note} {made_on(result, VIEW_FILE)}"


def tuned(result: Record) -> str:
    """What a search for settings came to."""
    columns = ["prompt", "T", "alone, ms/token", "tuned", "speed-up", "repeated 8-grams", "settings"]
    lines = [
        [
            f"{entry['context']:,}",
            f"{entry['temperature']:g}",
            number(entry["plain_ms_per_token"]),
            number(entry["ms_per_token"]),
            number(entry["speedup"], "x"),
            percent(entry["repeated_8grams"]),
            " ".join(f"{name}={entry['options'][name]}" for name in _SHOWN if name in entry["options"]),
        ]
        for entry in result["entries"]
    ]
    return table(columns, lines) + f"\n{result['target']}. {made_on(result, TUNE_FILE)}"

"""The table of docs/offloading.md about many resident pieces, from docs/results/resident_h200.json."""

from markdown_tables import Record, table

FILE = "resident_h200.json"
COMMAND = "python scripts/bench_resident.py"


def resident(result: Record) -> str:
    """Passes with pieces on the device one by one, and together."""
    rows = result["rows"]
    columns = [
        "of the rows on the device", "on the bus, ms", "one row: a piece a call", "pieces together",
        "a chain: a piece a call", "pieces together",
    ]  # fmt: skip
    lines = []
    for share in dict.fromkeys(row["share"] for row in rows):
        alone, together = sorted((row for row in rows if row["share"] == share), key=lambda r: r["together"])
        lines.append(
            [
                f"{100 * share:.0f} %",
                f"{together['bus_ms']:.0f}",
                f"{alone['plain_ms']:.0f}",
                f"**{together['plain_ms']:.0f}**",
                f"{alone['verify_ms']:.0f}",
                f"**{together['verify_ms']:.0f}**",
            ]
        )
    most = max(row["together"] for row in rows)
    note = (
        f"llama-2-7b inflated, {result['context']:,} tokens, milliseconds a pass, medians of "
        f"{result['passes']}; up to {most} pieces together. {result['hardware']}, bus "
        f"{result['bus']['in']:.1f} GB/s, torch {result['versions']['torch']}, {result['date']}. File: "
        f"`docs/results/{FILE}`.\n"
    )
    return table(columns, lines) + "\n" + note

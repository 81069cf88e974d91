"""Tables of docs/kernel.md about other GPUs than the measured one: what fits them, what their tiles cost."""

from statistics import median

from markdown_tables import Record, made_on, table

from triforce_tree.kernels.device import KNOWN

FITS, TILES = "kernels_by_arch.json", "tiles_h200.json"
CARDS = {
    "sm_80": "A100", "sm_86": "RTX 3090", "sm_89": "RTX 4090", "sm_90": "H100, H200", "sm_100": "B200",
    "sm_120": "RTX 5090", "gfx90a": "MI250X", "gfx942": "MI300X", "gfx1100": "RX 7900 XTX",
}  # fmt: skip


def fits(result: Record) -> str:
    """By architecture: how many kernels compile, the most shared memory, the most spilled bytes."""
    lines = []
    for arch, device in KNOWN.items():
        rows = [row for row in result["rows"] if row["arch"] == arch]
        largest = max(rows, key=lambda row: row["shared_bytes"])
        spilling = max(rows, key=lambda row: row["spill_bytes"])
        few = sum(row["spill_bytes"] > 64 for row in rows)
        worst = f"{spilling['spill_bytes']:,} ({spilling['kernel'].strip('_')}, {spilling['variant']})"
        lines.append(
            [
                arch, CARDS[arch], str(len(rows)), f"{device.shared_bytes:,}", f"{largest['shared_bytes']:,}",
                str(few), worst if few else "-",
            ]
        )  # fmt: skip
    columns = [
        "architecture", "such as", "kernels compiled", "shared memory of a block", "most asked for",
        "spill over 64 B", "worst spill of a thread, bytes",
    ]  # fmt: skip
    note = (
        f"Every variant of `scripts/kernel_variants.py`, compiled ahead of time by Triton {result['triton']} "
        f"and its assembler; of these cards only sm_90 has run them. Commit {result['commit']}, "
        f"{result['date']}. File: `docs/results/{FITS}`.\n"
    )
    return table(columns, lines, left=2) + "\n" + note


def tiles(result: Record) -> str:
    """Microseconds with the tiles of other GPUs, as a multiple of those with this one's own."""
    others = list(dict.fromkeys(row["device"] for row in result["rows"] if row["device"] != "own"))
    cells = list(dict.fromkeys(row["cell"] for row in result["rows"]))
    found = {(row["cell"], row["device"]): row for row in result["rows"]}
    lines = [
        [
            cell,
            f"{found[cell, 'own']['us']:.1f}",
            *(f"{found[cell, other]['times_own']:.2f}x" for other in others),
        ]
        for cell in cells
    ]
    middle = [median(found[cell, other]["times_own"] for cell in cells) for other in others]
    lines.append(["median", "", *(f"**{ratio:.2f}x**" for ratio in middle)])
    columns = ["kernel", "own tiles, us", *(f"as {other} ({CARDS[other]})" for other in others)]
    note = "Measured on an H200 that was told to be these cards; times on the cards themselves are unknown. "
    return table(columns, lines) + "\n" + note + made_on(result, TILES)

"""The table of docs/offloading.md about several cards, from docs/results/offload_parallel_h200.json."""

from collections.abc import Sequence

from markdown_tables import Record, origin, percent, table

FILE = "offload_parallel_h200.json"
COMMAND = "torchrun --nproc-per-node 2 scripts/bench_parallel.py"


def speed(result: Record) -> str:
    """Speed, and what each card's link did while level 2's passes streamed."""
    columns = [
        "model", "cards", "prompts", "cap a card, GiB", "T", "**ms/token**", "streamed plain decoding",
        "each link while it streams, GB/s", "alone", "**speed-up**", "tokens a pass", "repeated 8-grams",
        "greedy tokens compared", "partings",
    ]  # fmt: skip
    lines = []
    for row in result["rows"]:
        plain, exact = row["baseline_ms_per_token"], row.get("exact")
        lines.append(
            [
                row["shape"],
                str(row["gpus"]),
                f"{row['prompts']} x {row['context']:,}",
                f"{row['gpu_memory_cap_gib']:g}",
                f"{row['temperature']:g}",
                f"**{row['ms_per_token']:.1f}**",
                f"{plain:.0f}" if plain else "",
                _rates(row["baseline_pcie_gbps_by_rank"]),
                _rates(row["bus_gbps_by_rank"]),
                f"**{row['speedup']:.1f}x**" if row["speedup"] else "",
                f"{row['tokens_per_pass']:.1f}",
                percent(row["repeated_8grams"]),
                str(exact["compared"]) if exact else "",
                str(exact["partings"]) if exact else "",
            ]
        )
    return table(columns, lines) + "\n" + origin(result, result["rows"], FILE, _bus)


def _rates(rates: Sequence[float]) -> str:
    return " + ".join(f"{rate:.1f}" for rate in rates)


def _bus(part: Record) -> str:
    return f"links alone, all at once: {_rates(part['bus_gbps_by_rank'])} GB/s"

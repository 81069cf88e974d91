"""Tables and the picture of docs/kernel.md from the results of scripts/bench_tree_attention.py."""

from pathlib import Path
from typing import Any

from markdown_tables import table

SHORT = {
    "SDPA dense mask": "SDPA",
    "FlexAttention": "Flex",
    "FlashInfer fa2 full mask": "FI full mask",
    "FlashInfer fa2 cascade": "FI cascade",
    "FlashInfer XQA": "FI XQA",
    "FlashInfer decode": "FI decode",
}
# The aims, in microseconds: (query heads, KV heads, prefix, tree) of one sequence.
AIMS = {
    (32, 32, 122880, 16): 470,
    (32, 32, 122880, 64): 480,
    (32, 8, 122880, 1): 122,
    (32, 8, 122880, 16): 127,
    (32, 8, 122880, 64): 250,
    (32, 8, 32768, 16): 40,
    (32, 8, 32768, 64): 70,
    (32, 32, 4096, 16): 19,
    (32, 8, 4096, 64): 14,
}


def _us(value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def cells(result: dict[str, Any]) -> str:
    """Every cell beside its peers, and under what conditions."""
    rows, ceilings = result["rows"], result["ceilings"]
    names = [name for name in SHORT if any(name in row["peers"] for row in rows)]
    columns = ["Hq/Hkv", "L", "T", "batch", "**ours**", "roof", "% of roof", "best peer / ours", "error"]
    lines = []
    for row in rows:
        best = min(row["peers"].values(), default=None)
        lines.append(
            [
                f"{row['hq']}/{row['hkv']}",
                f"{row['l']:,}",
                str(row["t"]),
                str(row["batch"]),
                f"**{_us(row['ours_us'])}**",
                _us(row["roof_us"]),
                f"{row['percent_of_roof']:.0f}",
                "-" if best is None else f"{best / row['ours_us']:.2f}",
                f"{row['error_ratio']:.2f}",
                *(_us(row["peers"].get(name)) for name in names),
            ]
        )
    slower = sum(min(row["peers"].values(), default=row["ours_us"]) < row["ours_us"] for row in rows)
    ahead = (
        "Ours is ahead of every peer measured in every cell."
        if not slower
        else f"In {slower} of {len(rows)} cells a peer is faster."
    )
    flashinfer = f", FlashInfer {result['flashinfer']}" if result.get("flashinfer") else ""
    reading, matmul = ceilings["read_bandwidth"] / 1e12, ceilings["matmul_rate"] / 1e12
    note = (
        f"{result['gpu']}, torch {result['torch']}, Triton {result['triton']}{flashinfer}; read bandwidth "
        f"{reading:.2f} TB/s, bf16 matmul {matmul:.0f} TFLOP/s, "
        f"measured in the same run. {ahead} File: `docs/results/tree_attention_h200.json`.\n"
    )
    return table([*columns, *(SHORT[name] for name in names)], lines) + "\n" + note


def aims(result: dict[str, Any]) -> str:
    """What was aimed for and what was reached, with the fastest peer of the same run."""
    lines = []
    for row in result["rows"]:
        aim = AIMS.get((row["hq"], row["hkv"], row["l"], row["t"]))
        if aim is None or row["batch"] > 1:
            continue
        ours = row["ours_us"]
        peer = min(row["peers"], key=row["peers"].__getitem__)
        cell = f"{row['hq']}/{row['hkv']}, L = {row['l']:,}, T = {row['t']}"
        verdict = "yes" if ours <= aim else f"missed by {100 * (ours / aim - 1):.0f}%"
        longer = f"{peer}: {100 * (row['peers'][peer] / ours - 1):+.0f}%"
        lines.append([cell, str(aim), _us(ours), verdict, longer])
    return table(["cell", "aim", "ours", "reached", "fastest peer, time against ours"], lines)


def layouts(result: dict[str, Any]) -> str:
    made: dict[str, dict[str, float]] = {}
    for row in result["layouts"]:
        made.setdefault(row["layout"], {})[row["cell"].partition(" ")[2]] = row["us"]
    heads = {"heads": "`[H, S, D]`", "rows": "`[S, H, D]`"}
    sizes = list(dict.fromkeys(cell for found in made.values() for cell in found))
    lines = [
        [heads.get(name, name.replace("page", "pages of")), *(_us(found.get(cell)) for cell in sizes)]
        for name, found in made.items()
    ]
    return table(["layout", *sizes], lines)


def splits(result: dict[str, Any]) -> str:
    """Microseconds, and in brackets milliseconds of the host's plan."""
    names = list(dict.fromkeys(name for row in result["splits"] for name in row["us"]))
    lines = []
    for row in result["splits"]:
        line = [row["tree"], _us(row["roof_us"])]
        for name in names:
            took, plan = row["us"].get(name), row["plan_ms"].get(name)
            line.append(_us(took) + (f" ({plan:,.1f})" if plan is not None else ""))
        lines.append(line)
    return table(["tree", "roof (KV once)", *names], lines)


def costs(result: dict[str, Any]) -> str:
    """What a plan costs the host, and the bytes it counts beside those of the hardware."""
    plan = result["plan"]
    lines = [
        ["plan a tree of 64, host", f"{plan['plan_us']:.0f} µs"],
        ["update of mask and lengths from host tensors", f"{plan['update_from_host_us']:.0f} µs"],
        ["update from device tensors", f"{plan['update_from_device_us']:.0f} µs"],
    ]
    for row in result["counters"]:
        lines.append(
            [
                f"{row['cell']}: bytes counted / read from memory / through L2",
                f"{row['counted_kv_and_queries'] / 1e6:.1f} / {row['dram_bytes_read'] / 1e6:.1f} / "
                f"{row['l2_bytes'] / 1e6:.1f} MB",
            ]
        )
    return table(["", "measured"], lines)


def gate(result: dict[str, Any]) -> str:
    found = result["gate"]
    every = found["replays"]
    lines = [
        ["cases checked / failed", f"{found['cases']} / {len(found['failed'])}"],
        ["worst error in 16 bits, times torch's", str(found.get("worst_error_ratio", "-"))],
        ["worst error in fp32, times torch's", str(found.get("worst_error_ratio_fp32", "-"))],
        ["graph replays / elements that differ", f"{every['replays']:,} / {every['different_elements']}"],
    ]
    return table(["gate", "of the same run"], lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = ["ours", *(name for name in SHORT if any(name in row["peers"] for row in rows))]
    figure, axis = plt.subplots(figsize=(11, 4.5))
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        took = [row["ours_us"] if name == "ours" else row["peers"].get(name) for row in rows]
        known = [at for at, us in enumerate(took) if us is not None]
        heights = [100 * rows[at]["roof_us"] / took[at] for at in known]
        axis.bar([at + index * width for at in known], heights, width, label=name)
    labels = [
        f"{r['hq']}/{r['hkv']}\nL={r['l']}\nT={r['t']}" + (f" x{r['batch']}" if r["batch"] > 1 else "")
        for r in rows
    ]
    axis.set_xticks([i + 0.4 - width / 2 for i in range(len(rows))], labels, fontsize=8)
    axis.set_ylabel("percent of the roof")
    axis.set_title("Tree attention, one layer, bf16, head_dim 128, one H200")
    axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)

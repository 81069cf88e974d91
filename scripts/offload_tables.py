"""Tables of docs/offloading.md from docs/results/offload_h200.json."""

import json
import statistics
from pathlib import Path

import on_chip_tables
from markdown_tables import Record, not_measured, number, origin, percent, rows_of, table

FILE = "offload_h200.json"
COMMAND = "python scripts/bench_offload.py --part"
_STREAMED = ("7b", "8b", "8b-512k", "13b", "resident", "caps")
# Of the card that times are projected to: other ones than those that were measured.
_TILES = "tiles chosen for sm_89 (101,376 bytes of shared memory)"
_HEADLINES = (*_STREAMED, "host-attention", "host-attention-8b")


def headline(result: Record) -> str:
    """Every shape, context and cap beside streamed plain decoding."""
    found = rows_of(result, *_HEADLINES)
    if not found:
        return not_measured(f"{COMMAND} 7b")
    columns = [
        "model", "prompts", "cap, GiB", "host memory, GiB", "rows on the card", "T", "**ms/token**",
        "streamed plain decoding", "its share of the bus", "**speed-up**", "tokens a pass",
        "repeated 8-grams",
    ]  # fmt: skip
    attended = any("attended_baseline_ms_per_token" in row for row in found)
    if attended:
        columns += ["plain decoding with the CPU", "speed-up to the faster of both"]
    lines = []
    for row in found:
        plain, pcie = row["baseline_ms_per_token"], row["baseline_pcie_gbps"]
        lines.append(
            [
                row["shape"] + _remarks(row),
                f"{row['prompts']} x {row['context']:,}",
                f"{row['gpu_memory_cap_gib']:g}",
                f"{_host_gib(row):.1f}",
                percent(row["resident_gib"], row["resident_gib"] + row["host_gib"]),
                f"{row['temperature']:g}",
                f"**{row['ms_per_token']:.1f}**",
                f"{plain:.0f}" if plain else "",
                f"{pcie:.1f} of {row['bus_gbps']['in']:.1f} GB/s" if pcie else "",
                f"**{row['speedup']:.1f}x**" if row["speedup"] else "",
                f"{row['tokens_per_pass']:.1f}",
                percent(row["repeated_8grams"]),
                *(_attended(row) if attended else ()),
            ]
        )
    return table(columns, lines) + "\n" + origin(result, found, FILE, _bus)


def memory(result: Record) -> str:
    """Where the bytes were, and the allocator's own peak."""
    found = {(r["shape"], r["context"], r["gpu_memory_cap_gib"]): r for r in rows_of(result, *_STREAMED)}
    if not found:
        return not_measured(f"{COMMAND} 7b")
    uses = list(dict.fromkeys(use for r in found.values() for use in r["memory_plan"]["device_gib"]))
    lines = []
    for use in uses:
        sizes = [r["memory_plan"]["device_gib"].get(use, 0.0) for r in found.values()]
        if max(sizes) >= 0.005:
            lines.append([use, *(f"{size:.2f}" for size in sizes)])
    rows = list(found.values())
    lines.append(["**measured peak**", *(f"**{r['peak_gpu_gib']:.2f}**" for r in rows)])
    lines.append(["rows on the host", *(f"{r['host_gib']:.1f}" for r in rows)])
    weights = [r.get("weights_on_host_gib", 0.0) for r in rows]
    if any(weights):
        lines.append(["weights on the host", *(f"{size:.1f}" for size in weights)])
    lines.append(["**host memory**", *(f"**{_host_gib(r):.1f}**" for r in rows)])
    columns = [
        "GiB", *(f"{r['shape'].split()[0]}, {r['context']:,}, cap {r['gpu_memory_cap_gib']:g}" for r in rows)
    ]  # fmt: skip
    return table(columns, lines)


def levels(result: Record) -> str:
    """What a pass consists of, and what each level accepts."""
    found = rows_of(result, *_HEADLINES)
    if not found:
        return not_measured(f"{COMMAND} 7b")
    columns = [
        "model, context, cap", "T", "rounds a pass", "grow, ms", "choose, ms", "level 2, ms",
        "of it on the bus", "retrieval accepts", "target accepts", "greedy tokens compared", "partings",
    ]  # fmt: skip
    lines = []
    for row in found:
        stages, rate, exact = row["stages"], row["acceptance"], row.get("exact")
        full = stages.get("full")
        bus = row["streamed_gib"] * 2**30 / 1e6 / row["bus_gbps"]["in"]
        lines.append(
            [
                f"{row['shape'].split()[0]}, {row['context']:,}, {row['gpu_memory_cap_gib']:g} GiB"
                + _attention(row),
                f"{row['temperature']:g}",
                f"{row['rounds_per_pass']:.1f}",
                number(stages.get("grow")),
                number(stages.get("choose")),
                number(full),
                percent(bus, full) if full else "",
                number(rate.get("retrieval")),
                number(rate.get("target")),
                str(exact["compared"]) if exact else "",
                str(exact["partings"]) if exact else "",
            ]
        )
    return table(columns, lines)


def prefill(result: Record) -> str:
    """Feeding the same prompts, with the cache on the device and offloaded."""
    together = rows_of(result, "prefill")
    found = together or _prefills_apart(result)
    if not found:
        return not_measured(f"{COMMAND} prefill")
    columns = ["model", "tokens", "on the device, s", "offloaded, s", "ratio"]
    lines = [
        [
            row["shape"], f"{row['context']:,}", f"{row['on_chip_prefill_seconds']:.1f}",
            f"{row['prefill_seconds']:.1f}", f"{row['ratio']:.2f}x",
        ]
        for row in found
    ]  # fmt: skip
    near = "" if together else f"On the device: `docs/results/{on_chip_tables.FILE}`. "
    return table(columns, lines) + f"\n{near}Offloaded: " + origin(result, found, FILE, _bus)


def _prefills_apart(result: Record) -> list[Record]:
    """The same from a run for each, where both fed the same prompts: medians over them."""
    path = Path(__file__).parents[1] / "docs" / "results" / on_chip_tables.FILE
    other = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"parts": {}}
    found = []
    for part in _HEADLINES:
        near, far = (_prefill_seconds(r["parts"].get(part)) for r in (other, result))
        both = near.keys() & far.keys()
        if both:
            row = rows_of(result, part)[0]
            seconds = [statistics.median(s[key] for key in both) for s in (near, far)]
            figures = {"on_chip_prefill_seconds": seconds[0], "prefill_seconds": seconds[1]}
            found.append(row | figures | {"ratio": seconds[1] / seconds[0]})
    return found


def _prefill_seconds(part: Record | None) -> dict[tuple[str, int, int], float]:
    """By prompt, its length and the batch."""
    return {
        (s["prompt"], s["context"], s["batch"]): s["prefill_seconds"]
        for s in (part or {"samples": []})["samples"]
        if s.get("prefill_seconds")
    }


def projections(result: Record) -> str:
    """The same on a smaller card, by the cost model; not measured."""
    found = [r for r in rows_of(result, *_HEADLINES) if "projection" in r and r["gpu_memory_cap_gib"] <= 24]
    if not found:
        return not_measured(f"{COMMAND} 7b")
    columns = [
        f"projected by the cost model, not measured; kernels with the {_TILES}", "cap, GiB", "card", "T",
        "ms/token", "streamed plain decoding", "speed-up",
    ]  # fmt: skip
    lines = []
    for row in found:
        there = row["projection"]
        lines.append(
            [
                f"{row['shape'].split()[0]}, {row['context']:,}",
                f"{row['gpu_memory_cap_gib']:g}",
                there["card"],
                f"{row['temperature']:g}",
                f"{there['ms_per_token']:.0f}",
                f"{there['baseline_ms_per_token']:.0f}",
                f"{there['speedup']:.1f}x",
            ]
        )
    return table(columns, lines)


TABLES = (headline, memory, levels, prefill, projections)


def _host_gib(row: Record) -> float:
    """What was page-locked: rows, weights, hidden states while the prompt was fed."""
    fed = row["memory_plan"]["host_gib"].get("hidden states of prefill", 0.0)
    return float(row["host_gib"] + row.get("weights_on_host_gib", 0.0) + fed)


def _remarks(row: Record) -> str:
    """The embedded pair knows 131,072 positions; beyond them texts are of no use, times are."""
    lifted = ", position limit lifted" if row["context"] > 131_072 else ""
    weights = ", weights on the host" if row.get("weights_on_host_gib") else ""
    return lifted + weights + _attention(row)


def _attention(row: Record) -> str:
    return ", with attention on the CPU" if row.get("host_share") else ""


def _attended(row: Record) -> tuple[str, str]:
    """The second baseline, and the speed-up to the faster one; nothing where there is one alone."""
    if "attended_baseline_ms_per_token" not in row:
        return "", ""
    return f"{row['attended_baseline_ms_per_token']:.0f}", f"**{row['speedup_to_fastest_baseline']:.1f}x**"


def _bus(part: Record) -> str:
    bus = part["bus_gbps"]
    return f"bus {bus['in']:.1f} GB/s in and {bus['out']:.1f} out, measured in the same run"

"""Tables of docs/offloading.md and docs/benchmarks.md from the results of the offloaded cache."""

from collections.abc import Sequence
from functools import partial

from scripts.benchmarks.common.markdown import (
    Columns,
    Record,
    Rows,
    Table,
    cell,
    file_note,
    grid,
    listing,
    made_on,
    origin,
    rows_of,
)

FILE, PARALLEL = "offload_h200.json", "offload_parallel_h200.json"
RESIDENT, VIEW_OR_COPY, TUNED = "resident_h200.json", "view_or_copy_h200.json", "tune_h200.json"
_STREAMED = ("7b", "8b", "8b-512k", "13b", "resident", "caps")
_HEADLINES = (*_STREAMED, "host-attention", "host-attention-8b")
# Of the card that times are projected to: other ones than those that were measured.
_TILES = "tiles chosen for sm_89 (101,376 bytes of shared memory)"

HEADLINE: Columns = {
    "model": "{shape}{remarks}", "prompts": "{prompts} x {context:,}",
    "cap, GiB": "{gpu_memory_cap_gib:g}", "host memory, GiB": "{locked_gib:.1f}",
    "rows on the card": "{near:pct}", "T": "{temperature:g}", "**ms/token**": "**{ms_per_token:.1f}**",
    "streamed plain decoding": "?{baseline_ms_per_token:.0f}",
    "its share of the bus": "?{baseline_pcie_gbps:.1f} of {bus_gbps[in]:.1f} GB/s",
    "**speed-up**": "?**{speedup:.1f}x**", "tokens a pass": "{tokens_per_pass:.1f}",
    "repeated 8-grams": "{repeated_8grams:pct}",
}  # fmt: skip
ATTENDED: Columns = {
    "plain decoding with the CPU": "?{attended_baseline_ms_per_token:.0f}",
    "speed-up to the faster of both": "?**{speedup_to_fastest_baseline:.1f}x**",
}  # fmt: skip
LEVELS: Columns = {
    "model, context, cap": "{model}, {context:,}, {gpu_memory_cap_gib:g} GiB{attention}",
    "T": "{temperature:g}", "rounds a pass": "{rounds_per_pass:.1f}", "grow, ms": "?{stages[draft]:.2f}",
    "choose, ms": "?{stages[retrieval_refresh]:.2f}", "level 2, ms": "?{stages[target]:.2f}",
    "of it on the bus": "?{on_bus:pct}", "retrieval accepts": "?{acceptance[retrieval]:.2f}",
    "target accepts": "?{acceptance[target]:.2f}", "greedy tokens compared": "?{exact[compared]}",
    "partings": "?{exact[partings]}",
}  # fmt: skip
PREFILL: Columns = {
    "model": "{shape}", "tokens": "{context:,}", "on the device, s": "{on_chip_prefill_seconds:.1f}",
    "offloaded, s": "{prefill_seconds:.1f}", "ratio": "{prefill_ratio:.2f}x",
}  # fmt: skip
PROJECTIONS: Columns = {
    f"projected by the cost model, not measured; kernels with the {_TILES}": "{model}, {context:,}",
    "cap, GiB": "{gpu_memory_cap_gib:g}", "card": "{projection[card]}", "T": "{temperature:g}",
    "ms/token": "{projection[ms_per_token]:.0f}",
    "streamed plain decoding": "{projection[baseline_ms_per_token]:.0f}",
    "speed-up": "{projection[speedup]:.1f}x",
}  # fmt: skip
PARALLEL_SPEED: Columns = {
    "model": "{shape}", "cards": "{gpus}", "prompts": "{prompts} x {context:,}",
    "cap a card, GiB": "{gpu_memory_cap_gib:g}", "T": "{temperature:g}",
    "**ms/token**": "**{ms_per_token:.1f}**", "streamed plain decoding": "?{baseline_ms_per_token:.0f}",
    "each link while it streams, GB/s": lambda row: _rates(row["baseline_pcie_gbps_by_rank"]),
    "alone": lambda row: _rates(row["bus_gbps_by_rank"]), "**speed-up**": "?**{speedup:.1f}x**",
    "tokens a pass": "{tokens_per_pass:.1f}", "repeated 8-grams": "{repeated_8grams:pct}",
    "greedy tokens compared": "?{exact[compared]}", "partings": "?{exact[partings]}",
}  # fmt: skip
RESIDENT_PASSES: Columns = {
    "of the rows on the device": "{share:pct}", "on the bus, ms": "{bus_ms:.0f}",
    "one row: a piece a call": "{alone[plain_ms]:.0f}", "pieces together": "**{plain_ms:.0f}**",
    "a chain: a piece a call": "{alone[verify_ms]:.0f}", "pieces together ": "**{verify_ms:.0f}**",
}  # fmt: skip
_RESIDENT_NOTE = (
    "llama-2-7b inflated, {context:,} tokens, milliseconds a pass, medians of {passes}; up to {most} pieces "
    "together. {hardware}, bus {bus[in]:.1f} GB/s, torch {versions[torch]}, {date}. "
)
VIEWS: Columns = {
    "chosen chunks of level 1": "{level_1}",
    "a pass that chooses anew, ms": "{stage_ms[retrieval_refresh]:.2f}",
    "one that does not, ms": "{stage_ms[retrieval]:.2f}",
}
_VIEW_NOTE = (
    "{shapes[0]} inflated, {rows[0][context]:,} tokens, budget {options[budget]:,}, chunk {options[chunk]}, "
    "{options[retrieval_weight_bits]} bits; in the order of the runs. "
)
_OPTIONS = ("levels", "gamma", "tree", "budget", "chunk", "refresh", "runner_ups", "retrieval_weight_bits")
TUNING: Columns = {
    "prompt": "{context:,}", "T": "{temperature:g}", "alone, ms/token": "{plain_ms_per_token:.2f}",
    "tuned": "{ms_per_token:.2f}", "speed-up": "{speedup:.2f}x", "repeated 8-grams": "{repeated_8grams:pct}",
    "settings": lambda row: " ".join(f"{k}={row['options'][k]}" for k in _OPTIONS if k in row["options"]),
}  # fmt: skip


def _rows(content: Record, parts: Sequence[str] = _HEADLINES) -> list[Record]:
    """Rows of speeds, with what several tables say of them."""
    found = []
    for row in (row for row in rows_of(content, *parts) if "ms_per_token" in row):
        attention = ", with attention on the CPU" if row.get("host_share") else ""
        weights = row.get("weights_on_host_gib") or 0.0
        more = {"model": row["shape"].split()[0], "attention": attention}
        more["near"] = row["resident_gib"] / (row["resident_gib"] + row["host_gib"])
        # What was page-locked: keys and values, weights, hidden states during prefill.
        states = row["memory_plan"]["host_gib"].get("hidden states of prefill", 0.0)
        more["locked_gib"] = row["host_gib"] + weights + states
        # The embedded pair knows 131,072 positions; beyond them its times count, and its texts do not.
        lifted = ", position limit lifted" if row["context"] > 131_072 else ""
        more["remarks"] = lifted + (", weights on the host" if weights else "") + attention
        if row["stages"].get("target"):
            bus = row["streamed_gib"] * 2**30 / 1e6 / row["bus_gbps"]["in"]
            more["on_bus"] = bus / row["stages"]["target"]
        found.append(row | more)
    return found


def _bus(part: Record) -> str:
    bus = part["bus_gbps"]
    return f"bus {bus['in']:.1f} GB/s in and {bus['out']:.1f} out, measured in the same run"


def _rates(rates: Sequence[float]) -> str:
    return " + ".join(f"{rate:.1f}" for rate in rates)


def _links(part: Record) -> str:
    return f"links alone, all at once: {_rates(part['bus_gbps_by_rank'])} GB/s"


_origin = partial(origin, file=FILE, measured=_bus)


def headline(content: Record) -> str | None:
    """Every shape, context and cap beside streamed plain decoding."""
    attended = any("attended_baseline_ms_per_token" in row for row in _rows(content))
    return listing({**HEADLINE, **(ATTENDED if attended else {})}, _rows, _origin)(content)


def memory(content: Record) -> str | None:
    """Where the bytes were, and the allocator's own peak."""
    rows = {
        (r["shape"], r["context"], r["gpu_memory_cap_gib"]): r for r in _rows(content, _STREAMED)
    }.values()
    if not rows:
        return None
    heads = ["GiB", *(f"{r['model']}, {r['context']:,}, cap {r['gpu_memory_cap_gib']:g}" for r in rows)]
    lines = []
    for use in dict.fromkeys(use for r in rows for use in r["memory_plan"]["device_gib"]):
        sizes = [r["memory_plan"]["device_gib"].get(use, 0.0) for r in rows]
        if max(sizes) >= 0.005:
            lines.append([use, *(f"{size:.2f}" for size in sizes)])
    weights = any(r.get("weights_on_host_gib") for r in rows)
    for name, template in (
        ("**measured peak**", "**{peak_gpu_gib:.2f}**"), ("rows on the host", "{host_gib:.1f}"),
        *([("weights on the host", "{weights_on_host_gib:.1f}")] if weights else []),
        ("**host memory**", "**{locked_gib:.1f}**"),
    ):  # fmt: skip
        lines.append([name, *(cell(template, {"weights_on_host_gib": 0.0} | r) for r in rows)])
    return grid(heads, lines)


def _prefill_rows(content: Record) -> list[Record]:
    """Prefill of the same prompts, with the cache on the device and offloaded."""
    together = rows_of(content, "prefill")
    return together or [r for r in rows_of(content, *_HEADLINES) if "on_chip_prefill_seconds" in r]


def _prefill_note(content: Record, rows: list[Record]) -> str:
    file = rows[0].get("on_chip_prefill_file")
    return (
        (f"On the device: `docs/results/{file}`. " if file else "") + "Offloaded: " + _origin(content, rows)
    )


def _projections(content: Record) -> list[Record]:
    return [r for r in _rows(content) if "projection" in r and r["gpu_memory_cap_gib"] <= 24]


def _resident_rows(content: Record) -> list[Record]:
    """Passes with pieces on the device one by one, and together."""
    rows: dict[float, Record] = {}
    for row in sorted(content["rows"], key=lambda row: row["together"]):
        rows[row["share"]] = row | {"alone": rows.get(row["share"])}
    return list(rows.values())


def _resident_note(content: Record, rows: list[Record]) -> str:
    note = cell(_RESIDENT_NOTE, {**content, "most": max(row["together"] for row in rows)})
    return note + _script("bench_resident.py") + file_note(RESIDENT, {"": content})


def _script(name: str) -> str:
    """Of an experiment whose question is decided: where its script is, which is not kept."""
    return f"Script: `scripts/{name}` at commit 8f6c0df275dc. "


def _view_note(content: Record, rows: list[Record]) -> str:
    return cell(_VIEW_NOTE, content) + _script("view_or_copy.py") + made_on(content, VIEW_OR_COPY)


def _in(name: str) -> Rows:
    return lambda content: list(content[name])


levels, prefill = listing(LEVELS, _rows), listing(PREFILL, _prefill_rows, _prefill_note)
_OFFLOAD = {
    "headline": ("7b", headline),
    "memory": ("7b", memory),
    "levels": ("7b", levels),
    "prefill": ("prefill", prefill),
    "projections": ("7b", listing(PROJECTIONS, _projections)),
}
COMMAND = "python -m scripts.benchmarks offload --part"
PARALLEL_COMMAND = "torchrun --nproc-per-node 2 -m scripts.benchmarks parallel"
resident = listing(RESIDENT_PASSES, _resident_rows, _resident_note)
parallel = listing(PARALLEL_SPEED, _in("rows"), partial(origin, file=PARALLEL, measured=_links))
view_or_copy = listing(VIEWS, _in("rows"), _view_note)
tuned = listing(TUNING, _in("entries"), lambda c, _: f"{c['target']}. {made_on(c, TUNED)}")
TABLES = {
    **{f"offload_{name}": Table(FILE, make, f"{COMMAND} {part}") for name, (part, make) in _OFFLOAD.items()},
    "resident": Table(RESIDENT, resident, "git log docs/results/" + RESIDENT),
    "parallel_speed": Table(PARALLEL, parallel, PARALLEL_COMMAND),
    "view_or_copy": Table(VIEW_OR_COPY, view_or_copy, "git log docs/results/" + VIEW_OR_COPY),
    "tuned": Table(TUNED, tuned, "triforce-tree tune --json"),
}

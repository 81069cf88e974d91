"""Tables of docs/offloading.md and docs/benchmarks.md from the results of the offloaded cache."""

from collections.abc import Sequence

from scripts.benchmarks.common.markdown import (
    Columns,
    Record,
    Table,
    cell,
    file_note,
    grid,
    made_on,
    origin,
    rows_of,
    table,
)

FILE, PARALLEL = "offload_h200.json", "offload_parallel_h200.json"
RESIDENT, VIEW_OR_COPY, TUNED = "resident_h200.json", "view_or_copy_h200.json", "tune_h200.json"
COMMAND = "python -m scripts.benchmarks offload --part"
_STREAMED = ("7b", "8b", "8b-512k", "13b", "resident", "caps")
_HEADLINES = (*_STREAMED, "host-attention", "host-attention-8b")
# Of the card that times are projected to: other ones than those that were measured.
_TILES = "tiles chosen for sm_89 (101,376 bytes of shared memory)"

HEADLINE: Columns = {
    "model": lambda row: row["shape"] + _remarks(row), "prompts": "{prompts} x {context:,}",
    "cap, GiB": "{gpu_memory_cap_gib:g}", "host memory, GiB": lambda row: f"{_host_gib(row):.1f}",
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
RESIDENT_PASSES = (
    "of the rows on the device", "on the bus, ms", "one row: a piece a call", "pieces together",
    "a chain: a piece a call", "pieces together",
)  # fmt: skip
_RESIDENT_NOTE = (
    "llama-2-7b inflated, {context:,} tokens, milliseconds a pass, medians of {passes}; up to {most} pieces "
    "together. {hardware}, bus {bus[in]:.1f} GB/s, torch {versions[torch]}, {date}. "
)
VIEWS: Columns = {
    "chosen chunks of level 1": "{level_1}", "a pass that chooses anew, ms": "{stage_ms[retrieval_refresh]:.2f}",
    "one that does not, ms": "{stage_ms[retrieval]:.2f}",
}  # fmt: skip
_VIEW_NOTE = (
    "{shapes[0]} inflated, {rows[0][context]:,} tokens, budget {options[budget]:,}, chunk {options[chunk]}, "
    "{options[retrieval_weight_bits]} bits; in the order of the runs."
)
_OPTIONS = ("levels", "gamma", "tree", "budget", "chunk", "refresh", "runner_ups", "retrieval_weight_bits")
TUNING: Columns = {
    "prompt": "{context:,}", "T": "{temperature:g}", "alone, ms/token": "{plain_ms_per_token:.2f}",
    "tuned": "{ms_per_token:.2f}", "speed-up": "{speedup:.2f}x", "repeated 8-grams": "{repeated_8grams:pct}",
    "settings": lambda row: " ".join(f"{k}={row['options'][k]}" for k in _OPTIONS if k in row["options"]),
}  # fmt: skip


def _rows(content: Record, *parts: str) -> list[Record]:
    """Rows of speeds, with what several tables say of them."""
    found = []
    for row in rows_of(content, *parts):
        if "ms_per_token" not in row:
            continue
        more = {"model": row["shape"].split()[0], "attention": _attention(row)}
        more["near"] = row["resident_gib"] / (row["resident_gib"] + row["host_gib"])
        if row["stages"].get("target"):
            bus = row["streamed_gib"] * 2**30 / 1e6 / row["bus_gbps"]["in"]
            more["on_bus"] = bus / row["stages"]["target"]
        found.append(row | more)
    return found


def headline(content: Record) -> str | None:
    """Every shape, context and cap beside streamed plain decoding."""
    rows = _rows(content, *_HEADLINES)
    if not rows:
        return None
    attended = ATTENDED if any("attended_baseline_ms_per_token" in row for row in rows) else {}
    return table({**HEADLINE, **attended}, rows) + "\n" + origin(content, rows, FILE, _bus)


def memory(content: Record) -> str | None:
    """Where the bytes were, and the allocator's own peak."""
    rows = list(
        {(r["shape"], r["context"], r["gpu_memory_cap_gib"]): r for r in _rows(content, *_STREAMED)}.values()
    )
    if not rows:
        return None
    lines = []
    for use in dict.fromkeys(use for r in rows for use in r["memory_plan"]["device_gib"]):
        sizes = [r["memory_plan"]["device_gib"].get(use, 0.0) for r in rows]
        if max(sizes) >= 0.005:
            lines.append([use, *(f"{size:.2f}" for size in sizes)])
    lines.append(["**measured peak**", *(f"**{r['peak_gpu_gib']:.2f}**" for r in rows)])
    lines.append(["rows on the host", *(f"{r['host_gib']:.1f}" for r in rows)])
    weights = [r.get("weights_on_host_gib", 0.0) for r in rows]
    if any(weights):
        lines.append(["weights on the host", *(f"{size:.1f}" for size in weights)])
    lines.append(["**host memory**", *(f"**{_host_gib(r):.1f}**" for r in rows)])
    return grid(
        ["GiB", *(f"{r['model']}, {r['context']:,}, cap {r['gpu_memory_cap_gib']:g}" for r in rows)], lines
    )


def levels(content: Record) -> str | None:
    """What a pass consists of, and what each level accepts."""
    rows = _rows(content, *_HEADLINES)
    return table(LEVELS, rows) if rows else None


def prefill(content: Record) -> str | None:
    """Feeding the same prompts, with the cache on the device and offloaded."""
    together = rows_of(content, "prefill")
    rows = together or [r for r in rows_of(content, *_HEADLINES) if "on_chip_prefill_seconds" in r]
    if not rows:
        return None
    near = "" if together else f"On the device: `docs/results/{rows[0]['on_chip_prefill_file']}`. "
    return table(PREFILL, rows) + f"\n{near}Offloaded: " + origin(content, rows, FILE, _bus)


def projections(content: Record) -> str | None:
    """The same on a smaller card, by the cost model; not measured."""
    rows = [r for r in _rows(content, *_HEADLINES) if "projection" in r and r["gpu_memory_cap_gib"] <= 24]
    return table(PROJECTIONS, rows) if rows else None


def parallel(content: Record) -> str:
    """Speed, and what each card's link did while level 2's passes streamed."""
    rows = content["rows"]
    return table(PARALLEL_SPEED, rows) + "\n" + origin(content, rows, PARALLEL, _links)


def resident(content: Record) -> str:
    """Passes with pieces on the device one by one, and together."""
    rows = []
    for share in dict.fromkeys(row["share"] for row in content["rows"]):
        here = sorted((r for r in content["rows"] if r["share"] == share), key=lambda r: r["together"])
        rows.append(here[1] | {"alone": here[0]})
    lines = [
        [f"{100 * r['share']:.0f} %", f"{r['bus_ms']:.0f}"]
        + [
            text
            for key in ("plain_ms", "verify_ms")
            for text in (f"{r['alone'][key]:.0f}", f"**{r[key]:.0f}**")
        ]
        for r in rows
    ]
    note = cell(_RESIDENT_NOTE, {**content, "most": max(row["together"] for row in rows)})
    return grid(RESIDENT_PASSES, lines) + "\n" + note + file_note(RESIDENT, {"": content})


def view_or_copy(content: Record) -> str:
    """Milliseconds of level 1's passes over a view of the cache, and over copies."""
    note = cell(_VIEW_NOTE, content)
    return table(VIEWS, content["rows"]) + f"\n{note} {made_on(content, VIEW_OR_COPY)}"


def tuned(content: Record) -> str:
    """What a search for settings came to."""
    return table(TUNING, content["entries"]) + f"\n{content['target']}. {made_on(content, TUNED)}"


_MAKERS = {"headline": "7b", "memory": "7b", "levels": "7b", "prefill": "prefill", "projections": "7b"}
TABLES = {
    **{
        f"offload_{name}": Table(FILE, globals()[name], f"{COMMAND} {part}") for name, part in _MAKERS.items()
    },
    "resident": Table(RESIDENT, resident, "python -m scripts.benchmarks resident"),
    "parallel_speed": Table(PARALLEL, parallel, "torchrun --nproc-per-node 2 -m scripts.benchmarks parallel"),
    "view_or_copy": Table(VIEW_OR_COPY, view_or_copy, "python -m scripts.benchmarks view_or_copy"),
    "tuned": Table(TUNED, tuned, "triforce-tree tune --json"),
}


def _host_gib(row: Record) -> float:
    """What was page-locked: rows, weights, hidden states while the prompt was fed."""
    fed = row["memory_plan"]["host_gib"].get("hidden states of prefill", 0.0)
    return float(row["host_gib"] + row.get("weights_on_host_gib", 0.0) + fed)


def _remarks(row: Record) -> str:
    """The embedded pair knows 131,072 positions; beyond them texts are of no use, times are."""
    lifted = ", position limit lifted" if row["context"] > 131_072 else ""
    return lifted + (", weights on the host" if row.get("weights_on_host_gib") else "") + _attention(row)


def _attention(row: Record) -> str:
    return ", with attention on the CPU" if row.get("host_share") else ""


def _bus(part: Record) -> str:
    bus = part["bus_gbps"]
    return f"bus {bus['in']:.1f} GB/s in and {bus['out']:.1f} out, measured in the same run"


def _links(part: Record) -> str:
    return f"links alone, all at once: {_rates(part['bus_gbps_by_rank'])} GB/s"


def _rates(rates: Sequence[float]) -> str:
    return " + ".join(f"{rate:.1f}" for rate in rates)

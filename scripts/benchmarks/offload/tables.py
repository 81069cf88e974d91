"""Tables of docs/results/ from the results of the offloaded cache."""

import re
import statistics
from collections.abc import Sequence
from functools import partial

from scripts.benchmarks.common.markdown import (
    Columns,
    Record,
    Table,
    cell,
    file_note,
    listing,
    origin,
    rows_of,
)
from scripts.benchmarks.texts.tables import ANY_TEXT
from scripts.benchmarks.texts.tables import COMMAND as ANY_TEXT_COMMAND
from triforce_tree.bench.tables import grid

FILE, PARALLEL = "offload_h200.jsonl", "offload_parallel_h200.jsonl"
_STREAMED = ("7b", "8b", "8b-512k", "13b", "resident", "caps")
_HEADLINES = (*_STREAMED, "host-attention", "host-attention-8b")

HEADLINE: Columns = {
    "model": "{shape}{remarks}", "prompts": "{prompts} x {context:,}",
    "cap, GiB": "{gpu_memory_cap_gib:g}", "host memory, GiB": "{locked_gib:.1f}",
    "KV slots on the card": "{near:pct}", "T": "{temperature:g}", "**ms/token**": "**{ms_per_token:.1f}**",
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
    "differences": "?{exact[partings]}",
}  # fmt: skip
PREFILL: Columns = {
    "model": "{model}", "tokens": "{context:,}", "limit": "{limit}", "texts": "{offloaded[texts]}",
    "on the device, s": "{device[median]:.2f} ({device[least]:.2f} to {device[most]:.2f})",
    "offloaded, s": "{offloaded[median]:.2f} ({offloaded[least]:.2f} to {offloaded[most]:.2f})",
    "ratio": "{ratio:.2f}x",
}  # fmt: skip
PROJECTIONS: Columns = {
    # Of the card that times are projected to: other tiles than those that were measured.
    "projected by the cost model, not measured; kernels with the tiles chosen for sm_89 (101,376 bytes of "
    "shared memory)": "{model}, {context:,}",
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
    "greedy tokens compared": "?{exact[compared]}", "differences": "?{exact[partings]}",
}  # fmt: skip


def _rows(content: Record, parts: Sequence[str] = _HEADLINES) -> list[Record]:
    """Returns rows of speeds, with what several tables say of them."""
    found = []
    for row in (row for row in rows_of(content, *parts) if "ms_per_token" in row):
        attention = ", with attention on the CPU" if row.get("host_share") else ""
        weights = row.get("weights_on_host_gib") or 0.0
        more = {"model": row["shape"].split()[0], "attention": attention, "weights_on_host_gib": weights}
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
    out = cell("? and {bus_gbps[out]:.1f} out", part)
    return f"bus {part['bus_gbps']['in']:.1f} GB/s in{out}, measured in the same run"


def _rates(rates: Sequence[float]) -> str:
    return " + ".join(f"{rate:.1f}" for rate in rates)


def _links(part: Record) -> str:
    return f"links alone, all at once: {_rates(part['bus_gbps_by_rank'])} GB/s"


# What a run notes of a limit under which nothing fits; docs/offloading.md says what is needed.
_REFUSED = re.compile(r"\{'cap_gib': ([\d.]+)\}: a prompt of .* needs at least .*", re.DOTALL)


def _origin(content: Record, rows: Sequence[Record]) -> str:
    def said(note: str) -> str:
        found = _REFUSED.fullmatch(note)
        return f"{float(found[1]):g} GiB are not enough (docs/offloading.md)" if found else note

    parts = {name: part | {"notes": [*map(said, part["notes"])]} for name, part in content["parts"].items()}
    return origin(content | {"parts": parts}, rows, FILE, _bus)


def _headline(content: Record) -> Columns:
    """Returns the columns; plain decoding with attention on the CPU has some where it was measured."""
    attended = any("attended_baseline_ms_per_token" in row for row in _rows(content))
    return {**HEADLINE, **(ATTENDED if attended else {})}


def memory(content: Record) -> str | None:
    """Makes the table of where the bytes were, a column for each program, and of the allocator's peak."""
    found = _rows(content, _STREAMED)
    rows = {(r["shape"], r["context"], r["gpu_memory_cap_gib"]): r for r in found}.values()
    if not rows:
        return None
    heads = ["GiB", *(f"{r['model']}, {r['context']:,}, cap {r['gpu_memory_cap_gib']:g}" for r in rows)]
    uses = dict.fromkeys(use for r in rows for use in r["memory_plan"]["device_gib"])
    sizes = {use: [r["memory_plan"]["device_gib"].get(use, 0.0) for r in rows] for use in uses}
    lines = [[use, *(f"{n:.2f}" for n in some)] for use, some in sizes.items() if max(some) >= 0.005]
    measured = {
        "**measured peak**": "**{peak_gpu_gib:.2f}**", "KV slots on the host": "{host_gib:.1f}",
        "weights on the host": "{weights_on_host_gib:.1f}", "**host memory**": "**{locked_gib:.1f}**",
    }  # fmt: skip
    if not any(r["weights_on_host_gib"] for r in rows):
        del measured["weights on the host"]
    lines += [[name, *(cell(template, r) for r in rows)] for name, template in measured.items()]
    return grid(heads, lines)


def _prefill_rows(content: Record) -> list[Record]:
    """Returns seconds of prefills with a limit of device memory, and without one; over texts, each once."""
    texts: dict[tuple[str, int], dict[str, dict[str, float]]] = {}
    parts: dict[tuple[str, int, str], str] = {}
    for row in content["rows"]:
        limit = row["settings"].get("gpu_memory", "")
        of_limit = texts.setdefault((row["model"], row["context"]), {}).setdefault(limit, {})
        of_limit.setdefault(row["text"], row["prefill_seconds"])
        parts[row["model"], row["context"], limit] = row["part"]
    found = []
    for (model, context), by_limit in texts.items():
        for limit in by_limit.keys() - {""} if "" in by_limit else ():
            part = parts[model, context, limit]
            made: Record = {"model": model, "context": context, "limit": limit.replace("GiB", " GiB")}
            for name, seconds in (("device", by_limit[""]), ("offloaded", by_limit[limit])):
                # The first text of a run waits for the compiler.
                values = sorted([*seconds.values()][1:])
                made[name] = {"median": statistics.median(values), "least": values[0], "most": values[-1]}
                made[name]["texts"] = len(values)
            ratio = made["offloaded"]["median"] / made["device"]["median"]
            found.append(made | {"ratio": ratio, "parts": [parts[model, context, ""], part]})
    return found


def _prefill_note(content: Record, rows: Sequence[Record]) -> str:
    used = {name: content["parts"][name] for row in rows for name in row["parts"]}
    hardware = ", ".join(dict.fromkeys(part["hardware"] for part in used.values()))
    return f"{hardware}, medians over texts, lowest and highest. {file_note(ANY_TEXT, used)}"


def _projections(content: Record) -> list[Record]:
    return [r for r in _rows(content) if "projection" in r and r["gpu_memory_cap_gib"] <= 24]


_OFFLOAD = {
    "headline": ("7b", listing(_headline, _rows, _origin)),
    "memory": ("7b", memory),
    "levels": ("7b", listing(LEVELS, _rows)),
    "projections": ("7b", listing(PROJECTIONS, _projections)),
}
COMMAND = "python -m scripts.benchmarks offload --part"
PARALLEL_COMMAND = "torchrun --nproc-per-node 2 -m scripts.benchmarks parallel"
_parallel = listing(PARALLEL_SPEED, caption=partial(origin, file=PARALLEL, measured=_links))
TABLES = {
    **{f"offload_{name}": Table(FILE, make, f"{COMMAND} {part}") for name, (part, make) in _OFFLOAD.items()},
    "offload_prefill": Table(ANY_TEXT, listing(PREFILL, _prefill_rows, _prefill_note), ANY_TEXT_COMMAND),
    "parallel_speed": Table(PARALLEL, _parallel, PARALLEL_COMMAND),
}

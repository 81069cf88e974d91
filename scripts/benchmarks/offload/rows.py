"""Rows of a results file of offloading: medians over prompts, baselines, and projections to another card."""

import json
import statistics
from collections.abc import Sequence
from typing import Any

from scripts.benchmarks.common.results import OURS, Record, rounded

# Plain decoding with all of the cache streamed, or with attention on the CPU.
STREAMED, ATTENDED = "streamed autoregressive", "autoregressive with attention on the CPU"
RTX_4090 = {"name": "RTX 4090", "bus_gbps": 25.0, "read_gbps": 1000.0}
# What a row is about; the key of a measurement holds the rest as well.
_CELL = ("batch", "context", "new_tokens", "temperature", "setting")
_KEYS = ("method", "prompt", "start", "sources", "exact")
_PLANNED = ("memory_plan", "options")


def rows(part: str, header: Record, samples: list[Record]) -> list[Record]:
    """Returns medians over prompts, one row for every cell that our engine was measured in."""
    bus = {k: rounded(v) for k, v in header["bus_gbps"].items()}
    header["sources"] = list(dict.fromkeys(source for s in samples for source in s["sources"]))
    cells: dict[str, list[Record]] = {}
    for sample in (s for s in samples if s["method"] == OURS):
        cells.setdefault(json.dumps([sample[k] for k in _CELL]), []).append(sample)
    found = []
    for cell in cells.values():
        row = _row(part, header, cell, samples)
        beside, cap = row["baselines"], row["setting"].get("cap_gib")
        more: Record = {"gpu_memory_cap_gib": cap, "bus_gbps": bus}
        if STREAMED in beside:
            more["baseline_pcie_gbps"] = beside[STREAMED]["pcie_gbps"]
        if (own := beside.get(ATTENDED)) and row["host_share"]:
            # The speed-up is that to streamed decoding; this one is to the faster of both.
            fastest = min(own["ms_per_token"], row["baseline_ms_per_token"] or own["ms_per_token"])
            more["attended_baseline_ms_per_token"] = own["ms_per_token"]
            more["attended_baseline_cpu_gbps"] = own["cpu_gbps"]
            more["speedup_to_fastest_baseline"] = rounded(fastest / row["ms_per_token"])
        # On another machine the CPU differs as well, and that was not measured.
        if row["baseline"] and not row["host_share"]:
            more["projection"] = projection(row, header["bus_gbps"]["in"], header["read_gbps"], RTX_4090)
        found.append(row | more)
    return found


def _row(part: str, header: Record, cell: list[Record], samples: list[Record]) -> Record:
    first, times = cell[0], [s["ms_per_token"] for s in cell]
    fifths = statistics.quantiles(times, n=5, method="inclusive") if len(times) > 1 else times
    beside = {m: b for m in (STREAMED, ATTENDED) if (b := _baseline(samples, m, first)) is not None}
    streamed = beside[STREAMED]["ms_per_token"] if STREAMED in beside else None
    ms = statistics.median(times)
    row: Record = {
        "part": part,
        "shape": f"{header['settings']['shape']} inflated",
        **{k: first[k] for k in _CELL},
        "prompts": len(cell),
        "ms_per_token": rounded(ms),
        "ms_per_token_p20": rounded(fifths[0]),
        "ms_per_token_p80": rounded(fifths[-1]),
        "baseline": STREAMED if streamed else None,
        "baseline_ms_per_token": streamed,
        "speedup": rounded(streamed / ms) if streamed else None,
        "baselines": beside,
    }
    figures = {name: _summary(name, [s.get(name) for s in cell]) for name in first}
    row |= {k: v for k, v in figures.items() if v is not None and k not in (*row, *_KEYS)}
    checked = [s["exact"] for s in samples if "exact" in s and _beside(s, first)]
    if checked and first["temperature"] == 0:
        row["exact"] = {k: sum(e[k] for e in checked) for k in checked[0]}
    return row


def _beside(sample: Record, cell: Record) -> bool:
    """Returns whether a baseline is of the same length and limit. Baselines are greedy, whatever the cell."""
    return all(sample[k] == cell[k] for k in ("batch", "context", "setting"))


def _baseline(samples: list[Record], method: str, cell: Record) -> Record | None:
    """Returns a baseline's medians at the same place."""
    chosen = [s for s in samples if s["method"] == method and _beside(s, cell)]
    if not chosen:
        return None
    figures = ("ms_per_token", "pcie_gbps", "cpu_gbps", "pcie_gbps_by_rank")
    medians = {k: _summary(k, [s[k] for s in chosen]) for k in figures if chosen[0].get(k) is not None}
    one = chosen[0]
    return {**medians, "tokens": one["new_tokens"], "prompts": len(chosen), "temperature": one["temperature"]}


def _summary(name: str, values: Sequence[Any]) -> Any:
    """Returns medians of numbers, member by member of lists and dictionaries; the largest peak; else the
    first.
    """
    known = [v for v in values if v is not None]
    if not known or name in _PLANNED:
        return known[0] if known else None
    if isinstance(known[0], dict):
        members = {k: [v[k] for v in known if v.get(k) is not None] for v in known for k in v}
        return {k: _summary(k, found) for k, found in members.items() if found}
    if isinstance(known[0], list):
        return [_summary(name, member) for member in zip(*known, strict=True)]
    if not isinstance(known[0], int | float):
        return known[0]
    return rounded(max(known) if name.startswith("peak") else statistics.median(known))


def projection(row: Record, bus_gbps: float, read_gbps: float, card: Record) -> Record:
    """Returns times on another card by the cost model of the measurements: a projection, not a measurement.

    Bytes that cross the bus take their time on that card's bus; all other time, be it bytes, arithmetic or
    launches, is stretched by the ratio of memory bandwidths.
    """
    slower = read_gbps / card["read_gbps"]
    megabytes = row["streamed_gib"] * 2**30 / 1e6
    here, there = megabytes / bus_gbps, megabytes / card["bus_gbps"]
    ours = (there + slower * max(0.0, row["pass_ms"] - here)) / row["tokens_per_pass"]
    plain = there + slower * max(0.0, row["baseline_ms_per_token"] - here)
    figures = {"ms_per_token": ours, "baseline_ms_per_token": plain, "speedup": plain / ours}
    return {"card": card["name"], **{k: rounded(v) for k, v in figures.items()}}

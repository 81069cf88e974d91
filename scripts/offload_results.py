"""docs/results/offload_h200.json: single measurements by part, and the rows made of them."""

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from on_chip_results import Book

Record = dict[str, Any]

FILE = "offload_h200.json"
OURS, PLAIN = "triforce", "streamed autoregressive"
ON_CHIP, FED = "prefill on chip", "prefill offloaded"
# What a row is about; a measurement has a prompt and a method besides.
CELL = ("batch", "context", "new_tokens", "temperature", "setting")
_AVERAGED = (
    "tokens_per_pass", "rounds_per_pass", "repeated_8grams", "prefill_seconds", "pcie_gbps", "pass_ms",
)  # fmt: skip
RTX_4090 = {"name": "RTX 4090", "bus_gbps": 25.0, "read_gbps": 1000.0}


def book(path: Path, part: str, settings: Record, fresh: bool) -> Book:
    return Book(path, part, settings, fresh, make_rows=rows)


def rows(part: str, content: Record) -> list[Record]:
    """Medians over prompts, one row for every cell that our engine was measured in."""
    samples: list[Record] = content["samples"]
    cells: dict[str, list[Record]] = {}
    for sample in samples:
        if sample["method"] == OURS:
            cells.setdefault(json.dumps([sample[k] for k in CELL]), []).append(sample)
    found = [_row(part, content, group, samples) for group in cells.values()]
    return found + _prefill_rows(part, content["settings"], samples)


def _prefill_rows(part: str, settings: Record, samples: list[Record]) -> list[Record]:
    """Seconds of feeding the same prompts, with the cache on the device and offloaded."""
    seconds = {m: [s["prefill_seconds"] for s in samples if s["method"] == m] for m in (ON_CHIP, FED)}
    if not all(seconds.values()):
        return []
    near, far = (_median(seconds[m]) for m in (ON_CHIP, FED))
    context = samples[0]["context"]
    figures = {"on_chip_prefill_seconds": near, "prefill_seconds": far, "ratio": far / near}
    place = {"part": part, "shape": f"{settings['shape']} inflated", "context": context}
    return [{**place, **{k: _rounded(v) for k, v in figures.items()}}]


def _row(part: str, content: Record, group: list[Record], samples: list[Record]) -> Record:
    first = group[0]
    place = {k: first[k] for k in ("batch", "context", "setting")}
    beside = [s for s in samples if s["method"] == PLAIN and _at(s, place)]
    ms = _median(s["ms_per_token"] for s in group)
    # Streamed decoding costs the same at every temperature.
    plain = _median(s["ms_per_token"] for s in beside) if beside else None
    row: Record = {
        "part": part,
        "shape": f"{content['settings']['shape']} inflated",
        **{k: first[k] for k in CELL},
        "prompts": len(group),
        "ms_per_token": _rounded(ms),
        "baseline": PLAIN if plain else None,
        "baseline_ms_per_token": _rounded(plain),
        "speedup": _rounded(plain / ms) if plain else None,
        "roof_ms": _rounded(first["roof_ms"]),
        "acceptance": _by_name(group, "acceptance"),
        "mean_accepted_length": _by_name(group, "mean_accepted_length"),
        **{k: _rounded(_median(s[k] for s in group)) for k in _AVERAGED},
        "gpu_memory_cap_gib": first["setting"].get("cap_gib"),
        "peak_gpu_gib": _rounded(max(s["peak_gpu_gib"] for s in group)),
        "host_gib": _rounded(first["host_gib"]),
        "resident_gib": _rounded(first["resident_gib"]),
        "streamed_gib": _rounded(first["streamed_gib"]),
        "weights_on_host_gib": _rounded(first.get("weights_on_host_gib", 0.0)),
        "bus_gbps": {k: _rounded(v) for k, v in content["bus_gbps"].items()},
        "baseline_pcie_gbps": _rounded(_median(s["pcie_gbps"] for s in beside)) if plain else None,
        "stages": _stages(group),
        "config": first["config"],
        "memory_plan": first["memory_plan"],
    }
    checked = [s["exact"] for s in beside if "exact" in s]
    if checked and first["temperature"] == 0:
        row["exact"] = {k: sum(e[k] for e in checked) for k in ("compared", "partings")}
    if plain and content.get("read_gbps"):
        row["projection"] = projection(row, content["bus_gbps"]["in"], content["read_gbps"], RTX_4090)
    return row


def projection(row: Record, bus_gbps: float, read_gbps: float, card: Record) -> Record:
    """Times on another card, by the cost model of the measurements; a projection, not a measurement.

    Bytes that cross the bus take their time on that card's bus; all other time, be it bytes, arithmetic or
    launches, is stretched by the ratio of memory bandwidths.
    """
    slower = read_gbps / card["read_gbps"]
    megabytes = row["streamed_gib"] * 2**30 / 1e6
    here, there = megabytes / bus_gbps, megabytes / card["bus_gbps"]
    ours = (there + slower * max(0.0, row["pass_ms"] - here)) / row["tokens_per_pass"]
    plain = there + slower * max(0.0, row["baseline_ms_per_token"] - here)
    figures = {"ms_per_token": ours, "baseline_ms_per_token": plain, "speedup": plain / ours}
    return {"card": card["name"], **{k: _rounded(v) for k, v in figures.items()}}


def _at(sample: Record, place: Record) -> bool:
    return all(sample.get(k) == v for k, v in place.items())


def _stages(group: Sequence[Record]) -> Record:
    """Milliseconds of one run of each stage."""
    names = list(dict.fromkeys(name for s in group for name in s["stages"]))
    return {n: _rounded(_median(s["stages"][n] for s in group if n in s["stages"])) for n in names}


def _by_name(group: Sequence[Record], key: str) -> Record:
    names = list(dict.fromkeys(name for s in group for name, value in s[key].items() if value is not None))
    return {n: _rounded(_median(s[key][n] for s in group if s[key].get(n) is not None)) for n in names}


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def _rounded(value: float | None) -> float | None:
    """Four significant places are more than the measurements hold."""
    return None if value is None else float(f"{value:.4g}")

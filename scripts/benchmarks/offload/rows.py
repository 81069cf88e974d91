"""docs/results/offload_h200.json: rows made of single measurements, beside streamed plain decoding."""

import statistics

from scripts.benchmarks.common.results import Record, cells, having, head, medians, medians_by_name, rounded

FILE = "offload_h200.json"
PLAIN = "streamed autoregressive"
ATTENDED = "autoregressive with attention on the CPU"
ON_CHIP, FED = "prefill on chip", "prefill offloaded"
_AVERAGED = (
    "tokens_per_pass", "rounds_per_pass", "repeated_8grams", "prefill_seconds", "pcie_gbps", "pass_ms",
)  # fmt: skip
_PLANNED = ("split", "device_gib", "host_gib", "pass_weights_gib")
RTX_4090 = {"name": "RTX 4090", "bus_gbps": 25.0, "read_gbps": 1000.0}


def rows(part: str, header: Record, samples: list[Record]) -> list[Record]:
    """Medians over prompts, one row for every cell that our engine was measured in."""
    header["sources"] = list(dict.fromkeys(source for s in samples for source in s["sources"]))
    found = [_row(part, header, cell, samples) for cell in cells(samples)]
    return found + _prefill_rows(part, header["settings"], samples)


def _prefill_rows(part: str, settings: Record, samples: list[Record]) -> list[Record]:
    """Seconds of feeding the same prompts, with the cache on the device and offloaded."""
    seconds = {m: [s["prefill_seconds"] for s in having(samples, method=m)] for m in (ON_CHIP, FED)}
    if not all(seconds.values()):
        return []
    near, far = (statistics.median(seconds[m]) for m in (ON_CHIP, FED))
    figures = {"on_chip_prefill_seconds": near, "prefill_seconds": far, "prefill_ratio": far / near}
    place = {"part": part, "shape": f"{settings['shape']} inflated", "context": samples[0]["context"]}
    return [{**place, **{k: rounded(v) for k, v in figures.items()}}]


def _row(part: str, header: Record, cell: list[Record], samples: list[Record]) -> Record:
    first = cell[0]
    # Plain decoding costs the same at every temperature.
    place = {k: first[k] for k in ("batch", "context", "setting")}
    beside, attended = (having(samples, method=method, **place) for method in (PLAIN, ATTENDED))
    plain = statistics.median(s["ms_per_token"] for s in beside) if beside else None
    memory = first["memory_plan"]
    row: Record = {
        **head(part, header["settings"]["shape"], cell, PLAIN if plain else None, plain),
        "acceptance": medians_by_name(cell, "acceptance"),
        "mean_accepted_length": medians_by_name(cell, "mean_accepted_length"),
        **medians(cell, _AVERAGED),
        "gpu_memory_cap_gib": first["setting"].get("cap_gib"),
        "peak_gpu_gib": rounded(max(s["peak_gpu_gib"] for s in cell)),
        "host_gib": rounded(first["host_gib"]),
        "resident_gib": rounded(first["resident_gib"]),
        "streamed_gib": rounded(first["streamed_gib"]),
        "weights_on_host_gib": rounded(first.get("weights_on_host_gib", 0.0)),
        "bus_gbps": {k: rounded(v) for k, v in header["bus_gbps"].items()},
        "baseline_pcie_gbps": rounded(statistics.median(s["pcie_gbps"] for s in beside)) if plain else None,
        "stages": medians_by_name(cell, "stages"),
        **_attention(cell, attended, plain),
        "options": memory["options"],
        "memory_plan": {k: memory[k] for k in _PLANNED if k in memory},
    }
    checked = [s["exact"] for s in [*beside, *attended] if "exact" in s]
    if checked and first["temperature"] == 0:
        row["exact"] = {k: sum(e[k] for e in checked) for k in ("compared", "partings")}
    # On another machine the CPU differs as well, and nobody has measured that.
    if plain and header.get("read_gbps") and not row.get("host_share"):
        row["projection"] = projection(row, header["bus_gbps"]["in"], header["read_gbps"], RTX_4090)
    return row


def _attention(cell: list[Record], attended: list[Record], plain: float | None) -> Record:
    """The CPU's part, and plain decoding with it; nothing where it has none.

    ``speedup`` is that to streamed plain decoding; here the one to whichever plain decoding is faster.
    """
    first = cell[0]
    if not first.get("host_share"):
        return {}
    found = {"host_share": first["host_share"], "cpu_gbps": statistics.median(s["cpu_gbps"] for s in cell)}
    if attended:
        own = statistics.median(s["ms_per_token"] for s in attended)
        fastest = min(own, plain or own)
        ms = statistics.median(s["ms_per_token"] for s in cell)
        found |= {"attended_baseline_ms_per_token": own, "speedup_to_fastest_baseline": fastest / ms}
        found["attended_baseline_cpu_gbps"] = statistics.median(s["cpu_gbps"] for s in attended)
    return {k: rounded(v) for k, v in found.items()}


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
    return {"card": card["name"], **{k: rounded(v) for k, v in figures.items()}}

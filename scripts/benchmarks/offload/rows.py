"""Rows of docs/results/offload_h200.json, beside streamed autoregressive decoding."""

import statistics

from scripts.benchmarks.common.results import ATTENDED, STREAMED, Record, having, rounded, rows_of_samples

FILE = "offload_h200.json"
ON_CHIP, FED = "prefill on chip", "prefill offloaded"
RTX_4090 = {"name": "RTX 4090", "bus_gbps": 25.0, "read_gbps": 1000.0}


def rows(part: str, header: Record, samples: list[Record]) -> list[Record]:
    """Medians over prompts, one row for every cell that our engine was measured in."""
    bus = {k: rounded(v) for k, v in header["bus_gbps"].items()}
    found = []
    for row in rows_of_samples(part, header, samples, (STREAMED,)):
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
    return found + _prefill_rows(part, header["settings"], samples)


def _prefill_rows(part: str, settings: Record, samples: list[Record]) -> list[Record]:
    """Seconds of prefill of the same prompts, with the cache on the device and offloaded."""
    seconds = {m: [s["prefill_seconds"] for s in having(samples, method=m)] for m in (ON_CHIP, FED)}
    if not all(seconds.values()):
        return []
    on_chip, offloaded = (statistics.median(seconds[m]) for m in (ON_CHIP, FED))
    figures = {"on_chip_prefill_seconds": on_chip, "prefill_seconds": offloaded}
    figures["prefill_ratio"] = offloaded / on_chip
    place = {"part": part, "shape": f"{settings['shape']} inflated", "context": samples[0]["context"]}
    return [{**place, **{k: rounded(v) for k, v in figures.items()}}]


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

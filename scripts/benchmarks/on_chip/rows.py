"""docs/results/on_chip_h200.json: rows made of single measurements, beside the faster of two baselines."""

import statistics

from scripts.benchmarks.common.results import Record, cells, having, head, medians, medians_by_name, rounded

FILE = "on_chip_h200.json"
PLAIN, STATIC = "autoregressive", "transformers-static"
_AVERAGED = ("tokens_per_pass", "rounds_per_pass", "pass_ms", "repeated_8grams", "prefill_seconds")


def rows(part: str, header: Record, samples: list[Record]) -> list[Record]:
    """Medians over prompts, one row for every cell that our engine was measured in."""
    settings = header["settings"]
    header["sources"] = list(dict.fromkeys(source for s in samples for source in s["sources"]))
    return [_row(part, settings, cell, samples) for cell in cells(samples)]


def _row(part: str, settings: Record, cell: list[Record], samples: list[Record]) -> Record:
    first = cell[0]
    found = {name: _baseline(samples, name, first) for name in (PLAIN, STATIC)}
    known = {name: one for name, one in found.items() if one is not None}
    best = min(known, key=lambda name: known[name]["ms_per_token"], default=None)
    row: Record = {
        **head(part, settings["shape"], cell, best, known[best]["ms_per_token"] if best else None),
        "baselines": known,
        "acceptance": medians_by_name(cell, "acceptance"),
        "mean_accepted_length": medians_by_name(cell, "mean_accepted_length"),
        **medians(cell, _AVERAGED),
        "stages": {
            name: medians([s["stages"][name] for s in cell if name in s["stages"]], ("ms", "roof_ms", "runs"))
            for name in first["stages"]
        },
        "capture_seconds": rounded(max(s["capture_seconds"] for s in cell)),
        "peak_gib": rounded(max(s["peak_gib"] for s in cell)),
    }
    place = {k: first[k] for k in ("batch", "context", "temperature", "setting")}
    checked = [s["exact"] for s in having(samples, method=PLAIN, **place) if "exact" in s]
    if checked:
        row["exact"] = {k: sum(e[k] for e in checked) for k in ("compared", "ties", "failures")}
    return row


def _baseline(samples: list[Record], method: str, place: Record) -> Record | None:
    """A baseline's median at the same place, or at another temperature, which costs it next to nothing."""
    found = having(samples, method=method, batch=place["batch"], context=place["context"])
    exact = having(found, temperature=place["temperature"])
    chosen = exact or (found if method == STATIC else [])
    if not chosen:
        return None
    return {
        "ms_per_token": rounded(statistics.median(s["ms_per_token"] for s in chosen)),
        "tokens": chosen[0]["new_tokens"],
        "prompts": len(chosen),
        "temperature": chosen[0]["temperature"],
    }

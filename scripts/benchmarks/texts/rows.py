"""Rows of a grid's measurements: speed-ups over plain decoding, and how far chance may have moved them."""

import math
import statistics
from collections.abc import Sequence

from scripts.benchmarks.common.results import OURS, PLAIN, STATIC, Record, grouped

# The standard error of a median beside that of a mean, of many values of a normal distribution.
OF_MEDIAN = math.sqrt(math.pi / 2)


def rows(part: str, header: Record, samples: list[Record]) -> list[Record]:
    """Returns a row for each text, context and temperature, with medians over seeds and runs.

    ``plain_ms_per_token`` is that of the faster of the plain methods that were measured there; ``worst`` and
    ``best`` are the speed-ups of the slowest and the fastest of our runs. Where each run has one of plain
    decoding beside it, speed-ups are those of the pairs, and ``speedup_error`` is the standard error of their
    median; transformers' cache is then compared with ours by its runs beside the same ones.
    """
    made = []
    for (text, context, temperature), ours in by_cell(samples).items():
        here = [s for s in samples if (s["text"], s["context"]) == (text, context)]
        decoded = [s for s in here if s["method"] == PLAIN and s["temperature"] == temperature]
        if not decoded:
            continue
        beside = {PLAIN: statistics.median(s["ms_per_token"] for s in decoded)}
        if (static := _static(here, beside[PLAIN])) is not None:
            beside[STATIC] = static
        plain = min(beside, key=lambda method: beside[method])
        made.append(
            {
                **described(part, header, ours),
                **{
                    name: round(value, 4)
                    for name, value in _speed(ours, decoded, beside[plain], beside[PLAIN]).items()
                },
                "plain": plain,
                **{
                    name: round(statistics.median(s[name] for s in ours), 4)
                    for name in ("repeated_8grams", "tokens_per_pass", "prefill_seconds")
                },
                **{
                    name: medians([s[name] for s in ours])
                    for name in ("acceptance", "mean_accepted_length", "chosen")
                },
            }
        )  # fmt: skip
    return made


def by_cell(samples: list[Record]) -> dict[tuple[str, int, float], list[Record]]:
    """Returns our own samples by text, context and temperature."""
    return grouped((s for s in samples if s["method"] == OURS), "text", "context", "temperature")


def described(part: str, header: Record, ours: list[Record]) -> Record:
    """Returns what a row says of its cell, beside the figures."""
    settings = header["settings"]
    return {
        "part": part, "machine": header["hardware"], "model": settings["model"], "shape": settings["shape"],
        **{name: ours[0][name] for name in ("text", "kind", "context", "temperature")},
        "settings": settings["options"], "runs": len(ours),
    }  # fmt: skip


def _static(here: list[Record], plain: float) -> float | None:
    """Returns milliseconds a token of transformers' static cache, if it was measured: of runs in pairs
    relative to
    our plain decoding, of which ``plain`` milliseconds are those of the cell."""
    runs = [s for s in here if s["method"] == STATIC]
    ours = {_place(s): s["ms_per_token"] for s in here if s["method"] == PLAIN}
    ratios = [s["ms_per_token"] / ours[_place(s)] for s in runs if "run" in s and _place(s) in ours]
    if ratios:
        return plain * statistics.median(ratios)
    return statistics.median(s["ms_per_token"] for s in runs) if runs else None


def _place(sample: Record) -> tuple[float, int, int | None]:
    """Returns the key that runs made beside each other have in common."""
    return sample["temperature"], sample["seed"], sample.get("run")


def _speed(ours: list[Record], decoded: list[Record], fastest: float, plain: float) -> dict[str, float]:
    """Times and speed-ups of a cell.

    Args:
        decoded: runs of our plain decoding.
        fastest, plain: milliseconds a token of the fastest plain method, and of ours.
    """
    times = [s["ms_per_token"] for s in ours]
    speed = {"ms_per_token": statistics.median(times), "plain_ms_per_token": fastest}
    of_pair = {(s["seed"], s["run"]): s["ms_per_token"] for s in decoded if "run" in s}
    pairs = [(s, of_pair.get((s["seed"], s.get("run")))) for s in ours]
    ratios = [beside / s["ms_per_token"] * fastest / plain for s, beside in pairs if beside is not None]
    if not ratios:
        return speed | {
            "speedup": fastest / speed["ms_per_token"], "worst": fastest / max(times),
            "best": fastest / min(times),
        }  # fmt: skip
    if len(ratios) > 1:
        speed["speedup_error"] = OF_MEDIAN * statistics.stdev(ratios) / math.sqrt(len(ratios))
    return speed | {"speedup": statistics.median(ratios), "worst": min(ratios), "best": max(ratios)}


def medians(of: Sequence[Record]) -> Record:
    """Returns the medians of figures by name; of anything else the first value."""
    names = dict.fromkeys(name for one in of for name in one)
    values = {name: [one[name] for one in of if one.get(name) is not None] for name in names}
    return {
        name: round(statistics.median(held), 4) if isinstance(held[0], float) else held[0]
        for name, held in values.items()
        if held
    }

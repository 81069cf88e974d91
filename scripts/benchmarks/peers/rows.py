"""Rows of the benchmark ``peers``: times of each engine and mode, and which mode is an engine's fastest."""

import statistics
from typing import Any

from scripts.benchmarks.common.results import Record, grouped, rounded
from scripts.benchmarks.peers.protocol import Answer
from triforce_tree.bench.results import repeated_share
from triforce_tree.kv.cached_tokens import common_prefix

# What a contender is, and where it was measured.
WHO = ("engine", "format", "mode")
PLACE = ("text", "kind", "context", "temperature", "batch", "new_tokens")
# The engine and mode that decode greedy texts token by token with our own arithmetic.
_REFERENCE = ("ours", "plain")


def timed(answer: Answer) -> Record:
    """Returns the figures of an answer.

    ``prefill_s`` ends when every sequence has its first token. ``ms_per_token`` is the time from then to the
    last token, divided by the tokens of one sequence that came in it; ``cpu_ms_per_token`` is the CPU time of
    the engine's process, all threads together.

    Raises:
        ValueError: no token came after the first ones.
    """
    begun: dict[int, tuple[float, float]] = {}
    for seconds, cpu, sequence, _ in answer.stamps:
        begun.setdefault(sequence, (seconds, cpu))
    first, cpu_first = max(begun.values())
    after = [(seconds, count) for seconds, _, _, count in answer.stamps if seconds > first]
    if not after:
        raise ValueError("all tokens came at once, so that no time of a token is known; ask for more tokens")
    batch = len(answer.tokens)
    decoded = sum(count for _, count in after) / batch
    last, cpu_last = answer.stamps[-1][:2]
    passes = answer.passes or len({seconds for seconds, _ in after})
    return {
        "prefill_s": first, "ms_per_token": 1e3 * (last - first) / decoded,
        "cpu_ms_per_token": 1e3 * (cpu_last - cpu_first) / decoded,
        "tokens_per_pass": decoded / passes if batch == 1 else None,
        "repeated_8grams": statistics.median(map(repeated_share, answer.tokens)),
        "tokens": answer.tokens,
    }  # fmt: skip


def rows(part: str, header: Record, samples: list[Record]) -> list[Record]:
    """Returns a row for each contender and place, with medians over runs.

    What is missing has a row with the reason: a contender that could not be loaded, or one at a place where
    its request failed.
    """
    found = grouped((sample for sample in samples if "missing" not in sample), *WHO, *PLACE)
    made = [_row(part, header, same, samples) for same in found.values()]
    fastest: dict[tuple[Any, ...], float] = {}
    for row in made:
        place = _place(row)
        fastest[place] = min(row["ms_per_token"], fastest.get(place, row["ms_per_token"]))
    for row in made:
        row["best"] = row["ms_per_token"] == fastest[_place(row)]
    absent = [
        {name: value for name, value in sample.items() if name != "run"}
        for sample in samples
        if "missing" in sample
    ]
    keys = (*WHO, *PLACE)
    return made + [
        {"part": part, **each}
        for number, each in enumerate(absent)
        if each not in absent[:number]
        and not any(all(row[name] == each[name] for name in keys if name in each) for row in made)
    ]


def _place(row: Record) -> tuple[Any, ...]:
    """Returns the key within which an engine's modes are compared: one engine, one place, as many bits."""
    return tuple(row[name] for name in ("engine", "bits", *PLACE))


def _row(part: str, header: Record, same: list[Record], samples: list[Record]) -> Record:
    one = same[0]
    figures = (
        "ms_per_token", "prefill_s", "cpu_ms_per_token", "tokens_per_pass", "repeated_8grams", "load_s",
        "other_programs",
    )  # fmt: skip
    return {
        "part": part, "machine": header["hardware"], "model": header["settings"]["model"],
        **{name: one[name] for name in (*PLACE, *WHO, "bits", "versions")},
        **{name: _median([sample[name] for sample in same]) for name in figures},
        "runs": len(same), "as_ours": _agreement(one, samples),
    }  # fmt: skip


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return rounded(statistics.median(known)) if known else None


def _agreement(sample: Record, samples: list[Record]) -> int | None:
    """Returns how many tokens a greedy text has before it differs from that of our plain decoding with the
    same checkpoint; None where there is no such text.
    """
    if sample["temperature"] > 0:
        return None
    same = [name for name in (*PLACE, "format") if name != "kind"]
    for other in samples:
        if "missing" in other or (other["engine"], other["mode"]) != _REFERENCE:
            continue
        if all(other[name] == sample[name] for name in same):
            return common_prefix(sample["tokens"][0], other["tokens"][0])
    return None

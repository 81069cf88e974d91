"""Rows of the workloads' results file from its measurements."""

from scripts.benchmarks.workloads import attention, decoding
from scripts.benchmarks.workloads.measure import ATTENTION, DECODING
from triforce_tree.bench.results import Record, Records

Rows = list[Record]


def of_attention(records: Records) -> Rows:
    """A row for each workload and way, beside attention by sequences."""
    found = _of_kind(records, ATTENTION)
    us = {(r["workload"], r["way"]): r.get("us") for r in found}
    rows = []
    for r in found:
        own, other = r.get("us"), us.get((r["workload"], attention.BY_SEQUENCES))
        rows.append({
            **{name: r[name] for name in ("workload", "texts", "way")}, "us": own,
            "kv_megabytes": r["kv_bytes"] / 1e6, "to_sequences": other / own if own and other else None,
            "of_roof": r["roof_us"] / own if own else None, "reason": r.get("reason", ""),
        })  # fmt: skip
    return rows


def of_decoding(records: Records) -> Rows:
    """A row for each workload and way; a tree's has the time of its attention, as measured alone."""
    found = _of_kind(records, DECODING)
    measured = [r for r in _of_kind(records, ATTENTION) if r.get("us")]
    ways = {r["way"] for r in measured}
    alone = {r["workload"]: r for r in measured if r["way"] == attention.engines(ways, r["seen"])}
    speed = {(r["workload"], r["way"]): _speed(r) for r in found}
    one = next((_speed(r) for r in found if r["texts"] == 1 and r["way"] == decoding.TREE), None)
    rows = []
    for r in found:
        own, batched = _speed(r), speed.get((r["workload"], decoding.BATCH))
        layer = alone.get(r["workload"], {}) if r["way"] == decoding.TREE else {}
        long = r["workload"].startswith("long/") and r["way"] == decoding.TREE
        rows.append({
            **{name: r[name] for name in ("workload", "texts", "way")}, "tokens_per_second": own,
            "ms_per_token": 1e3 * r["texts"] / own if own else None,
            "attention_ms": layer["us"] * layer["layers"] / 1e3 if layer.get("us") else None,
            "to_batch": own / batched if own and batched else None,
            "to_one_branch": own / one if own and one and long else None,
            "kv_gib": r["kv_bytes"] / 2**30 if "kv_bytes" in r else None, "reason": r.get("reason", ""),
        })  # fmt: skip
    return rows


def _speed(record: Record) -> float | None:
    return record["new_tokens"] / record["seconds"] if "seconds" in record else None


def _of_kind(records: Records, kind: str) -> Rows:
    return [r for r in records.all if r.get("kind") == kind]

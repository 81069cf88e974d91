"""The tables of docs/branching.md: time of attention over texts that branch, and decoding."""

from collections.abc import Sequence

from scripts.benchmarks.common.markdown import (
    Caption,
    Columns,
    Record,
    Table,
    cell,
    file_note,
    listing,
    rows_of,
)

FILE = "tree_workloads_h200.jsonl"
# Ways of attending, by their names in workloads.attention, and the headings of their microseconds. The
# engine no longer attends by nodes in any of three ways, which results of earlier commits have.
_WAYS = {
    "by sequences": "by sequences", "by sequences, shared pages": "shared pages", "by nodes": "by nodes",
    "by chunks of nodes": "by chunks", "by nodes, flattened": "flattened",
    "by blocks of queries": "**blocks**", "FlashInfer cascade": "FI cascade",
    "FastTree's kernel": "FastTree", "DeFT's kernel": "DeFT",
}  # fmt: skip
_OURS = "by blocks of queries"
_PEERS = [way for way in _WAYS if way != _OURS]
_WHERE = "torch {versions[torch]}, commit {commit}. "
_NOTE = "{hardware}, heads {heads}, {dtype}, microseconds of one layer, " + _WHERE
_DECODED = "{hardware}, {target}, {new_tokens} new tokens a text, greedy, " + _WHERE
DECODING: Columns = {
    "workload": "{workload}", "decoded by": "{way}", "texts": "{texts:,}",
    "tokens/s": "{tokens_per_second:,.0f}", "ms/token": "{ms_per_token:.2f}",
    "of it attention, alone": lambda row: _figure(row["attention_ms"], "{:.2f}"),
    "to a batch": lambda row: _figure(row["to_batch"], "{:.2f}x"),
    "to one branch": lambda row: _figure(row["to_one_branch"], "{:.2f}x"),
    "KV, GiB": lambda row: _figure(row["kv_gib"], "{:.2f}"),
}  # fmt: skip


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _attention(content: Record) -> list[Record]:
    """Returns a row for each workload, with the microseconds of each way."""
    found: dict[str, Record] = {}
    for row in rows_of(content, "attention"):
        own = found.setdefault(row["workload"], {"workload": row["workload"], "texts": row["texts"]})
        own[row["way"]] = row["us"]
        if row["way"] in ("by sequences", "by nodes, flattened"):
            own[f"{row['way']}, MB"] = row["kv_megabytes"]
        if row["way"] == _OURS:
            own["ratio"], own["roof"] = row["to_sequences"], row["of_roof"]
    for own in found.values():
        others = [own[way] for way in _PEERS if own.get(way) is not None]
        own["peers"] = min(others) / own[_OURS] if others and own.get(_OURS) else None
    return list(found.values())


def _columns(content: Record) -> Columns:
    """Returns the columns, without ways that no row has."""
    rows = _attention(content)
    ways = {way: name for way, name in _WAYS.items() if any(row.get(way) is not None for row in rows)}
    return {
        "workload": "{workload}", "texts": "{texts:,}",
        "KV by sequences, MB": lambda row: _figure(row.get("by sequences, MB"), "{:,.0f}"),
        "by nodes, MB": lambda row: _figure(row.get("by nodes, flattened, MB"), "{:,.1f}"),
        **{name: lambda row, way=way: _figure(row.get(way), "{:,.1f}") for way, name in ways.items()},
        "of the roofline": lambda row: _figure(row.get("roof"), "{:.0%}"),
        "to sequences": lambda row: _figure(row.get("ratio"), "{:.2f}x"),
        "to the best other": lambda row: _figure(row["peers"], "{:.2f}x"),
    }  # fmt: skip


def _decoded(content: Record) -> Sequence[Record]:
    """Returns the rows of decoding. Those of a tree get the time of all layers' attention, measured alone."""
    layers = content["parts"].get("attention", {}).get("layers")
    alone = {row["workload"]: row["us"] for row in rows_of(content, "attention") if row["way"] == _OURS}
    found = []
    for row in rows_of(content, "decoding"):
        us = alone.get(row["workload"]) if row["way"] == "engine.tree" else None
        if not row["reason"]:
            found.append(row | {"attention_ms": us * layers / 1e3 if us and layers else None})
    return found


def _noted(template: str, part: str) -> Caption:
    """Returns what makes the caption of a part."""

    def caption(content: Record, rows: Sequence[Record]) -> str:
        run = content["parts"][part]
        return cell(template, run) + file_note(FILE, {"": run})

    return caption


_COMMAND = "python -m scripts.benchmarks workloads"
TABLES = {
    "tree_workloads_attention": Table(
        FILE, listing(_columns, _attention, _noted(_NOTE, "attention")), _COMMAND
    ),
    "tree_workloads_decoding": Table(
        FILE, listing(DECODING, _decoded, _noted(_DECODED, "decoding"), left=2), _COMMAND
    ),
}

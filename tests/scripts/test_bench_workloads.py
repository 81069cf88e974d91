"""The tables of docs/branching.md, from rows as the benchmark writes them."""

from typing import Any

from scripts.benchmarks.workloads import run, tables
from scripts.benchmarks.workloads.attention import WAYS
from scripts.benchmarks.workloads.measure import PARTS
from triforce_tree.bench.results import Records


def content() -> dict[str, Any]:
    records = Records(None, {"benchmark": "workloads"})
    alone = {
        "kind": "attention",
        "workload": "long/1x256",
        "texts": 1,
        "layers": 32,
        "seen": 9,
        "roof_us": 5.0,
    }
    records.add({**alone, "way": "by sequences", "kv_bytes": 2_000_000_000, "us": 2000.0})
    records.add({**alone, "way": "by nodes, flattened", "kv_bytes": 2_000_000, "us": 100.0})
    records.add({**alone, "way": "by blocks of queries", "kv_bytes": 2_000_000, "us": 50.0})
    records.add({**alone, "way": "FlashInfer cascade", "kv_bytes": 2_000_000, "reason": "not installed"})
    decoded = {"kind": "decoding", "workload": "long/1x256", "texts": 1}
    records.add({**decoded, "way": "engine.tree", "seconds": 2.0, "new_tokens": 100, "kv_bytes": 2**31})
    records.add({**decoded, "way": "a batch of the texts", "reason": "does not fit"})
    head = {
        "hardware": "a card", "heads": "32/8 x 128", "dtype": "bfloat16", "target": "a model", "layers": 32,
        "new_tokens": 100, "versions": {"torch": "2"}, "commit": "abc", "date": "2026-01-01",
    }  # fmt: skip
    rows = [row for part in PARTS for row in run.rows_of(part, records)]
    return {"parts": dict.fromkeys(PARTS, head), "rows": rows}


def test_every_way_has_a_column() -> None:
    assert tables._WAYS.keys() >= WAYS.keys()


def test_ways_stand_beside_each_other_and_absent_ones_are_left_out() -> None:
    made = tables.TABLES["tree_workloads_attention"].make(content())
    heading, _, row, *_ = made.splitlines()
    assert "flattened | **blocks**" in heading
    assert "FI cascade" not in heading
    assert row == "| long/1x256 | 1 | 2,000 | 2.0 | 2,000.0 | 100.0 | 50.0 | 10% | 40.00x | 2.00x |"
    assert "a card, heads 32/8 x 128, bfloat16" in made


def test_what_was_not_decoded_has_no_row() -> None:
    made = tables.TABLES["tree_workloads_decoding"].make(content())
    rows = [line for line in made.splitlines() if line.startswith("| long")]
    assert rows == ["| long/1x256 | engine.tree | 1 | 50 | 20.00 | 1.60 |  | 1.00x | 2.00 |"]

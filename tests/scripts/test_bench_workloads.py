"""The tables of docs/branching.md, from rows as the benchmark writes them."""

from typing import Any

from scripts.benchmarks.workloads import read_bytes, run, tables
from triforce_tree.eval.results import Records
from triforce_tree.eval.workloads.attention import WAYS


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
        "new_tokens": 100, "versions": {"torch": "2"}, "commit": "abc", "date": "2026-01-01", "code": None,
    }  # fmt: skip
    rows = [row for part in run.AREAS for row in run.rows_of(part, records)]
    return {"parts": dict.fromkeys(run.AREAS, head), "rows": rows}


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


def test_bytes_are_counted_by_way() -> None:
    columns = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
    metric = '"dram__bytes_read.sum","byte"'
    lines = [
        "==PROF== Connected", "way\tlong/32x256\tby nodes\t1000", "way\tlong/32x256\tby sequences\t3000",
        columns, f'"0","triu_indices_kernel",{metric},"512"', f'"1","tree_attention_kernel",{metric},"1,000"',
        f'"2","combine_kernel",{metric},"24"', f'"3","triu_indices_kernel",{metric},"0"',
        f'"4","tree_attention_kernel",{metric},"7,000,000"',
    ]  # fmt: skip
    few, many = read_bytes.rows_of("\n".join(lines))
    assert few == {
        "workload": "long/32x256", "way": "by nodes", "megabytes": 0.001024, "paper_megabytes": 4.096,
    }  # fmt: skip
    assert (many["megabytes"], many["paper_megabytes"]) == (7.0, 12.288)
    head = {"hardware": "a card", "heads": "32/8 x 128", "versions": {"torch": "2"}, "commit": "abc"}
    made = tables.TABLES["tree_workload_bytes"].make(head | {"date": "", "code": None, "rows": [few, many]})
    assert "| long/32x256 | 7 / 12 | 0 / 4 |" in made

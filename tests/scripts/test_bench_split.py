"""The benchmark `split` by two processes and by one on a CPU: the rows of one file."""

import json
from pathlib import Path

import pytest
from processes import ranks_of

COMMAND = ["-m", "scripts.benchmarks", "split", "--tiny", "--out"]


@pytest.mark.slow
def test_two_ranks_and_one_write_into_one_file(tmp_path: Path) -> None:
    for size in (2, 1):
        first, *others = ranks_of([*COMMAND, str(tmp_path)], size)
        assert [rank.code for rank in (first, *others)] == [0] * size, first.err
        assert all(rank.out == "" for rank in others)
    content = json.loads((tmp_path / "sequence_parallel_h200x2.json").read_text())
    rows = {row["way"]: row for row in content["rows"]}
    assert list(rows) == ["by position", "by heads", "one card"]
    names = {"draft", "retrieval_refresh", "retrieval", "target", "plain"}
    assert all(row["ms"].keys() == names and min(row["ms"].values()) > 0 for row in rows.values())
    # Scratch slots are on both ranks, the others on one.
    assert 0.5 < rows["by position"]["kv_bytes"] / rows["one card"]["kv_bytes"] < 0.6
    # 7 layers; 4 heads of 128 elements in fp32, with a log-sum-exp each.
    assert rows["by position"]["collectives"]["plain"] == {"calls": 7, "bytes": 7 * 4 * 129 * 4}
    assert rows["by heads"]["collectives"]["plain"] == {"calls": 14, "bytes": 14 * 512 * 4}
    assert rows["by position"]["merge_ms"].keys() == {"plain", "target"}

"""Tokens a pass with matched tokens and without: the rows of a tiny run, and their tables."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.tiny_pair import SMALL, TinyPair
from triforce_tree import Engine


@pytest.mark.slow
def test_a_tiny_run_counts_passes(
    script: Any, pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matched = script("benchmarks.texts.matched")
    monkeypatch.setenv("TRIFORCE_TREE_CACHE", str(tmp_path))
    monkeypatch.setenv("TRIFORCE_TREE_ESTIMATES", "")

    def load(**options: Any) -> Engine:
        return pair.load(**{k: v for k, v in SMALL.items() if k != "tree"})

    monkeypatch.setattr(matched.triforce_tree, "load", load)
    out = tmp_path / "m.json"
    words = ["--contexts", "256", "300", "--seeds", "2", "--new-tokens", "12"]
    words += ["--kinds", "copied-topics", "python-topics", "--out", str(out)]
    assert matched.main(words) == 0
    content = json.loads(out.read_text())
    rows = content["rows"]
    assert len(rows) == 3 * 2 * (len(matched.CHOSEN) + len(matched.MERGED))
    assert {(r["kind"], r["context"]) for r in rows} == {
        ("copied", 256), ("copied", 300), ("documentation", 256)
    }  # fmt: skip
    for row in rows:
        assert row["new_tokens"] == 12 * (2 if row["temperature"] else 1)
        assert row["tokens_per_pass"] == pytest.approx(row["new_tokens"] / row["passes"], rel=1e-3)
        assert ("matched_passes" in row) == (row["part"] == "chosen" and row["setting"] != "none")
        assert ("costs" in row) == (row["part"] == "chosen")
    tables = script("benchmarks.texts.matched_tables").TABLES
    chosen, merged = (tables[name].make(content) for name in ("matched", "merged"))
    assert chosen.count("| copied | 300 | 0.8 |") == merged.count("| copied | 300 | 0.8 |") == 1
    assert "| none | lookup:12 | lookup:31 | lookup:12 lookup:31 | lookup:12 lookup:63 |" in chosen
    assert tables["matched"].make({"rows": []}) is None

"""Figures of older code: those to be measured again, and those that settled a choice."""

import json
from pathlib import Path
from typing import Any

import pytest

OLD: dict[str, Any] = {"commit": "abc", "code": {"engine": "0"}, "rows": []}


def test_what_is_to_be_measured_again(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tables, markdown = script("benchmarks.tables"), script("benchmarks.common.markdown")
    digest = script("benchmarks.common.results").digest
    for name in ("requests_h200.json", "trees.json", "of_a_script_that_is_no_more.json"):
        (tmp_path / name).write_text(json.dumps(OLD))
    today = OLD | {"code": {"engine": digest("engine")}}
    (tmp_path / "prefill_h200.json").write_text(json.dumps(today))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    again, once = tables.which_code({}).split("\n\n")
    assert again.splitlines()[0] == "| to be measured again | older figures in it |"
    assert once.splitlines()[0] == "| measured once | older figures in it |"
    told = "measured at commit abc; code under it has changed since |"
    assert again.splitlines()[2:] == [f"| `requests_h200.json` | {told}"]
    assert once.splitlines()[2:] == [
        f"| `of_a_script_that_is_no_more.json` | {told}", f"| `trees.json` | {told}"
    ]  # fmt: skip
    assert tables.main(["--check"]) == 1, "the documents' tables are of other files"
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "changed since" in line] == [
        "docs/results/requests_h200.json: measured at commit abc; code under it has changed since"
    ]
    assert markdown.file_note("requests_h200.json", {"": OLD}).endswith("requests_h200.json` (older code).\n")
    assert markdown.file_note("trees.json", {"": OLD}).endswith("trees.json` (measured once).\n")
    assert markdown.file_note("trees.json", {"": today}).endswith("trees.json`.\n")

"""The benchmark of whole requests with tiny models, and the prompts that benchmarks share."""

from pathlib import Path
from typing import Any

import pytest

from scripts.benchmarks.common.results import content_at
from scripts.benchmarks.sources.python_files import docstrings


def test_docstrings_stand_below_their_functions() -> None:
    code = 'def f(a, *, b=1):\n    """' + "word " * 20 + '"""\n\n\ndef g():\n    """Short."""\n'
    assert docstrings(code).startswith("f(a, *, b=1)\n\n   word word")
    assert "Short" not in docstrings(code)
    assert docstrings("not Python (") == ""


@pytest.mark.slow
def test_whole_requests_are_measured(script: Any, tmp_path: Path) -> None:
    """Cold and second turn, ours beside plain decoding with the same greedy text."""
    words = ["--tiny", "--shapes", "llama-2-7b", "--runs", "1", "--text", "python-topics"]
    words += ["--out", str(tmp_path)]
    assert script("benchmarks.requests.run").main(words) == 0
    tables = script("benchmarks.requests.tables")
    content = content_at(tmp_path / tables.CPU_FILE)
    cold, second = content["rows"]
    assert [row["turn"] for row in (cold, second)] == ["cold", "second turn"]
    assert cold["reused_tokens"] == 0
    assert cold["prompt_tokens"] > cold["context"] == 384
    answered = cold["prompt_tokens"] + cold["new_tokens"]
    assert answered - 2 <= second["reused_tokens"] < answered < second["prompt_tokens"]
    for row in (cold, second):
        assert row["same_tokens"] == row["new_tokens"] == 8
        for timed in (row, row["plain"]):
            assert 0 < timed["prefill_seconds"] < timed["first_token_seconds"] < timed["seconds"]
        assert row["speedup"] == row["plain"]["seconds"] / row["seconds"]
        assert row["tokens_per_pass"] >= 1
        assert all(0 <= rate <= 1 for rate in row["acceptance"].values())
        assert "target" in row["acceptance"]
    for name in ("requests", "requests_cpu"):
        made = tables.TABLES[name].make(content)
        assert f"| {second['prompt_tokens']:,} | {second['reused_tokens']:,} |" in made
        assert f"| {second['acceptance']['target']:.2f} | {second['tokens_per_pass']:.1f} |" in made


def test_loads_stand_beside_the_fastest_other_server(script: Any) -> None:
    load = {"prompt_tokens": 64, "clients": 2, "new_tokens": 8}
    rows = [
        load | {"part": part, "tokens_per_second": speed}
        for part, speed in (("triforce-tree", 30.0), ("vllm", 10.0), ("vllm-ngram", 20.0))
    ]
    alone = rows[0] | {"clients": 4}
    [row] = script("benchmarks.requests.tables").beside({"rows": [*rows, alone]})
    assert (row["clients"], row["other"]["part"], row["ratio"]) == (2, "vllm-ngram", 1.5)


def test_readme_names_loads_that_were_measured(script: Any) -> None:
    front = script("benchmarks.front")
    assert len(front.front_rows(content_at(front.RESULTS / front.texts.ANY_TEXT))) == 6

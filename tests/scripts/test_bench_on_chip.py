"""Tests what the benchmark `on_chip` computes apart from any model: prompts, settings, rows, tables."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.benchmarks.common.results import content_at
from scripts.benchmarks.sources.python_files import docstrings


def sample(method: str, ms: float, prompt: str = "prompt 1", temperature: float = 0.0) -> dict[str, Any]:
    place = {"batch": 1, "context": 512, "new_tokens": 8, "temperature": temperature, "setting": {}}
    made: dict[str, Any] = {**place, "method": method, "prompt": prompt, "sources": ["a"], "ms_per_token": ms}
    if method == "triforce":
        stage = {"ms": 2.0, "roof_ms": 1.0, "runs": 3.0}
        made |= {
            "roof_ms": 9.0, "tokens_per_pass": 5.0, "rounds_per_pass": 3.0, "pass_ms": 10.0,
            "repeated_8grams": 0.1, "prefill_seconds": 1.0, "capture_seconds": 2.0, "peak_gib": 3.0,
            "acceptance": {"retrieval": 0.7, "target": 0.9},
            "mean_accepted_length": {"retrieval": 2.4, "target": 5.0},
            "stages": {"draft": stage, "target": stage},
        }  # fmt: skip
    if method == "autoregressive":
        made["exact"] = {"compared": 8, "ties": 1, "failures": 0, "partings": []}
    return made


def book(script: Any, folder: Path, **options: Any) -> Any:
    settings = {
        "shape": "llama-2-7b",
        "options": {"gamma": 16, "retrieval_weight_bits": 8} | options,
        "seed": 0,
        "engine": "e",
    }
    rows = script("benchmarks.on_chip.run").rows
    return script("benchmarks.common.results").ResultsFile(folder / "test.jsonl", "7b", settings, rows)


def test_the_faster_baseline_counts_and_medians_are_over_prompts(script: Any, tmp_path: Path) -> None:
    written = book(script, tmp_path)
    for number, ms in enumerate((2.0, 4.0, 3.0)):
        written.add(sample("triforce", ms, f"prompt {number}"))
        written.add(sample("autoregressive", 10.0 + number, f"prompt {number}"))
    [row] = written.all["rows"]
    assert (row["ms_per_token"], row["baseline"], row["speedup"]) == (3.0, "autoregressive", 3.667)
    written.add(sample("transformers-static", 9.0))
    [row] = content_at(tmp_path / "test.jsonl")["rows"]
    assert (row["baseline"], row["baseline_ms_per_token"], row["speedup"]) == (
        "transformers-static",
        9.0,
        3.0,
    )
    assert row["exact"] == {"compared": 24, "ties": 3, "failures": 0}
    assert (row["prompts"], row["ms_per_token_p20"], row["ms_per_token_p80"]) == (3, 2.4, 3.6)


def test_a_greedy_rival_serves_every_temperature_and_plain_decoding_its_own(
    script: Any, tmp_path: Path
) -> None:
    written = book(script, tmp_path)
    for one in (("triforce", 2.0), ("autoregressive", 8.0), ("transformers-static", 20.0)):
        written.add(sample(*one))
    written.add(sample("triforce", 3.0, temperature=0.6))
    sampled = written.all["rows"][1]
    assert sampled["baselines"].keys() == {"transformers-static"}
    assert sampled["baselines"]["transformers-static"]["temperature"] == 0.0


def test_a_part_goes_on_with_its_own_settings_only(script: Any, tmp_path: Path) -> None:
    book(script, tmp_path).add(sample("triforce", 2.0))
    assert book(script, tmp_path).find(method="triforce") is not None
    assert book(script, tmp_path, gamma=8).find(method="triforce") is None


def test_tables_from_rows(script: Any, tmp_path: Path) -> None:
    tables = script("benchmarks.on_chip.tables")
    written = book(script, tmp_path)
    written.mine["read_bandwidth"] = 4.4e12
    written.add(sample("triforce", 2.0))
    written.add(sample("autoregressive", 10.0))
    own = {name: table for name, table in tables.TABLES.items() if table.file == tables.FILE}
    made = {name.removeprefix("on_chip_"): table.make(written.all) for name, table in own.items()}
    assert "| llama-2-7b inflated | 1 x 1 x 512 | 0 | **2.00** | 10.00 (90 %) |" in made["headline"]
    assert "| 0: draft grows a tree | 3.00 | 2.00 | 1.00 | 50 % | 60 % |" in made["levels"]
    assert made["lengths"] is None
    assert re.search(r"on_chip_h200.jsonl` \(\S+ of \d{4}-\d\d-\d\d\)\.\n$", made["headline"])


def test_texts_are_read_as_rings(script: Any) -> None:
    prompts = script("benchmarks.common.texts")
    assert prompts.cut([1, 2, 3, 4], 6, 3) == [3, 4, 1]
    code = 'def f(a, *, b=1):\n    """' + "word " * 20 + '"""\n\n\ndef g():\n    """Short."""\n'
    assert docstrings(code).startswith("f(a, *, b=1)\n\n   word word")
    assert "Short" not in docstrings(code)
    assert docstrings("not Python (") == ""


def test_parts_list_each_measurement_once(script: Any) -> None:
    parts = script("benchmarks.on_chip.run").PARTS
    for name, plan in parts.items():
        keys = [key for step in plan.steps() for key in step.keys]
        assert len({json.dumps(key) for key in keys}) == len(keys), name
    first = [key for step in parts["7b"].steps() for key in step.keys if key["prompt"] == "prompt 1"]
    assert [(key["method"], key["temperature"]) for key in first] == [
        ("triforce", 0.0), ("triforce", 0.6), ("triforce", 1.0), ("transformers-static", 0.0)
    ]  # fmt: skip
    for step in parts["lengths"].steps():
        for key in step.keys:
            assert key["start"] == key["context"] <= step.context
            assert key["setting"].get("budget", 8192) <= key["context"] / 4


def test_plain_decoding_follows_greedy_headlines_alone(script: Any) -> None:
    on_chip = script("benchmarks.on_chip.run")

    def plain_beside(plan: Any) -> list[tuple[Any, Any]]:
        session, made = object.__new__(on_chip.OnChipSession), []
        session.plan = plan
        session.ours = lambda key, *_: SimpleNamespace(texts=["ours"])
        session.plain = lambda key, _, texts: made.append((key["setting"], texts))
        for step in list(plan.steps())[:2]:
            for key in step.keys[:2]:
                if key["method"] == "triforce":
                    session._cell(key, [], [])
        return made

    assert plain_beside(on_chip.PARTS["7b"]) == [({}, ["ours"]), ({}, None)] * 2


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

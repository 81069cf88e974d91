"""The benchmarks of the command line, on a tiny pair."""

import json
from pathlib import Path

import pytest

from tests.support.models.tiny_pair import TinyPair
from tests.support.processes.command_line import last_object, run
from triforce_tree.bench import baselines
from triforce_tree.cli.bench import arguments as bench_arguments


def test_help_names_every_method() -> None:
    assert tuple(baselines.METHODS) == bench_arguments.METHODS


def test_bench_text_continues_an_interrupted_run(
    capsys: pytest.CaptureFixture[str], pair: TinyPair, tmp_path: Path
) -> None:
    out_file = tmp_path / "r.jsonl"
    argv = ["bench", "text", *pair.options, "--context", "90", "--new-tokens", "8", "--prompts", "2"]
    argv += ["--out", str(out_file), "--json"]
    code, out, _ = run(capsys, *argv)
    first = last_object(out)
    assert code == 0
    assert len(first["rows"]) == 16
    for row in first["rows"]:
        assert list(row) == [
            "method", "temperature", "context", "new_tokens", "ms_per_token", "speedup_vs_best_baseline",
            "acceptance", "repeated_8grams", "prompts", "prompt_tokens",
        ]  # fmt: skip
    lines = out_file.read_text().splitlines(keepends=True)
    out_file.write_text("".join(lines[:10]) + lines[10][:20])  # killed while it wrote
    code, out, err = run(capsys, *argv)
    assert len(last_object(out)["rows"]) == 16
    # What was there counts for the bar, and is neither told again nor part of its speed.
    assert sum(line.endswith("ms a token") for line in err.splitlines()) == len(lines) - 10
    again = out_file.read_text().splitlines(keepends=True)
    assert len(again) == len(lines)
    assert again[:10] == lines[:10]
    code, _, err = run(capsys, *argv, "--new-tokens", "9")
    assert code == 2
    assert "new_tokens=8, now it is 9" in err


def test_a_first_pass_that_makes_all_tokens_is_refused(
    capsys: pytest.CaptureFixture[str], pair: TinyPair
) -> None:
    words = ["bench", "text", *pair.options, "--context", "90", "--prompts", "1", "--temperatures", "0"]
    code, _, err = run(capsys, *words, "--new-tokens", "1", "--methods", "transformers-dynamic")
    assert code == 2
    assert "transformers-dynamic made all 1 new tokens in its first pass, which is not timed" in err
    assert "Traceback" not in err


def test_bench_needle(capsys: pytest.CaptureFixture[str], pair: TinyPair) -> None:
    code, out, err = run(
        capsys, "bench", "needle", *pair.options, "--lengths", "200", "--depths", "0", "1", "--trials", "1",
        "--through", "hierarchy", "target", "--budget", "64", "--advanced", "recent=32", "--json",
    )  # fmt: skip
    assert code == 0
    accuracy = last_object(out)["accuracy"]
    assert accuracy["target"]["200"].keys() == accuracy["hierarchy"]["200"].keys() == {"0", "1"}
    assert "needle accuracy" in err


def test_books_of_a_file(capsys: pytest.CaptureFixture[str], pair: TinyPair, tmp_path: Path) -> None:
    path = tmp_path / "books.jsonl"
    path.write_text(json.dumps({"text": "Once upon a time there was a book. " * 40}) + "\n")
    words = ["bench", "pg19", "--data", str(path), *pair.options, "--prompts", "1", "--new-tokens", "4"]
    words += [
        "--temperatures",
        "0",
        "--methods",
        "triforce-autoregressive",
        "--lengths",
        "50",
        "90",
        "--json",
    ]
    code, out, _ = run(capsys, *words, "--json")
    assert code == 0
    result = last_object(out)
    assert [row["context"] for row in result["rows"]] == [50, 90]

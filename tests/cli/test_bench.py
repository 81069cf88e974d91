"""The benchmarks of the command line, on a tiny pair."""

from pathlib import Path

import pytest
from command_line import last_object, run
from tiny_pair import TinyPair

from triforce_tree.cli.bench import arguments as bench_arguments
from triforce_tree.eval import baselines


def test_help_names_every_method() -> None:
    assert tuple(baselines.METHODS) == bench_arguments.METHODS


def test_bench_text_continues_an_interrupted_run(
    capsys: pytest.CaptureFixture[str], pair: TinyPair, tmp_path: Path
) -> None:
    out_file = tmp_path / "r.jsonl"
    argv = [
        "bench",
        "text",
        *pair.options,
        "--context",
        "90",
        "--new-tokens",
        "8",
        "--prompts",
        "2",
    ]
    argv += ["--out", str(out_file), "--json"]
    code, out, _ = run(capsys, *argv)
    first = last_object(out)
    assert code == 0
    assert len(first["rows"]) == 14
    for row in first["rows"]:
        assert list(row) == [
            "method", "temperature", "context", "new_tokens", "ms_per_token", "speedup_vs_best_baseline",
            "acceptance", "repeated_8grams",
        ]  # fmt: skip
    lines = out_file.read_text().splitlines(keepends=True)
    out_file.write_text("".join(lines[:10]) + lines[10][:20])  # killed while it wrote
    assert len(last_object(run(capsys, *argv)[1])["rows"]) == 14
    again = out_file.read_text().splitlines(keepends=True)
    assert len(again) == len(lines)
    assert again[:10] == lines[:10]
    code, _, err = run(capsys, *argv, "--new-tokens", "9")
    assert code == 2
    assert "new_tokens=8, now it is 9" in err


def test_bench_needle(capsys: pytest.CaptureFixture[str], pair: TinyPair) -> None:
    code, out, err = run(
        capsys, "bench", "needle", *pair.options, "--lengths", "200", "--depths", "0", "1", "--trials", "1",
        "--through", "hierarchy", "target", "--json",
    )  # fmt: skip
    assert code == 0
    assert last_object(out)["accuracy"]["target"]["200"].keys() == {"0", "1"}
    assert "needle accuracy" in err


def test_bench_ruler(capsys: pytest.CaptureFixture[str], pair: TinyPair, tmp_path: Path) -> None:
    how = [
        "bench", "ruler", *pair.options, "--lengths", "900", "--tasks", "single", "multi-value", "--trials",
        "1", "--through", "hierarchy", "target", "--json", "--out", str(tmp_path / "answers.jsonl"),
    ]  # fmt: skip
    code, out, err = run(capsys, *how)
    assert code == 0
    scores = last_object(out)["scores"]
    assert scores["target"].keys() == {"single", "multi-value"}
    assert "share of answers found" in err
    # A second run has nothing left to do.
    lines = (tmp_path / "answers.jsonl").read_text()
    assert len(lines.splitlines()) == 1 + 4
    code, out, _ = run(capsys, *how)
    assert (tmp_path / "answers.jsonl").read_text() == lines
    assert last_object(out)["scores"] == scores

"""The benchmarks of the command line, on a tiny pair."""

import json
from pathlib import Path

import pytest

from tests.support.models.tiny_pair import TinyPair
from tests.support.processes.command_line import last_object, run
from triforce_tree.cli.bench import arguments as bench_arguments
from triforce_tree.eval import baselines
from triforce_tree.eval.paper import published


def test_help_names_every_method() -> None:
    assert tuple(baselines.METHODS) == bench_arguments.METHODS


@pytest.mark.slow
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
    assert len(first["rows"]) == 16
    for row in first["rows"]:
        assert list(row) == [
            "method", "temperature", "context", "new_tokens", "ms_per_token", "speedup_vs_best_baseline",
            "acceptance", "repeated_8grams",
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


@pytest.mark.slow
def test_bench_paper(capsys: pytest.CaptureFixture[str], pair: TinyPair, tmp_path: Path) -> None:
    """A table that compares policies and one that is timed; a second run measures only what it adds."""
    out_file = tmp_path / "paper.jsonl"
    sizes = ["--context", "256", "--new-tokens", "4", "--file", pair.text, "--out", str(out_file)]
    argv = ["bench", "paper", *pair.options, *sizes, "--json", "--items"]
    code, out, _ = run(capsys, *argv, "table-5")
    rows = last_object(out)["rows"]
    assert code == 0
    assert {row["item"] for row in rows} == {"table-5"}
    assert {row["column"] for row in rows} == {"here", "here, our settings", "here, the paper's settings"}
    before = out_file.read_text()
    code, out, err = run(capsys, *argv, "table-1", "table-5")
    assert code == 0
    assert out_file.read_text().startswith(before)
    added = [json.loads(line)["cell"] for line in out_file.read_text()[len(before) :].splitlines()]
    assert added[0] == "asked for"
    assert added[1:] == ["overlap", "overlap"]
    assert "Table 1 (section 4.1)" in err
    assert "2.31x" in out_file.with_suffix(".md").read_text()
    assert set(bench_arguments.PAPER) == set(published.items())


def test_bench_paper_refuses_what_cannot_be_measured(
    capsys: pytest.CaptureFixture[str], pair: TinyPair
) -> None:
    argv = ["bench", "paper", "--target", pair.target, "--device", "cpu", "--context"]
    code, _, err = run(capsys, *argv, "256", "--items", "table-1", "table-8")
    assert code == 2
    assert "table-8 drafts chains with a draft model" in err
    code, _, err = run(capsys, *argv, "256", "--shape", "llama-2-7b")
    assert code == 2
    assert "inflates the embedded pair" in err
    code, _, err = run(capsys, *argv, "200", "--draft", pair.draft)
    assert code == 2
    assert "context=200 is too short" in err


def test_bench_needle(capsys: pytest.CaptureFixture[str], pair: TinyPair) -> None:
    code, out, err = run(
        capsys, "bench", "needle", *pair.options, "--lengths", "200", "--depths", "0", "1", "--trials", "1",
        "--through", "hierarchy", "target", "streaming-llm", "--budget", "64", "--recent", "32", "--json",
    )  # fmt: skip
    assert code == 0
    accuracy = last_object(out)["accuracy"]
    assert accuracy["target"]["200"].keys() == accuracy["streaming-llm"]["200"].keys() == {"0", "1"}
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


@pytest.fixture
def questions(tmp_path: Path) -> str:
    """Rows in LongBench's schema."""
    rows = [
        {
            "context": f"The owner of house {n} is Bob{n}. " + "A line of other words. " * 60,
            "input": f"Who owns house {n}?", "answers": [f"Bob{n}"], "all_classes": None,
        }
        for n in range(2)
    ]  # fmt: skip
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "qasper.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path.parent)


@pytest.mark.slow
def test_public_data_continues_is_reported_and_measured_again(
    capsys: pytest.CaptureFixture[str], pair: TinyPair, tmp_path: Path, questions: str
) -> None:
    out_file = tmp_path / "run.jsonl"
    small = ["--budget", "64", "--recent", "32", "--chunk", "8", "--new-tokens", "6", "--prompts", "2"]
    methods = ["--methods", "triforce-3-level", "transformers-dynamic", "streaming-llm"]
    argv = ["bench", "longbench", "--data", questions, *pair.options, *small, *methods, "--lengths", "300"]
    argv += ["--temperatures", "0", "--out", str(out_file), "--json"]
    code, out, err = run(capsys, *argv)
    assert code == 0
    result = last_object(out)
    assert [row["method"] for row in result["rows"]] == methods[1:]
    [answers] = result["answers"]
    assert answers["hierarchy"] == answers["target"]
    assert (answers["compared"], answers["identical"]) == (2, 2)
    assert "streaming-llm (lossy)" in err
    assert (tmp_path / "run.md").exists()
    lines = out_file.read_text().splitlines(keepends=True)
    assert len(lines) == 1 + 2 * (3 + 2)
    first = json.loads(lines[0])
    assert {"command", "commit", "date", "versions", "hardware", "seed"} <= first["about"].keys()
    assert {"data_digest", "template", "metric"} <= first["settings"].keys()
    # A run that was ended measures what is missing.
    out_file.write_text("".join(lines[:4]) + lines[4][:9])
    assert run(capsys, *argv)[0] == 0
    again = out_file.read_text().splitlines(keepends=True)
    assert again[:4] == lines[:4]
    assert len(again) == len(lines)
    # Other data are not put beside these.
    rows = Path(questions, "qasper.jsonl")
    rows.write_text(rows.read_text().replace("Bob1", "Eve"))
    code, _, err = run(capsys, *argv)
    assert code == 2
    assert "was made with data_digest=" in err
    rows.write_text(rows.read_text().replace("Eve", "Bob1"))


def test_books_have_speed_alone(capsys: pytest.CaptureFixture[str], pair: TinyPair, tmp_path: Path) -> None:
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
    assert result["answers"] == []

"""The benchmark of TriForce's tables, on a tiny pair."""

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.benchmarks import paper
from tests.support.models.tiny_pair import TinyPair


@pytest.mark.parametrize("context", [256, 2048, 122_880])
def test_the_budget_fits_its_context(pair: TinyPair, context: int) -> None:
    """And the engine accepts the paper's settings with it."""
    budget = paper.budget_at(context)
    assert budget % 32 == 0
    assert budget <= context // 4
    engine = pair.load()
    for key in paper.keys_of([*paper.rows_of("2"), *paper.rows_of("4")], 1):
        config = paper.engine_for(engine, key, context).config
        if key["settings"] == "paper" and not key["naive"]:
            assert (config.retrieval.budget, config.retrieval.chunk, config.rounds) == (budget, 8, 4)
    assert paper.budget_at(paper.CONTEXT) == paper.BUDGET


def test_a_cell_is_measured_once_for_each_prompt() -> None:
    rows = [row for table in ("2", "3", "4", "2") for row in paper.rows_of(table)]
    keys = [json.dumps(key) for key in paper.keys_of(rows, 2)]
    assert len(keys) == len(set(keys))
    batches = [key for key in paper.keys_of(rows, 2) if key["batch"] > 1]
    assert {key["prompt"] for key in batches} == {0}


@pytest.mark.release
def test_a_run_goes_on_and_stands_beside_the_paper(pair: TinyPair, tmp_path: Path) -> None:
    out = tmp_path / "paper.jsonl"
    sizes = ["--context", "256", "--new-tokens", "4", "--file", pair.text, "--out", str(out)]
    words = [*pair.options, *sizes, "--temperatures", "0.6", "--tables"]
    assert paper.main([*words, "2"]) == 0
    before = out.read_text()
    assert paper.main([*words, "2", "4"]) == 0
    assert out.read_text().startswith(before)
    records: list[dict[str, Any]] = [json.loads(line) for line in out.read_text().splitlines()[1:]]
    three = [("paper", False), ("ours", False), ("paper", True)]
    assert [(r["settings"], r["naive"], r["batch"]) for r in records] == [
        (*each, batch) for batch in (1, 2, 6, 10) for each in three
    ]
    assert all(r["ms/token"] > 0 and r["plain ms/token"] > 0 for r in records)
    [shown] = [line for line in out.with_suffix(".md").read_text().splitlines() if "| 2.19x |" in line]
    for record in records[:2]:
        assert f"{record['plain ms/token'] / record['ms/token']:.2f}x" in shown


@pytest.mark.parametrize(
    "more, said",
    [
        (["--context", "256"], "need a draft model; give --draft"),
        (["--context", "256", "--shape", "llama-2-7b"], "inflates the embedded pair"),
        (["--context", "200"], "context=200 is too short"),
        (["--draft", "DRAFT", "--temperatures", "0.7"], "no row of these tables has T=[0.7]"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    capsys: pytest.CaptureFixture[str], pair: TinyPair, more: list[str], said: str
) -> None:
    words = [pair.draft if word == "DRAFT" else word for word in more]
    with pytest.raises(SystemExit):
        paper.main(["--target", pair.target, "--device", "cpu", *words])
    assert said in capsys.readouterr().err

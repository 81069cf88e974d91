"""The benchmark of the paper's tables, on a tiny pair."""

import json
from pathlib import Path

import pytest

from scripts.benchmarks.paper import run
from scripts.benchmarks.paper.no_draft import without_draft
from tests.support.models.tiny_pair import TinyPair


def pair_options(pair: TinyPair) -> list[str]:
    return list(pair.options)


def test_a_table_of_policies_and_one_of_times(
    capsys: pytest.CaptureFixture[str], pair: TinyPair, tmp_path: Path
) -> None:
    """A second run measures only what it adds."""
    out = tmp_path / "paper.jsonl"
    sizes = ["--context", "256", "--new-tokens", "4", "--file", pair.text, "--out", str(out)]
    words = [*pair_options(pair), *sizes, "--json", "--items"]
    assert run.main([*words, "table-5"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert {row["item"] for row in rows} == {"table-5"}
    assert {row["column"] for row in rows} == {"here", "here, our settings", "here, the paper's settings"}
    before = out.read_text()
    assert run.main([*words, "table-1", "table-5"]) == 0
    assert out.read_text().startswith(before)
    added = [json.loads(line)["cell"] for line in out.read_text()[len(before) :].splitlines()]
    assert added == ["asked for", "overlap", "overlap"]
    assert "Table 1 (section 4.1)" in capsys.readouterr().err
    assert "2.31x" in out.with_suffix(".md").read_text()


@pytest.mark.parametrize(
    "more, said",
    [
        (["--context", "256", "--items", "table-1", "table-8"], "table-8 drafts chains with a draft model"),
        (["--context", "256", "--shape", "llama-2-7b"], "inflates the embedded pair"),
        (["--context", "200", "DRAFT"], "context=200 is too short"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    capsys: pytest.CaptureFixture[str], pair: TinyPair, more: list[str], said: str
) -> None:
    words = ["--target", pair.target, "--device", "cpu", *more]
    if "DRAFT" in words:
        words[words.index("DRAFT") :] = ["--draft", pair.draft]
    with pytest.raises(SystemExit):
        run.main(words)
    assert said in capsys.readouterr().err


def test_retrieval_without_a_draft_adds_a_token_a_pass(pair: TinyPair) -> None:
    engine = pair.load(budget=64, recent=32)
    out = without_draft(engine).generate(list(range(1, 301)), do_sample=False, max_new_tokens=24)
    retrieval = next(level for level in out.levels or [] if level.name == "retrieval")
    target = next(level for level in out.levels or [] if level.name == "target")
    assert retrieval.accepted == 0
    assert retrieval.emitted == retrieval.forwards == target.proposed >= target.forwards > 0

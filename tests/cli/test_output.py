"""Tests what commands print where texts differ, where stdout cannot encode them, and after Ctrl-C."""

import io
import json
import signal
import sys
from typing import Any

import pytest
import torch

import triforce_tree
from tests.support.distributions.wrong_acceptance import accept_all_proposals
from tests.support.models.families import prompt_of, tiny
from tests.support.models.tiny_pair import TinyPair
from triforce_tree.check.compare import compared, summary
from triforce_tree.cli import console, entry
from triforce_tree.cli.entry import main
from triforce_tree.requests.output import GenerateOutput


@pytest.mark.parametrize("command", ["generate", "demo"])
def test_a_text_that_is_not_the_targets_ends_with_code_1(
    capsys: pytest.CaptureFixture[str],
    pair: TinyPair,
    prompt: str,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    accept_all_proposals(monkeypatch)
    words = {
        "generate": ["generate", prompt, "--max-new-tokens", "30", "--compare", "--json"],
        "demo": ["demo", "--prompt-tokens", "300", "--new-tokens", "30", "--json"],
    }[command]
    small = ["--budget", "64", "--advanced", "recent=32", "--levels", "3", "--advanced", "rounds=1"]
    assert main([*words, *pair.options, *small]) == 1
    out, err = capsys.readouterr()
    result = json.loads(out.splitlines()[-1])
    assert (result["identical"], result["tie"], result["failed"]) == (False, False, True)
    said = " ".join(err.split())
    verdict = (
        f"texts differ from token {result['first_difference']} on: FAILED, there are no ties in 32 bits (gap"
    )
    assert verdict in said


def test_a_tie_of_16_bits_is_distinguished_from_a_failure() -> None:
    model = tiny("llama-gqa").to(torch.bfloat16)
    prompt = prompt_of(60)
    engine = triforce_tree.load(model, levels=2)
    first = engine.generate(prompt, max_new_tokens=8, do_sample=False)
    token = int(first.sequences[0, 63])
    twin, other = (i for i in range(token + 1, token + 3))
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[token]

    def instead(new: int) -> GenerateOutput:
        out = engine.with_options(levels=1).generate(prompt, max_new_tokens=8, do_sample=False)
        out.sequences[0, 63] = new
        return out

    tie = compared(engine, prompt, instead(token), instead(twin), greedy=True)
    assert tie.difference is not None
    assert tie.difference.gap == 0 < tie.difference.noise
    assert not tie.failed
    assert "texts differ from token 3 on: a tie (gap 0, noise " in tie.verdict()
    assert summary(first, tie)["tie"] is True
    for ours, theirs in ((token, other), (other, token)):
        failure = compared(engine, prompt, instead(ours), instead(theirs), greedy=True)
        assert failure.failed
        assert "texts differ from token 3 on: FAILED, no tie (gap " in failure.verdict()


def test_memory_too_short_to_judge_a_difference_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = triforce_tree.load(tiny("llama-gqa"), levels=1)
    outputs = [engine.generate([1, 2, 3], max_new_tokens=4, do_sample=False) for _ in range(2)]
    outputs[0].sequences[0, 4] += 1

    def short(*args: object) -> None:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr("triforce_tree.check.compare.first_difference", short)
    result = compared(engine, [1, 2, 3], *outputs, greedy=True)
    assert not result.failed
    assert "texts differ from token 1 on; too little memory to tell a tie from a failure" in result.verdict()


def test_text_that_stdout_cannot_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    console.TextOut(None).on_finalized_text("smile 😀 é\udc80", stream_end=True)  # type: ignore[arg-type]
    console.json_line({"text": "smile 😀"})
    text, line = raw.getvalue().decode("ascii").splitlines()
    assert text == "smile ? ??"
    assert json.loads(line) == {"text": "smile 😀"}


def test_names_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """A path may hold what rich would take for markup, and refuse as such."""
    name = "results[/b][red]:smile:"
    console.screen().print(name)
    console.screen().print(console.plain_table(name, (name,), [(name,)]))
    with console.bar("units") as progress:
        progress.add_task(name, total=1)
    assert capsys.readouterr().err.count(name) == 5


@pytest.mark.parametrize("asked", [[], ["--json"]])
def test_ctrl_c_at_the_start_ends_with_json_where_it_was_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    monkeypatch.setattr(entry, "import_module", lambda name: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["generate", "-", *asked]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    out, err = capsys.readouterr()
    assert err == "triforce-tree: interrupted\n"
    assert out == ('{"interrupted": true}\n' if asked else "")


@pytest.mark.parametrize("narrow", [["--top-k", "5"], ["--top-p", "0.9"]])
def test_top_k_and_top_p_without_effect_are_reported(
    capsys: pytest.CaptureFixture[str], pair: TinyPair, prompt: str, narrow: list[str]
) -> None:
    words = ["generate", prompt, *pair.options, "--max-new-tokens", "3"]
    assert main([*words, *narrow]) == 0
    assert "change nothing at temperature 0" in " ".join(capsys.readouterr().err.split())
    assert main([*words, *narrow, "--temperature", "0.5"]) == 0
    assert "change nothing" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["gpu", "host"])
def test_memory_without_a_unit(
    name: str, capsys: pytest.CaptureFixture[str], pair: TinyPair, prompt: str
) -> None:
    assert main(["generate", prompt, *pair.options, f"--{name}-memory", "24"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"triforce-tree: {name}_memory='24' is less than 1 MiB; write 24GiB\n"


def test_a_very_long_prompt_is_refused_by_its_beginning(
    capsys: pytest.CaptureFixture[str], pair: TinyPair, tmp_path: Any
) -> None:
    path = tmp_path / "long.txt"
    path.write_text("The import statement binds a name. " * 20_000)
    assert main(["generate", str(path), *pair.options]) == 2
    err = capsys.readouterr().err
    assert "700,000 characters has more than" in err
    assert "4,096 positions; shorten it" in err

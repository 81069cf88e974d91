"""The demo: one prompt for the question and both methods, and what it says of them."""

import json
import re

import pytest

from tests.support.models.tiny_pair import TinyPair
from tests.support.processes.command_line import run


def test_demo(capsys: pytest.CaptureFixture[str], pair: TinyPair) -> None:
    code, out, err = run(
        capsys, "demo", *pair.options, "--prompt-tokens", "2100", "--new-tokens", "40", "--levels", "2",
        "--advanced", "rounds=1", "--budget", "64", "--advanced", "recent=32", "--json",
    )  # fmt: skip
    text, line = out.rstrip("\n").rsplit("\n", 1)
    result = json.loads(line)
    assert code == 0
    assert result["identical"] is True
    assert result["failed"] is False
    assert result["prompt_tokens"] == 2100
    assert result["text"] == text
    assert {"speedup", "ms_per_token", "baseline_ms_per_token", "needle"} <= result.keys()
    assert [level["name"] for level in result["levels"]] == ["draft", "target"]
    said = " ".join(err.split())
    assert f"The secret number of the {result['needle']['name']} is {result['needle']['number']}." in said
    assert "a drafted token tree" in said
    assert re.search(rf"all {result['new_tokens']} tokens identical", said)


def test_demo_ends_before_its_passage_and_prints_json_only_when_asked(
    capsys: pytest.CaptureFixture[str], pair: TinyPair
) -> None:
    code, out, err = run(
        capsys, "demo", *pair.options, "--prompt-tokens", "300", "--new-tokens", "8", "--levels", "2",
        "--budget", "64", "--advanced", "recent=32", "--temperature", "0.8",
    )  # fmt: skip
    assert code == 0
    assert '"speedup"' not in out
    said = " ".join(out.split())
    assert "3-tuple as the sole argument. and goes on" in said
    assert "speed-up: " in said
    assert "tokens sampled from the target's own distribution" in said
    assert "prefill" in err

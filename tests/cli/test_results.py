"""Results go to stdout, progress and notes to stderr; with ``--json`` stdout has one object alone."""

import io
import json
import os
import subprocess
import sys
import time

import pytest

from tests.support.models.tiny_pair import TinyPair
from tests.support.processes.command_line import run
from tests.support.processes.processes import environment
from triforce_tree.cli import console
from triforce_tree.cli.entry import main
from triforce_tree.runtime.stats import rate_text

SMALL = ["--budget", "64", "--advanced", "recent=32"]
# command -> its words, and what its results say
COMMANDS: dict[str, tuple[list[str], list[str]]] = {
    "bench text": (
        ["--context", "90", "--new-tokens", "4", "--prompts", "1", "--methods", "triforce"],
        ["repeated 8-grams"],
    ),
    "bench needle": (["--lengths", "200", "--depths", "0.5", "--trials", "1"], ["needle accuracy"]),
    "check": (
        ["--lengths", "1", "--new-tokens", "4", "--draws", "0", "--levels", "2", *SMALL],
        ["greedy tokens against transformers' own decoding", "passed: no difference to the target was found"],
    ),
    "explain": (["TEXT", "--max-new-tokens", "8", *SMALL], ["tokens of prompt, 8 new", "time of each stage"]),
    "demo": (
        ["--prompt-tokens", "300", "--new-tokens", "8", "--levels", "2", *SMALL],
        ["what each level did", "speed-up: ", "and goes on"],
    ),
}  # fmt: skip


def words_of(command: str, pair: TinyPair, prompt: str) -> list[str]:
    words = [prompt if word == "TEXT" else word for word in COMMANDS[command][0]]
    more = ["--file", pair.text] if command.startswith("bench") or command == "check" else []
    return [*command.split(), *words, *pair.options, *more]


@pytest.mark.parametrize("command", COMMANDS)
def test_results_are_on_stdout(
    command: str, capsys: pytest.CaptureFixture[str], pair: TinyPair, prompt: str
) -> None:
    code, out, err = run(capsys, *words_of(command, pair, prompt))
    assert code == 0, err
    for said in COMMANDS[command][1]:
        assert said in " ".join(out.split())
        assert said not in " ".join(err.split())
    assert "\x1b" not in out


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "demo"])
def test_with_json_stdout_is_one_object(
    command: str, capsys: pytest.CaptureFixture[str], pair: TinyPair, prompt: str
) -> None:
    code, out, err = run(capsys, *words_of(command, pair, prompt), "--json")
    assert code == 0
    assert isinstance(json.loads(out), dict)
    for said in COMMANDS[command][1]:
        assert said in " ".join(err.split())


def test_an_encoding_without_our_characters(
    monkeypatch: pytest.MonkeyPatch, pair: TinyPair, prompt: str
) -> None:
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii"))
    assert main(words_of("explain", pair, prompt)) == 0
    sys.stdout.flush()
    assert b"time of each stage" in out.getvalue()


def test_a_reader_that_goes(pair: TinyPair, prompt: str) -> None:
    words = [sys.executable, "-m", "triforce_tree", *words_of("explain", pair, prompt)]
    read, write = os.pipe()
    os.close(read)
    closed = subprocess.run(words, env=environment(), stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (closed.returncode, b"Traceback" in closed.stderr) == (141, False)


def test_progress_in_a_log_is_not_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with console.bar("tokens", every=0.02) as progress:
        task = progress.add_task("prefill", total=4096)
        progress.advance(task, 1024)
        time.sleep(0.3)
    err = capsys.readouterr().err
    assert err.count("prefill: 1,024 of 4,096 tokens after 0 s") > 2


@pytest.mark.parametrize(
    "rate, text",
    [
        (0.0004, "0.0004"),
        (0.034, "0.034"),
        (0.34, "0.34"),
        (1.26, "1.3"),
        (99.96, "100.0"),
        (12345.6, "12,346"),
    ],
)
def test_small_rates_are_not_zero(rate: float, text: str) -> None:
    assert rate_text(rate) == text

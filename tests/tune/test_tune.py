"""The command ``tune``: measuring, continuing, and the profile that ``generate`` finds."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import tiny_pair
from tests.support.models.tiny_pair import TinyPair
from triforce_tree.cli.entry import main
from triforce_tree.planning.profiles import Entry
from triforce_tree.trees.shapes import parse_shape
from triforce_tree.tune.tuner import Tuner


def command(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any], str]:
    try:
        code = main([*argv, "--json"])
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    return code, json.loads(lines[-1]) if lines else {}, captured.err


@pytest.mark.slow
def test_tune_then_generate(capsys: pytest.CaptureFixture[str], pair: TinyPair, home: Path) -> None:
    small = ["--budget", "64", "--recent", "32", "--chunk", "8", "--window", "64"]
    argv = ["tune", *pair.options, *small, "--file", pair.text, "--context", "150", "--new-tokens", "5"]
    argv += ["--prompts", "1", "--temperature", "0"]
    code, result, err = command(capsys, *argv, "--dry-run")
    assert code == 0
    assert set(result["contexts"][0]["tried"]) == {"tree", "gamma", "refresh", "runner_ups", "tail_tree"}
    assert "3 2 1" in err
    code, _, err = command(capsys, *argv, "--dry-run", "--out", str(home / "profile.json"))
    assert code == 2
    assert "leave --out and --fresh out" in err
    assert not list(home.iterdir())
    code, result, err = command(capsys, *argv, "--seconds", "0.01")
    assert code == 0
    assert result["complete"] is False
    assert "continues from here" in err
    assert len(result["entries"]) == 1
    measured = Path(result["profile"]).with_suffix(".measured.jsonl")
    before = measured.read_text()
    code, result, err = command(capsys, *argv)
    assert result["complete"] is True
    assert measured.read_text().startswith(before)
    assert len(measured.read_text()) > len(before)
    assert "the fastest settings" in err
    code, _, err = command(capsys, *argv, "--new-tokens", "6")
    assert code == 2
    assert "new_tokens=5, now it is 6" in err
    assert command(capsys, *argv, "--new-tokens", "6", "--fresh", "--seconds", "0.01")[0] == 0
    prompt = home / "prompt.txt"
    prompt.write_text(tiny_pair.pydoc_text()[:400], encoding="utf-8")
    words = ["generate", str(prompt), *pair.options, "--max-new-tokens", "4"]
    assert command(capsys, *words)[1]["profile"] == result["profile"]
    assert command(capsys, *words, "--profile", "none")[1]["profile"] is None
    assert command(capsys, *words, "--profile", result["profile"])[1]["profile"] == result["profile"]
    code, _, err = command(capsys, *words, "--profile", str(prompt))
    assert code == 2
    assert "corrupt" in err


def test_tune_refuses_what_cannot_work(
    capsys: pytest.CaptureFixture[str], pair: TinyPair, home: Path, tmp_path: Path
) -> None:
    argv = ["tune", *pair.options, "--file", pair.text]
    for more, needed in (
        (["--context", "4090"], "4096 positions"),
        (["--context", "9999999"], "9999999 tokens"),
        (["--temperature", "-1"], "temperature=-1.0"),
        (["--context", "100", "--new-tokens", "5", "--out", "/nowhere/p.json"], "/nowhere/p.json"),
        (["--save-tree", "t.json", "--temperature", "0", "1"], "these are settings for 2 cases"),
        (["--save-tree", "t.json", "--temperature", "0", "--dry-run"], "--dry-run finds none"),
        (["--save-tree", "t.txt", "--temperature", "0"], "use a name that ends in .json"),
        (["--save-tree", "/nowhere/t.json", "--temperature", "0"], "/nowhere/t.json"),
    ):
        code, _, err = command(capsys, *argv, *more)
        assert code == 2, more
        assert needed in err
        assert len(err.strip().splitlines()) == 1


def test_the_tree_of_the_fastest_settings_is_saved(
    capsys: pytest.CaptureFixture[str],
    pair: TinyPair,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And read by other commands; nothing is written where plain decoding is the fastest."""
    made: list[Entry] = []
    monkeypatch.setattr(Tuner, "entries", lambda self, found: [*made])
    argv = ["tune", *pair.options, "--file", pair.text, "--context", "150", "--temperature", "0"]
    file = tmp_path / "tree.json"
    made.append(Entry(150, 0.0, {"levels": 1}, 5.0, 5.0))
    code, _, err = command(capsys, *argv, "--save-tree", str(file))
    assert code == 0
    assert "the fastest settings have none" in err
    assert not file.exists()
    tree = "static:0.0.0;0.1;1"
    made[0] = Entry(150, 0.0, {"levels": 2, "tree": tree, "other_trees": "none"}, 5.0, 9.0)
    code, _, err = command(capsys, *argv, "--save-tree", str(file))
    assert code == 0
    assert "--tree" in err
    assert parse_shape(str(file)) == parse_shape(tree)

"""The benchmark of trained drafters: what it measures, continues and shows."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.benchmarks.common.results import content_at
from scripts.benchmarks.sources.registry import Texts
from tests.support.distributions.head_folders import MTP, eagle_folder
from tests.support.models.families import prompt_of, tiny
from triforce_tree import Engine, load
from triforce_tree.loading.checkpoints import PAIR, load_model, load_tokenizer
from triforce_tree.verify.sampling import ProbsFromLogits


def drafters(script: Any, folder: Path) -> list[str]:
    """Writes a drafter of each kind for the embedded target as it is before training; returns their names."""
    teacher = script("train_drafters.teacher").Teacher(load_model(PAIR / "target", "cpu", torch.float32))
    cache, mtp = script("train_drafters.segments").Cache(), script("train_drafters.mtp")
    networks = {
        "eagle3": script("train_drafters.eagle").EagleNetwork(teacher, 2, 64, False, cache),
        "dflash": script("train_drafters.block").BlockTraining(teacher, 6, 1, 64, 64),
    }
    if MTP:
        networks["mtp"] = mtp.MtpTraining(teacher, 2, cache)
    for name, network in networks.items():
        files = [mtp.FILE] if name == "mtp" else []
        script("train_drafters.folder").DrafterFolder(folder / name, {"seed": 0}, *files).save(network, 1.0)
    if MTP:
        networks["mtp"].complete(folder / "mtp", load_tokenizer(PAIR / "target"))
    return [*networks]


@pytest.mark.release
def test_the_smallest_cell_is_measured_for_every_drafter_and_way(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, trained = script("benchmarks.drafters.run"), drafters(script, tmp_path)
    monkeypatch.setattr(Texts, "read", lambda self, source: "What a statement does, and what not. " * 200)
    words = [
        "--tiny", "--drafters", *(f"{name}={tmp_path / name}" for name in trained), "--kinds",
        "documentation", "--contexts", "260", "--temperatures", "0", "--new-tokens", "8",
        "--plain-tokens", "2", "--out", str(tmp_path),
    ]  # fmt: skip
    assert run.main([*words, "--ways", "chain", "tree"]) == 0
    assert run.main([*words, "--shapes", "8b", "--ways", "default"]) == 0
    content = content_at(tmp_path / "drafters_cpu.jsonl")
    found = {(row["shape"], row["drafter"], row["way"]): row for row in content["rows"]}
    assert found.keys() == {
        *(("pair", drafter, way) for drafter in ("draft", *trained) for way in ("chain", "tree")),
        *(("8b", drafter, "default") for drafter in ("draft", *trained)),
    }
    assert found["pair", "eagle3", "chain"]["chosen"]["tree"] == "chain:5"
    assert all(row["tokens_per_pass"] >= 1 for row in content["rows"])
    assert found["pair", "eagle3", "chain"]["chosen"]["plain_passes"] == 0
    settings = content["parts"]["8b-eagle3-default"]["settings"]
    assert (settings["vocabulary"], len(settings["weights"])) == (5001, 12)
    tables = script("benchmarks.drafters.tables").TABLES
    shown = tables["drafters_context"].make(content)
    assert "| embedded pair | tree | 0 | eagle3 |" in shown
    assert "inflated" not in tables["drafters_kind"].make(content).partition("\n\n")[0]
    assert "x)" in tables["drafters_speed"].make(content)
    capsys.readouterr()
    assert run.main([*words, "--ways", "chain"]) == 0, "nothing is missing"
    assert "prefill" not in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run.main([*words, "--drafters", f"other={tmp_path / 'none'}"])
    assert "make a draft or a drafter by" in capsys.readouterr().err


def test_the_last_column_is_the_ratio_of_two_contexts(script: Any) -> None:
    tables = script("benchmarks.drafters.tables")
    rows = [
        {"part": "p", "way": "tree", "context": context, "kind": kind, "model": "m", "temperature": 0.6,
         "drafter": "d", "tokens_per_pass": tokens}
        for context, kind, tokens in (
            (2048, "prose", 3.0), (2048, "code", 5.0), (65_536, "prose", 2.8), (65_536, "code", 4.4),
        )
    ]  # fmt: skip
    versions = {"torch": "2", "transformers": "5"}
    part = {
        "hardware": "a GPU", "versions": versions, "commit": "c", "date": "d", "notes": ["'n' with d"],
        "settings": {"vocabulary": 5},
    }  # fmt: skip
    content = {"rows": rows, "parts": {"p": part, "of other tables": {**part, "hardware": "none"}}}
    line = tables.by_context(content, "f").splitlines()[2]
    assert line == "| m | tree | 0.6 | d | 4.00 | 3.60 | 0.90 |"
    assert (
        "a GPU, torch 2, transformers 5, vocabulary of 5 entries, d. Not measured in m: 'n' with d. File: "
        "`docs/results/f` (c of d)."
    ) in tables.by_context(content, "f")
    by_kind = tables.by_kind(content, "f").splitlines()
    assert by_kind[0] == "| model | way | T | drafter | prose | code |"
    assert by_kind[2] == "| m | tree | 0.6 | d | 2.90 | 4.70 |"
    assert tables.speed(content, "f") is None


def test_a_shorter_prompt_has_its_own_hidden_states(script: Any, tmp_path: Path) -> None:
    """Hidden states of the newest positions alone are kept for a drafter, so that after a longer prompt or a
    long text those of the prompt are computed again.
    """
    grids = script("benchmarks.texts.grid")
    target = tiny("llama-gqa", num_hidden_layers=3)
    folder = eagle_folder(tmp_path / "head", target)
    prompt = prompt_of(300)

    def engine() -> Engine:
        advanced = {"rounds": 1, "sinks": 2, "window": 24}
        return load(target, drafter=folder, levels=2, tree="chain:3", advanced=advanced)

    def states(lengths: list[int]) -> tuple[Tensor, Tensor]:
        """Returns which of the newest states are known after the last of these prompts, and the states."""
        grid = grids.Grid(None, "", (), (300,), new_tokens=90)
        run = grids.GridRun(grid, None, None, torch.device("cpu"), grids.TimeLimit(None), 0)
        made, positions = engine(), torch.arange(lengths[-1] - 25, lengths[-1] - 1)[None]
        for length in lengths:
            with made.program([prompt[:length]], 90, ProbsFromLogits.at(0.0)) as program:
                run._feed(program, prompt[:length])
                features = program.state.features
                known = positions >= features.first[:, None]
                found = features.read(features.layers[0], positions)
                run.decode(program, prompt[:length], 0.0, 0, 90)
        return known, found

    known, found = states([300, 300, 150, 150])
    assert known.all()
    torch.testing.assert_close(found, states([150])[1])

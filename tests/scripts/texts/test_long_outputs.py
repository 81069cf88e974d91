"""The benchmark `long_outputs`: figures by position, and plain decoding in the middle of a text."""

from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.benchmarks.common.results import content_at
from scripts.benchmarks.sources.registry import SOURCES, Texts
from tests.support.models.tiny_pair import SMALL, TinyPair

# Bins of new tokens.
NEW, BIN, PLAIN = 96, 32, 6


def run_of(script: Any, folder: Path, pair: TinyPair, monkeypatch: pytest.MonkeyPatch, **more: Any) -> Any:
    grids, results = script("benchmarks.texts.grid"), script("benchmarks.common.results")
    rows = script("benchmarks.texts.positions").position_rows
    [source] = [each for each in SOURCES if each.name == "python-topics"]
    grid = grids.Grid(None, "", (source,), (200,), (0.0, 1.0), (0,), NEW, PLAIN, bin_tokens=BIN)
    settings = {"shape": "pair", "model": "tiny", "options": {}, "seed": 0}
    file = results.ResultsFile(folder / "long_outputs_cpu.jsonl", "pair", settings, rows)
    run = grids.GridRun(grid, file, Texts(), torch.device("cpu"), grids.TimeLimit(None), 0)
    monkeypatch.setattr(run, "_engine", lambda: pair.load(**{**SMALL, **more}))
    return run


def test_plain_decoding_continues_our_text_in_each_bin(
    script: Any, tmp_path: Path, pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(script, tmp_path, pair, monkeypatch)
    steps = iter([False] * 4)
    monkeypatch.setattr(run.limit, "reached", lambda: next(steps, True))
    assert not run.measure()
    assert len(run.file.samples) == 3, "our text, and the last two bins"
    again = run_of(script, tmp_path, pair, monkeypatch)
    assert again.measure()
    for temperature in (0.0, 1.0):
        ours, *plain = (s for s in again.file.samples if s["temperature"] == temperature)
        assert [sample["after"] for sample in plain] == [80, 48, 16]
        if not temperature:
            assert [s["tokens"] for s in plain] == [ours["tokens"][n : n + PLAIN] for n in (80, 48, 16)]
        ends = [each["to"] for each in ours["bins"]]
        assert [each["from"] for each in ours["bins"]] == [0, *ends[:-1]]
        assert ends[-1] == len(ours["tokens"]) == NEW
        assert all(0 <= end - BIN * number < 8 for number, end in enumerate(ends[:-1], 1))
        assert all(sum(each["passes"].values()) == pytest.approx(1) for each in ours["bins"])
        share = sum(each["repeated_8grams"] * (each["to"] - each["from"]) for each in ours["bins"])
        assert share == pytest.approx(ours["repeated_8grams"] * (NEW - 7))
    rows = content_at(tmp_path / "long_outputs_cpu.jsonl")["rows"]
    assert [(r["temperature"], r["from"], r["to"]) for r in rows] == [
        (t, first, first + BIN) for t in (0.0, 1.0) for first in (0, 32, 64)
    ]
    assert {row["budget"] for row in rows} == {SMALL["budget"]}
    assert again.measure(), "nothing is missing"


def bins(*ms: float, repeated: float = 0.0) -> list[dict[str, Any]]:
    return [
        {
            "from": 10 * number, "to": 10 * number + 10, "ms_per_token": each, "capture_seconds": 0.5,
            "tokens_per_pass": 2.0, "passes": {"three": 0.75, "two": 0.25, "copied": 0.0, "one": 0.0},
            "repeated_8grams": repeated,
        }
        for number, each in enumerate(ms)
    ]  # fmt: skip


def test_rows_and_the_table_have_a_line_for_each_bin(script: Any) -> None:
    samples = []
    for text, ms, repeated in (("a", (1.0, 2.0), 0.0), ("b", (0.5, 0.5), 0.5)):
        place = {"text": text, "kind": "prose", "context": 2048, "temperature": 0.6, "seed": 0}
        ours = {"method": "triforce", "new_tokens": 20, "bin": 10, "chosen": {"levels": 3, "budget": 1024}}
        samples.append(ours | place | {"bins": bins(*ms, repeated=repeated)})
        samples += [
            place | {"method": "autoregressive", "new_tokens": 4, "after": after, "ms_per_token": 4.0}
            for after in (15, 5)
        ]
    part = {
        "hardware": "a machine", "commit": "c",
        "settings": {"model": "m", "shape": "7b", "options": {}, "vocabulary": 4096},
        "versions": {"torch": "1", "transformers": "2"}, "date": "today", "notes": [],
    }  # fmt: skip
    rows = script("benchmarks.texts.positions").position_rows("7b", part, samples)
    assert [(row["text"], row["from"], row["speedup"]) for row in rows] == [
        ("a", 0, 4.0), ("a", 10, 2.0), ("b", 0, 8.0), ("b", 10, 8.0),
    ]  # fmt: skip
    table = script("benchmarks.texts.tables").TABLES["long_outputs"]
    expected = (
        "| m | 2,048 | 0.6 | 10 to 20 | 2 | 1.25 | 4.00 | **5.00x** (2.00x to 8.00x) | 2.00x (1) "
        "| 25 % | 2.0 | 75 % | 25 % | 0 % | 0 % | 1,024 | 0.5 |"
    )
    assert expected in table.make({"parts": {"7b": part}, "rows": rows})


@pytest.mark.parametrize("words", ["--bin 48", "--bin 32 --plain-tokens 32", "--bin 128"])
def test_bins_that_do_not_fit_are_refused(
    script: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = script("benchmarks.texts.long_outputs")
    with pytest.raises(SystemExit):
        run.main(["--tiny", "--new-tokens", "64", "--plain-tokens", "4", *words.split()])
    assert "--bin must divide --new-tokens" in capsys.readouterr().err

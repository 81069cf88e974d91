"""A series of benchmarks: what it runs, goes on with, and leaves out; and the rows of bit-exact texts."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

_WAIT = """timeit -n 1 -r 1 -s "import time" "time.sleep(60)" """


def _series(script: Any, out: Path, steps: list[Any], cards: int = 1, **given: Any) -> Any:
    class Args:
        seconds, tiny, texts = given.get("seconds"), False, None

    Args.out = out  # type: ignore[attr-defined]
    return script("benchmarks.series.run").StepRunner(steps, Args, cards, Console(quiet=True))


def test_steps_are_run_once_and_failed_ones_again(script: Any, tmp_path: Path) -> None:
    step = script("benchmarks.series.steps").Step
    steps = [step("good", "json.tool --help", 1), step("bad", "no_such_module x", 1)]
    assert _series(script, tmp_path, steps, cards=2).run() == 1
    state = json.loads((tmp_path / "series.json").read_text())
    assert (state["good"]["code"], state["bad"]["code"]) == (0, 1)
    log = (tmp_path / "logs" / "bad.txt").read_text()
    assert "-m no_such_module x" in log
    assert "No module named" in log
    again = _series(script, tmp_path, steps)
    assert [waiting.name for waiting in again._waiting] == ["bad"]
    # Another digest: the figures are of older code.
    state["good"]["digest"] = "0"
    (tmp_path / "series.json").write_text(json.dumps(state))
    assert len(_series(script, tmp_path, steps)._waiting) == 2


def test_the_time_limit(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, step = script("benchmarks.series.run"), script("benchmarks.series.steps").Step
    monkeypatch.setattr(run, "_RESERVE", 0.0)
    steps = [step("endless", _WAIT, 0.01), step("long", "json.tool --help", 5)]
    assert _series(script, tmp_path, steps, seconds=1.5).run() == 3
    state = json.loads((tmp_path / "series.json").read_text())
    assert state["endless"]["code"] == 3
    assert state["endless"]["seconds"] < 20
    assert "long" not in state


def test_commands_of_steps(script: Any, tmp_path: Path) -> None:
    steps = {step.name: step for step in script("benchmarks.series.steps").GPU}
    texts = tmp_path / "texts.json.xz"
    command = steps["any-text-7b"].command(tmp_path, texts, 2, 400.0, False)
    assert command[1:] == [
        "-m", "scripts.benchmarks", "any_text", "--shapes", "7b", "--texts", str(texts),
        "--out", str(tmp_path), "--seconds", "400",
    ]  # fmt: skip
    assert "--texts" not in steps["any-text-7b"].command(tmp_path, None, 1, None, False)
    shared = steps["split"].command(tmp_path, None, 2, None, False)
    assert shared[1:6] == ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]
    with pytest.raises(ValueError, match="'linear' has no tiny form"):
        steps["linear"].command(tmp_path, None, 1, None, True)
    known = script("benchmarks.registry").BENCHMARKS
    for each in steps.values():
        assert not each.words.startswith("scripts.benchmarks") or each.words.split()[1] in known


def test_rows_of_exact_texts(script: Any) -> None:
    def record(
        levels: int, exact: bool, prompt: int, tokens: list[int], ms: float, **more: int
    ) -> dict[str, Any]:
        key = {"shape": "s", "levels": levels, "exact": exact, "prompt": prompt}
        return {**key, "tokens": tokens, "ms": ms, **more}

    records = [
        record(1, True, 0, [1, 2], 90.0, ties=1), record(1, True, 1, [3, 4], 11.0),
        record(2, True, 0, [1, 2], 90.0), record(2, True, 1, [3, 5], 6.0),
        record(1, False, 0, [1, 2], 90.0), record(1, False, 1, [3, 4], 10.0),
        record(2, False, 1, [3, 4], 5.0),
    ]  # fmt: skip
    plain, two = script("benchmarks.exact.tables").rows_of(records)
    assert (plain["partings"], plain["tokens"], plain["ratio"]) == (0, 4, 1.1)
    assert (two["partings"], two["partings_without_exact"], two["ratio"]) == (1, "0 of 1 texts", 1.2)
    assert plain["ties"] == two["ties"] == "1 of 2 tokens"

"""A series of benchmarks: what it runs, goes on with, and leaves out; and the rows of bit-exact texts."""

import json
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from triforce_tree.cli.arguments import parser

RESULTS = Path(__file__).parents[3] / "docs" / "results"
_WAIT = """timeit -n 1 -r 1 -s "import time" "time.sleep(60)" """


def _series(script: Any, out: Path, steps: list[Any], cards: int = 1, **given: Any) -> Any:
    class Args:
        seconds, tiny, texts, device = given.get("seconds"), False, None, given.get("device", "cuda")

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
    state["good"]["commit"] = "0"
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
    with pytest.raises(ValueError, match="'tree-attention' has no tiny form"):
        steps["tree-attention"].command(tmp_path, None, 1, None, True)


def test_steps_write_every_published_file(script: Any) -> None:
    groups = script("benchmarks.series.steps").GROUPS
    known = script("benchmarks.registry").BENCHMARKS
    steps = [step for group in groups.values() for step in group]
    assert len({step.name for step in steps}) == len(steps)
    for step in steps:
        words = step.words.split()
        assert words[0] != "scripts.benchmarks" or words[1] in known
        # A benchmark that takes a folder is not given a file, nor the other way round.
        if words[0] == "scripts.benchmarks":
            assert words[words.index("--out") + 1].endswith(".jsonl") == known[words[1]].to_file
    # A run of the paper's tables writes no file of docs/results.
    measured = {name for name, benchmark in known.items() if benchmark.writes} | {"paper"}
    assert measured == {
        step.words.split()[1] for step in steps if step.words.startswith("scripts.benchmarks")
    }
    assert measured == known.keys() - {"tables", "series", "texts"}
    settled = {"offload_h200.jsonl", "offload_parallel_h200.jsonl"}
    for name in {path.name for path in RESULTS.glob("*.jsonl")} - settled:
        assert any(step.writes(name) for step in steps), name


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_words_of_steps_are_options_of_their_benchmarks(
    device: str, script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, parse = script("benchmarks.registry").BENCHMARKS, ArgumentParser.parse_args

    class ParsedError(Exception):
        pass

    def stopped(self: ArgumentParser, *given: Any, **more: Any) -> None:
        parse(self, *given, **more)
        raise ParsedError

    monkeypatch.setattr(ArgumentParser, "parse_args", stopped)
    others = {"scripts.checks.models": "checks.models.__main__"}
    for step in script("benchmarks.series.steps").GROUPS[device]:
        for tiny in (False, True)[: 1 + (step.tiny is not None)]:
            _, _, module, *words = step.command(tmp_path, tmp_path / "texts.json.xz", 1, None, tiny)
            if module == "triforce_tree":
                parse(parser(), words)
            elif module == "scripts.benchmarks" or module in others:
                name = others.get(module) or known[words.pop(0)].module
                with pytest.raises(ParsedError):
                    script(name).main(words)
            else:
                assert not words


def test_a_step_whose_file_is_missing_is_left_out(script: Any, tmp_path: Path) -> None:
    step = script("benchmarks.series.steps").Step
    steps = [step("good", "json.tool --help", 1), step("lacks", "json.tool --help", 1, needs="model/draft")]
    assert _series(script, tmp_path, steps).run() == 3
    assert [*json.loads((tmp_path / "series.json").read_text())] == ["good"]
    (tmp_path / "model" / "draft").mkdir(parents=True)
    assert _series(script, tmp_path, steps).run() == 0


def test_steps_of_a_cpu_see_no_gpu(script: Any, tmp_path: Path) -> None:
    shown = """timeit -n 1 -r 1 -s "import os" "print(repr(os.environ.get('CUDA_VISIBLE_DEVICES')))" """
    steps = [script("benchmarks.series.steps").Step("shown", shown, 1)]
    assert _series(script, tmp_path, steps, device="cpu").run() == 0
    assert "\n''\n" in (tmp_path / "logs" / "shown.txt").read_text()
    with pytest.raises(SystemExit):
        script("benchmarks.series.run").main(
            ["--device", "cpu", "--only", "on-chip-7b", "--out", str(tmp_path)]
        )


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
    assert (plain["tokens"], plain["ratio"]) == (4, 1.1)
    assert "partings" not in plain, "it would be compared with itself"
    assert (two["partings"], two["partings_without_exact"], two["ratio"]) == (1, "0 of 1 texts", 1.2)
    assert plain["ties"] == two["ties"] == "1 of 2 tokens"

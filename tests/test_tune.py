"""Tuning: the search, both meters, what becomes of measurements, and the command."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_pair
import torch
from tiny_pair import SMALL, TinyPair

from triforce_tree import Engine, cli
from triforce_tree.bench.results import Records
from triforce_tree.config import HierarchyConfig
from triforce_tree.profiles import Entry
from triforce_tree.tune.meters import CapturedMeter, EagerMeter, Sample
from triforce_tree.tune.plan import Plan, Watch
from triforce_tree.tune.search import Coordinate, OutOfTime, Space, relevant, search
from triforce_tree.tune.tuner import Tuner

CONTEXT = 200
FEW = (
    Coordinate("tree", ("chain:2", "best-first:3,2"), ordered=False, levels=(2, 3)),
    Coordinate("gamma", (2, 4, 6)),
)


@pytest.fixture(scope="module")
def engine(pair: TinyPair) -> Engine:
    return pair.load(**SMALL)


@pytest.fixture(scope="module")
def ids(engine: Engine) -> list[int]:
    return tiny_pair.prompt(engine, CONTEXT)


# --- search ---


def test_descent_finds_the_best_of_a_known_landscape() -> None:
    asked = []

    def judge(options: dict[str, Any], against: dict[str, Any] | None) -> float:
        asked.append((options["gamma"], options["tree"], options["levels"]))
        return 1.0 + abs(options["gamma"] - 2) + 5 * (options["tree"] != "chain:2") + options["levels"]

    start = {"levels": 3, "tree": "best-first:3,2", "gamma": 6}
    two = start | {"levels": 2}
    best = {"levels": 3, "tree": "chain:2", "gamma": 2}
    assert search(judge, [start], FEW, lambda options: True) == ([best], True)
    assert search(judge, [start], FEW, lambda options: False) == ([start], True)
    # gamma means nothing to two levels.
    found, finished = search(judge, [start, two], FEW, lambda options: True)
    assert finished
    assert found == [best, two | {"tree": "chain:2"}]
    slow = two | {"tree": "best-first:3,2", "gamma": 60}
    assert search(judge, [best, slow], FEW, lambda options: True)[0] == [best, slow]
    # Of equally many levels the fastest start is followed alone.
    assert search(judge, [slow | {"levels": 3}, best, two], FEW, lambda options: False)[0] == [best, two]


def test_a_search_that_is_cut_short_keeps_its_best() -> None:
    def judge(options: dict[str, Any], against: dict[str, Any] | None) -> float:
        if options["gamma"] == 2:
            raise OutOfTime
        return float(options["gamma"])

    start = {"levels": 3, "gamma": 6}
    assert search(judge, [start], FEW[1:], lambda options: True) == ([{"levels": 3, "gamma": 4}], False)
    never = {"levels": 2, "gamma": 2}
    assert search(judge, [start, never], FEW[1:], lambda options: True) == ([start, never], False)
    with pytest.raises(OutOfTime):
        search(judge, [never], FEW[1:], lambda options: True)


def test_less_than_noise_is_no_gain() -> None:
    start = {"levels": 3, "gamma": 4}
    found, _ = search(lambda o, _: 10 - 0.01 * o["gamma"], [start], FEW[1:], lambda options: True)
    assert found == [start]


def test_the_space_fits_machine_pair_and_context() -> None:
    long = Space(HierarchyConfig(), 16_384, captured=True, gpu=True, draft=True)
    assert {c.name for c in long.coordinates()} >= {"tree", "middle_bits", "leaves"}
    assert "lookup" not in {c.name for c in long.coordinates()}
    assert [start["levels"] for start in long.starts()] == [3, 2]
    assert long.starts()[0]["leaves"] is True
    longer = replace(long, context=122_880, fixed=frozenset({"gamma"}))
    assert [start["levels"] for start in longer.starts()] == [3, 2, 3]
    assert longer.starts()[2] | {"budget": 1536} != longer.starts()[0]
    assert longer.starts()[2]["gamma"] == longer.starts()[0]["gamma"]
    assert len(replace(longer, gpu=False).starts()) == 2
    trees = next(c for c in long.coordinates([0.5, 0.2, 0.1]) if c.name == "tree").values
    assert sum(tree.startswith("static:") for tree in trees) == 2
    assert long.coordinates([0.6667, 0.1667, 0.1667])  # rounded shares
    host = Space(HierarchyConfig(), 2048, captured=False, gpu=False, draft=False, fixed=frozenset({"gamma"}))
    assert {c.name for c in host.coordinates()}.isdisjoint({"tree", "middle_bits", "gamma"})
    carried = replace(long, start=HierarchyConfig.from_options(window=9)).complete(
        {"levels": 2, "tree": "chain:2", "gamma": 3, "lookup": 8}
    )
    assert carried == {"levels": 2, "tree": "chain:2", "sinks": 4, "window": 9}
    first = host.starts()[0]
    assert (first["levels"], first["budget"], first["leaves"]) == (3, 1024, False)
    assert [start["levels"] for start in replace(host, context=600).starts()] == [2]
    one = replace(host, start=HierarchyConfig(levels=1), fixed=frozenset({"levels"}))
    assert [start["levels"] for start in one.starts()] == [1]
    assert not long.allows(long.starts()[0] | {"budget": 1537})
    assert not long.allows(long.starts()[0] | {"budget": 16_000})
    assert relevant(long.starts()[1]).keys() == {"levels", "tree", "lookup"}
    assert relevant({"levels": 1, "gamma": 3}) == {"levels": 1}


# --- meters ---


def texts_of(meter: EagerMeter | CapturedMeter, engine: Engine, places: list[int]) -> list[list[int]]:
    """Greedy texts behind each place, under settings that differ in all that is built in."""
    changes = [{"levels": 3}, {"levels": 1}, {"levels": 2}, {"levels": 3, "chunk": 16, "refresh": 0}]
    found = []
    for place, change in zip(places, changes, strict=True):
        sample = meter.run(engine.with_options(**change).hierarchy.config, place, 0.0, 9, 0)
        assert isinstance(sample, Sample)
        assert sample.ms_per_token > 0
        assert len(sample.tokens) >= 9
        found.append(sample.tokens[:9])
    return found


@pytest.mark.parametrize("kind", ["eager", "captured"])
def test_meters_decode_behind_any_place_of_one_text(engine: Engine, ids: list[int], kind: str) -> None:
    places = [CONTEXT, CONTEXT - 60, CONTEXT - 20, CONTEXT]
    meter: EagerMeter | CapturedMeter
    if kind == "eager":
        meter = EagerMeter(engine.hierarchy, ids, 9)
    else:
        meter = CapturedMeter(engine.hierarchy, ids, 9, 4)
    expected = [
        engine.generate(ids[:place], max_new_tokens=9, do_sample=False, eos_token_id=None)
        .sequences[0, place:]
        .tolist()
        for place in places
    ]
    assert texts_of(meter, engine, places) == expected
    sampled = meter.run(engine.with_options(levels=3).hierarchy.config, CONTEXT - 60, 0.7, 9, 1)
    assert len(sampled.tokens) >= 9
    assert bool(sampled.pace) is (kind == "captured")
    meter.close()


# --- the tuner ---


def plan(**values: Any) -> Plan:
    given: dict[str, Any] = {
        "contexts": [CONTEXT], "temperatures": [0.0, 0.6], "new_tokens": 6, "places": 2, "grid": FEW,
    }  # fmt: skip
    return Plan(**(given | values))


@pytest.mark.parametrize("captured", [None, True], ids=["eager", "captured"])
def test_entries_say_what_was_measured(
    engine: Engine, ids: list[int], tmp_path: Path, captured: bool | None
) -> None:
    records = Records(tmp_path / "m.jsonl", {})
    tuner = Tuner(engine.with_options(captured=captured), ids, plan(), records)
    found: list[Entry] = []
    entries = tuner.entries(found.append)
    assert tuner.complete
    assert entries == found
    assert [(e.context, e.temperature) for e in entries] == [(CONTEXT, 0.0), (CONTEXT, 0.6)]
    for each in entries:
        assert each.captured is bool(captured)
        assert set(each.acceptance) == {"draft -> retrieval", "retrieval -> target"}
        assert each.step_ms["target"] > 0
        # Nothing is faster than a tiny model alone, by its own measurements.
        fastest = min(r["ms_per_token"] for r in records.all if "ms_per_token" in r)
        assert each.plain_ms_per_token >= each.ms_per_token >= fastest - 1e-3
    tried = [r["options"] for r in records.all if r["measured"] == "speed"]
    assert {o["levels"] for o in tried} == {1, 2, 3}
    again = Tuner(
        engine.with_options(captured=captured), ids, plan(), Records(tmp_path / "m.jsonl", {}), refusing()
    )
    assert again.entries(lambda each: None) == entries


def refusing() -> Watch:
    def fail(record: Any) -> None:
        raise AssertionError(f"measured again: {record}")

    return Watch(measured=fail)


def test_drafting_that_gains_is_chosen(
    engine: Engine, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = {(1, None): 10.0, (2, "best-first:3,2"): 6.0, (2, "chain:2"): 7.0, (3, "best-first:3,2"): 5.0}

    def measured(self: Tuner, options: dict[str, Any], number: int) -> dict[str, Any]:
        tree = None if options["levels"] == 1 else options["tree"]
        ms = cost.get((options["levels"], tree), 4.0) + 0.1 * number
        if options.get("gamma") == 6:
            return {"error": "out of memory"}
        return {
            "ms_per_token": ms, "step_ms": {"target": ms}, "tokens_per_pass": {"target": 2.0},
            "pace": {"acceptance": 0.9}, "repeated_8grams": 0.0,
        }  # fmt: skip

    monkeypatch.setattr(Tuner, "_measured", measured)
    monkeypatch.setattr(Tuner, "_acceptance", lambda self: {})
    [found] = Tuner(engine, ids, plan(temperatures=[0.0]), Records(None, {})).entries(lambda each: None)
    assert (found.options["levels"], found.options["tree"], found.options["gamma"]) == (3, "chain:2", 4)
    assert found.speedup == pytest.approx(10.05 / 4.05)
    assert found.pace == {"acceptance": 0.9}
    cost.update({(2, "best-first:3,2"): 9.9, (3, "best-first:3,2"): 9.8})
    [none] = Tuner(
        engine, ids, plan(temperatures=[0.0], fixed=frozenset({"tree"})), Records(None, {})
    ).entries(lambda each: None)
    assert none.options == {"levels": 1}
    assert none.speedup == 1


def test_a_cache_in_host_memory_is_refused(engine: Engine, ids: list[int]) -> None:
    with pytest.raises(ValueError, match=r"offload=True.*leave them out"):
        Tuner(engine.with_options(offload=True), ids, plan(), Records(None, {}))


def test_time_that_one_entry_leaves_goes_to_the_others(
    engine: Engine, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first search has too little time in its share, and comes to its end after the second one."""
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(Tuner, "_acceptance", lambda self: {})
    asked: list[float] = []

    def measured(self: Tuner, options: dict[str, Any], number: int) -> dict[str, Any]:
        nonlocal now
        temperature = self._cell["temperature"]
        asked.append(temperature)
        now += 4.0 if temperature == 0 else 0.1
        ms = 10.0 / options["levels"] + (options.get("gamma") != 2)
        return {
            "ms_per_token": ms, "step_ms": {"target": ms}, "tokens_per_pass": {"target": 2.0}, "pace": {},
            "repeated_8grams": 0.0,
        }  # fmt: skip

    monkeypatch.setattr(Tuner, "_measured", measured)
    tuner = Tuner(engine, ids, plan(seconds=90.0), Records(None, {}))
    entries = tuner.entries(lambda each: None)
    assert tuner.complete
    assert [e.temperature for e in entries] == [0.0, 0.6]
    assert {e.options["gamma"] for e in entries} == {2}
    second = asked.index(0.6)
    assert 0.0 in asked[second:]
    assert 4 * second < 90 / 2 + 4


def test_without_time_the_first_cell_has_its_two_measurements(engine: Engine, ids: list[int]) -> None:
    records = Records(None, {})
    tuner = Tuner(engine, ids, plan(seconds=0.0), records)
    assert len(tuner.entries(lambda each: None)) == 1
    assert not tuner.complete
    assert len(records.all) == 2


# --- the command ---


def command(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any], str]:
    try:
        code = cli.main([*argv, "--json"])
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    return code, json.loads(lines[-1]) if lines else {}, captured.err


def test_tune_then_generate(capsys: pytest.CaptureFixture[str], pair: TinyPair, home: Path) -> None:
    small = ["--budget", "64", "--recent", "32", "--chunk", "8", "--window", "64"]
    argv = ["tune", *pair.options, *small, "--file", pair.text, "--context", "150", "--new-tokens", "5"]
    argv += ["--prompts", "1", "--temperature", "0"]
    code, result, err = command(capsys, *argv, "--dry-run")
    assert code == 0
    assert set(result["contexts"][0]["tried"]) == {"tree", "gamma", "refresh", "leaves"}
    assert "3 2 1" in err
    assert not list(home.iterdir())
    code, result, err = command(capsys, *argv, "--seconds", "0.01")
    assert code == 0
    assert result["complete"] is False
    assert "goes on from here" in err
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
    ):
        code, _, err = command(capsys, *argv, *more)
        assert code == 2, more
        assert needed in err
        assert len(err.strip().splitlines()) == 1


def test_low_memory_is_a_result_and_no_end(
    engine: Engine, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = EagerMeter.run

    def short_of_memory(self: EagerMeter, config: HierarchyConfig, *more: Any) -> Sample:
        if config.levels == 3:
            raise torch.OutOfMemoryError("no room")
        return run(self, config, *more)

    monkeypatch.setattr(EagerMeter, "run", short_of_memory)
    records = Records(None, {})
    [found] = Tuner(engine, ids, plan(temperatures=[0.0]), records).entries(lambda each: None)
    assert found.options["levels"] in (1, 2)
    assert any("no room" in r.get("error", "") for r in records.all)


def test_a_busier_machine_is_no_slower_setting(
    engine: Engine, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = iter([1.0, 1.05, 2.0])

    def run(self: EagerMeter, config: HierarchyConfig, *more: Any) -> Sample:
        load = next(loads)
        return Sample(5.0 * load, [1, 2, 3], [], alone_ms=10.0 * load)

    monkeypatch.setattr(EagerMeter, "run", run)
    records = Records(None, {})
    tuner = Tuner(engine, ids, plan(temperatures=[0.0], seconds=0.0, places=1), records)
    tuner.entries(lambda each: None)
    tuner._must = True
    tuner._judge({"levels": 3, "gamma": 5})
    assert [r["ms_per_token"] for r in records.all] == [5.0, 5.25, 5.0]

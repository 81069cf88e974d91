"""The tuner: the settings that it chooses, its time limit and its measurements."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.tiny_pair import SMALL, TinyPair
from tests.support.models.tune_cases import CONTEXT, plan, profile_of
from triforce_tree import Engine
from triforce_tree.config import HierarchyConfig
from triforce_tree.eval.results import Records
from triforce_tree.planning import profiles
from triforce_tree.planning.profiles import Entry
from triforce_tree.tune import tuner as tuner_module
from triforce_tree.tune.meters import Meter, Sample
from triforce_tree.tune.plan import Watch
from triforce_tree.tune.tuner import Tuner


@pytest.mark.slow
def test_entries_hold_what_was_measured(engine: Engine, ids: list[int], tmp_path: Path) -> None:
    records = Records(tmp_path / "m.jsonl", {})
    tuner = Tuner(engine, ids, plan(places=1), records)
    found: list[Entry] = []
    entries = tuner.entries(found.append)
    assert tuner.complete
    assert entries == found
    assert [(e.context, e.temperature) for e in entries] == [(CONTEXT, 0.0), (CONTEXT, 0.6)]
    for each in entries:
        assert set(each.acceptance) == {"draft -> retrieval", "retrieval -> target"}
        assert each.step_ms["target"] > 0
        # Nothing is faster than a tiny model alone, by its own measurements.
        fastest = min(r["ms_per_token"] for r in records.all if "ms_per_token" in r)
        assert each.plain_ms_per_token >= each.ms_per_token >= fastest - 1e-3
    tried = [r["options"] for r in records.all if r["measured"] == "speed"]
    assert {o["levels"] for o in tried} == {1, 2, 3}
    again = Tuner(engine, ids, plan(places=1), Records(tmp_path / "m.jsonl", {}), refusing())
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
            "draft_length": {"acceptance": 0.9, "tokens_per_round": 3.0}, "repeated_8grams": 0.0,
        }  # fmt: skip

    monkeypatch.setattr(Tuner, "_measured", measured)
    monkeypatch.setattr(Tuner, "_acceptance", lambda self: {})
    [found] = Tuner(engine, ids, plan(temperatures=[0.0]), Records(None, {})).entries(lambda each: None)
    assert (found.options["levels"], found.options["tree"], found.options["gamma"]) == (3, "chain:2", 4)
    assert found.speedup == pytest.approx(10.05 / 4.05)
    assert found.draft_length == {"acceptance": 0.9, "tokens_per_round": 3.0}
    cost.update({(2, "best-first:3,2"): 9.9, (3, "best-first:3,2"): 9.8})
    [none] = Tuner(
        engine, ids, plan(temperatures=[0.0], fixed=frozenset({"tree"})), Records(None, {})
    ).entries(lambda each: None)
    assert none.options == {"levels": 1}
    assert none.speedup == 1


def test_bits_that_are_auto_are_measured(engine: Engine, ids: list[int]) -> None:
    given = plan(fixed=frozenset({"retrieval_weight_bits", "gamma"}))
    for bits, fixed in (("auto", {"gamma"}), (8, {"gamma", "retrieval_weight_bits"})):
        own = engine.with_options(retrieval_weight_bits=bits)
        assert Tuner(own, ids, given, Records(None, {})).space(CONTEXT).fixed == fixed


def test_bits_that_are_auto_begin_from_those_that_it_takes(
    engine: Engine, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Tuner(engine.with_options(retrieval_weight_bits="auto"), ids, plan(), Records(None, {}))
    assert own.space(CONTEXT).start.weight_bits == 16, "on a CPU"
    monkeypatch.setattr(tuner_module, "gains_from_few_bits", lambda target: True)
    assert own.space(CONTEXT).start.weight_bits == 8
    given = plan(fixed=frozenset({"retrieval_weight_bits"}))
    assert Tuner(engine, ids, given, Records(None, {})).space(CONTEXT).start.weight_bits == 16, "not auto"


def test_a_cache_in_host_memory_is_refused(engine: Engine, ids: list[int]) -> None:
    with pytest.raises(ValueError, match=r"offload=True.*leave them out"):
        Tuner(engine.with_options(offload=True), ids, plan(), Records(None, {}))


def test_time_that_one_entry_does_not_need_goes_to_the_others(
    engine: Engine, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first search has too little time in its share, and is completed after the second one."""
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
            "ms_per_token": ms, "step_ms": {"target": ms}, "tokens_per_pass": {"target": 2.0},
            "draft_length": {}, "repeated_8grams": 0.0,
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


def test_short_memory_is_a_result_and_does_not_end_the_search(
    engine: Engine, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Meter.run

    def short_of_memory(self: Meter, config: HierarchyConfig, *more: Any) -> Sample:
        # Three levels, which two may replace.
        if config.levels == "auto":
            raise torch.OutOfMemoryError("no memory left")
        return run(self, config, *more)

    monkeypatch.setattr(Meter, "run", short_of_memory)
    records = Records(None, {})
    [found] = Tuner(engine, ids, plan(temperatures=[0.0]), records).entries(lambda each: None)
    assert found.options["levels"] in (1, 2)
    assert any("no memory left" in r.get("error", "") for r in records.all)


def test_a_change_of_load_is_corrected_for(
    engine: Engine, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = iter([1.0, 1.05, 2.0])

    def run(self: Meter, config: HierarchyConfig, *more: Any) -> Sample:
        load = next(loads)
        return Sample(5.0 * load, [1, 2, 3], [], alone_ms=10.0 * load)

    monkeypatch.setattr(Meter, "run", run)
    records = Records(None, {})
    tuner = Tuner(engine, ids, plan(temperatures=[0.0], seconds=0.0, places=1), records)
    tuner.entries(lambda each: None)
    tuner._must = True
    tuner._measure({"levels": 3, "gamma": 5})
    assert [r["ms_per_token"] for r in records.all] == [5.0, 5.25, 5.0]


CPU = ("best-first:2,2,1", "chain:2", "lookup:12", "lookup:31")


def own_trees(pair: TinyPair, **options: Any) -> Engine:
    """The pair with settings for short prompts but the tree, which the device decides."""
    return pair.load(**{name: value for name, value in SMALL.items() if name != "tree"}, **options)


def test_the_devices_shapes_are_measured_where_none_were_given(pair: TinyPair, ids: list[int]) -> None:
    for options, expected in (
        ({}, CPU),
        ({"lookup": 0}, CPU[:2]),
        ({"lookup": 4}, ()),
        ({"tree": "chain:3"}, ()),
        ({"tree": "best-first:6,5,4"}, ()),
        ({"other_trees": "none"}, ()),
        ({"other_trees": "lookup:7 chain:3"}, ("chain:3", "lookup:7")),
    ):
        tuner = Tuner(own_trees(pair, **options), ids, plan(fixed=frozenset(options)), Records(None, {}))
        space = tuner.space(CONTEXT)
        assert space.start.other_trees == expected, options
        assert space.starts()[0]["other_trees"] == (" ".join(expected) or "none")


def test_a_profile_runs_what_was_measured(
    pair: TinyPair, ids: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The same settings, other shapes and matched tokens included, and each is measured with them."""
    configs: list[HierarchyConfig] = []

    def run(self: Meter, config: HierarchyConfig, *more: Any) -> Sample:
        configs.append(config)
        ms = {1: 9.0, 2: 5.0, "auto": 4.0}[config.levels]
        return Sample(ms - (config.gamma == 6), [1, 2, 3], [], {"acceptance": 0.5, "tokens_per_round": 2.0})

    monkeypatch.setattr(Meter, "run", run)
    monkeypatch.setattr(Tuner, "_acceptance", lambda self: {})
    engine = own_trees(pair)
    # Not given, and so in the profile.
    tuner = Tuner(engine, ids, plan(temperatures=[0.0]), Records(None, {}))
    [entry] = tuner.entries(lambda each: None)
    assert {config.other_trees for config in configs if config.levels != 1} == {CPU}
    assert (entry.options["levels"], entry.options["gamma"]) == (3, 6)
    made = profile_of(engine, tmp_path / "p.json", entry)
    assert profiles.read(tmp_path / "p.json") == made
    tuned = pair.load(profile=tmp_path / "p.json")
    tuned.generate(ids, max_new_tokens=2, do_sample=False)
    best = next(c for c in configs if c.gamma == 6 and c.tree == entry.options["tree"])
    assert tuned.hierarchy.config == best
    assert tuned.hierarchy.last_program is not None
    matched = [shape.matched for shape in tuned.hierarchy.last_program.shapes]
    assert matched == [False, False, False, True, True]


def test_measurements_with_other_shapes_are_not_taken_for_these(
    pair: TinyPair, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A results file may hold those that an earlier release made with one tree alone."""
    records = Records(None, {})
    alone = {"levels": 3, "tree": "chain:2", "gamma": 4}
    records.add(
        {"context": CONTEXT, "temperature": 0.0, "measured": "speed", "options": alone, "place": 0,
         "ms_per_token": 1e-3}
    )  # fmt: skip
    tuner = Tuner(own_trees(pair), ids, plan(), records)
    tuner._cell = {"context": CONTEXT, "temperature": 0.0}
    assert tuner._recorded(alone, 0) is not None
    assert tuner._recorded(alone | {"other_trees": "none"}, 0) is None

"""Stages of further shapes of trees are made once they would have saved as much as making them takes."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.distributions.simulated_trees import Simulation
from tests.support.models.program_cases import (
    GREEDY,
    NEW,
    PROMPTS,
    draft_of,
    finished,
    model,
    program_of,
    reference,
)
from triforce_tree.decoding import prepared_stages
from triforce_tree.decoding.choice import cost_table
from triforce_tree.decoding.choice.budgets.loss_budget import START_BUDGET
from triforce_tree.decoding.choice.cost_table import CostTable
from triforce_tree.decoding.choice.estimates import LearntChoice
from triforce_tree.decoding.choice.passes import StageSeconds
from triforce_tree.decoding.choice.predicted_costs import predicted
from triforce_tree.decoding.choice.stage_costs import StageCosts
from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.decoding.prepared_stages import held_back
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.trees.device_shapes import device_tree_shape
from triforce_tree.trees.shapes import parse_shape

NARROW = ((0.8, 0.02),)


def simulation(a_node: float) -> Simulation:
    """The first shape is a wide tree; what each of its nodes costs decides whether a chain is faster."""
    return Simulation((0.02, lambda nodes: 1 + a_node * nodes, lambda nodes: 0.2), NARROW)


@pytest.mark.parametrize("seconds", [3.0, 40.0])
def test_a_shape_waits_until_it_would_have_saved_its_preparation(seconds: float) -> None:
    simulated = simulation(0.04)
    free, control = simulated.controller(), simulated.controller()
    control.preparation.begin({1: seconds, 2: seconds})
    best, _ = simulated.run(free, 900)
    speed, passes = simulated.run(control, 900)
    taken = [n for n, (kind, _) in enumerate(passes) if kind.shape]
    assert taken[0] > 2 * seconds, "passes without it come first"
    # In units of a plain pass: what was missed, and the preparation itself.
    assert 900 / speed + seconds - 900 / best < 2.2 * seconds + 10


def test_a_shape_that_does_not_pay_is_never_prepared() -> None:
    simulated = simulation(0.0)
    control = simulated.controller()
    control.preparation.begin({1: 3.0, 2: 3.0})
    _, passes = simulated.run(control, 2000)
    assert {kind.shape for kind, _ in passes} == {0}


def test_what_was_missed_is_left_to_the_next_request() -> None:
    simulated, missed, requests = simulation(0.04), {}, 0
    for requests in range(40):
        control = simulated.controller()
        control.preparation.begin({1: 12.0, 2: 12.0})
        control.resume(LearntChoice(control.learnt({}).estimates, START_BUDGET, {}, missed))
        _, passes = simulated.run(control, 40, requests)
        missed = control.learnt({}).missed
        if any(kind.shape for kind, _ in passes):
            break
    assert 2 < requests < 30


def test_costs_of_a_shape_are_predicted_by_its_tokens_and_forwards() -> None:
    """On a device whose verifications cost 1 + 0.01 a token, and a draft's forward 0.1."""

    def exact(name: str, slope: float) -> StageSeconds:
        shape = device_tree_shape(parse_shape(name))
        parts = {"draft": 0.1 * len(shape.widths), "retrieval": 0.5 + 0.01 * shape.nodes}
        tree, chain = 1 + slope * (shape.nodes - 1), 1 + slope * 40
        return StageSeconds(1.0, **parts, chain=chain, tree=tree)

    name = "best-first:4,4,4,3"
    first = StageCosts((100, 400), (exact(name, 0.01), replace(exact(name, 0.02), retrieval=0.66)))
    for other in ("best-first:16,17,16,14", "chain:6", "chain:2"):
        known, shape = (device_tree_shape(parse_shape(n)) for n in (name, other))
        found = predicted(first, known, shape, 41)
        for seconds, slope in zip(found.seconds, (0.01, 0.02), strict=True):
            expected = exact(other, slope)
            assert seconds.tree == pytest.approx(expected.tree)
            assert seconds.draft == pytest.approx(expected.draft)
        assert found.seconds[0].retrieval == pytest.approx(exact(other, 0.01).retrieval)
    # Matched tokens are verified by the target alone, and take no forward of the draft.
    matched = device_tree_shape(parse_shape("lookup:6"))
    for copied, chain in zip(
        predicted(first, known, matched, 41).seconds,
        predicted(first, known, device_tree_shape(parse_shape("chain:6")), 41).seconds,
        strict=True,
    ):
        assert copied.tree == chain.tree
        assert copied.draft < 0.1 * chain.draft
        assert copied.retrieval == float("inf")
    # With two levels there are two points, and no retrieval level.
    alone = StageCosts((100,), (StageSeconds(1.0, draft=0.4, tree=1.15),))
    known, shape = (device_tree_shape(parse_shape(n)) for n in ("best-first:4,4,4,3", "chain:30"))
    [seconds] = predicted(alone, known, shape, 0).seconds
    assert seconds.tree == pytest.approx(1.30)
    assert seconds.retrieval == seconds.chain == float("inf")


def test_first_use_makes_the_stages_of_one_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where stages take seconds to make: those of further shapes come between passes, if they pay."""
    table = CostTable(tmp_path / "costs.json")
    monkeypatch.setattr(cost_table, "user_table", lambda: table)
    target = model("llama-gqa")
    program = program_of(target, draft_of("llama-gqa"), 2, other_trees=("chain:2", "chain:1"), rounds=None)
    loop = DecodingLoop.over(program, GREEDY, 0)
    assert not [name for name in program.stage_names if "/" in name]
    loop.controller.preparation.begin({1: 1e9, 2: 0.0})
    loop.controller.costs = StageSeconds(1.0, draft=0.2, tree=3.0)
    costs = StageSeconds(1.0, draft=0.02, tree=1.01)
    assert loop.chooser._costs is not None
    loop.chooser._costs.first = StageCosts((1,), (loop.controller.costs,))
    loop.chooser._costs.others = [StageCosts((1,), (costs,))] * 2
    loop.chooser._learns = False
    [new] = finished(loop, PROMPTS[:1], NEW[:1])
    assert new == reference(target, PROMPTS[0], NEW[0])
    made = {name for name in program.stage_names if "/" in name}
    assert made == {"draft/2", "target/2"}, "the other shape would have paid too, but not for its preparation"
    assert {kind.shape for kind in loop.passes} <= {0, 2}


def test_stages_of_matched_tokens_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"other_trees": ("chain:2", "lookup:4"), "rounds": None}
    program = program_of(model("llama-gqa"), draft_of("llama-gqa"), 3, **options)
    program.prepare(GREEDY)
    assert held_back(program) == {}
    monkeypatch.setattr(prepared_stages, "makes_slowly", lambda program: True)
    assert set(held_back(program)) == {1}


def test_a_shape_that_no_program_has_had_takes_as_long_as_the_first_one_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its kernels are compiled even where those of the first shape come from caches by now."""
    options = {"other_trees": ("chain:2", "chain:1"), "rounds": None}
    monkeypatch.setattr(prepared_stages, "_longest", {})
    monkeypatch.setattr(prepared_stages, "_made", set())
    monkeypatch.setattr(prepared_stages, "makes_slowly", lambda program: True)
    target, draft = model("llama-gqa"), draft_of("llama-gqa")

    def program(seconds: float) -> DecodingProgram:
        made = program_of(target, draft, 3, **options)
        made.prepare(GREEDY)
        made.selected = replace(made.selected, seconds=seconds)
        return made

    cold = program(12.0)
    prepared_stages._longest[cold.device] = 12.0
    assert held_back(cold) == {1: 6.0, 2: 6.0}
    cold.prepare_shape(2)
    assert held_back(cold) == {1: 6.0}
    assert held_back(program(1.0)) == {1: 6.0, 2: 0.5}


def test_long_preparations_say_how_far_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program = program_of(model("llama-gqa"), draft_of("llama-gqa"), 3, other_trees=("chain:2",), rounds=None)
    program.prepare(GREEDY)
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr(prepared_stages.time, "perf_counter", lambda: next(clock))
    with caplog.at_level(logging.WARNING):
        program.prepare_shape(1)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 4
    assert lines[0].startswith("preparing stage 1 of 4 (draft/1), 2 s so far: kernels are compiled")
    assert lines[1] == "preparing stage 2 of 4 (retrieval_refresh/1), 4 s so far"

"""Costs of trees of several shapes: measured once, refined by times; acceptance by rank, kept for later."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.distributions.simulated_trees import SHAPES
from tests.support.models.program_cases import GREEDY, PROMPTS, SAMPLED, draft_of, model, program_of
from triforce_tree.decoding.choice.controller import PassController
from triforce_tree.decoding.choice.cost_table import CostTable, other_costs, stage_costs
from triforce_tree.decoding.choice.costs_by_length import CostsByLength
from triforce_tree.decoding.choice.estimates import Learnt, LearntChoice
from triforce_tree.decoding.choice.learnt_table import LearntChoices
from triforce_tree.decoding.choice.passes import OF_SHAPE, PassKind, StageSeconds
from triforce_tree.decoding.choice.predicted_costs import guessed
from triforce_tree.decoding.choice.stage_costs import StageCosts, settings_of
from triforce_tree.decoding.explain.explanation import explained
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.verify.probs import DeviceProbs

OTHERS = ("chain:2", "best-first:6,6,6")


def shaped(levels: int = 3) -> DecodingProgram:
    return program_of(model("llama-gqa"), draft_of("llama-gqa"), levels, 1, rounds=None, other_trees=OTHERS)


@pytest.mark.parametrize("levels", [2, 3])
def test_costs_of_further_shapes_are_predicted(levels: int, tmp_path: Path) -> None:
    program, table = shaped(levels), CostTable(tmp_path / "costs.json")
    program.prepare(GREEDY)
    first = stage_costs(program, GREEDY, table)
    found = other_costs(program, GREEDY, first, table)
    assert len(found) == 2
    for costs in found:
        assert costs is not None
        assert costs.lengths == first.lengths
        for own, other in zip(costs.seconds, first.seconds, strict=True):
            shared = vars(own).keys() - set(OF_SHAPE)
            assert {n: getattr(own, n) for n in shared} == {n: getattr(other, n) for n in shared}
            assert 0 < own.draft < float("inf")
            assert 0 < own.tree < float("inf")
            assert (own.retrieval < float("inf")) == (levels == 3)
    assert not [name for name in program.stage_names if "/" in name], "their stages are not needed yet"
    # What decoding has corrected is in the table.
    settings = settings_of(program, DeviceProbs.kind(GREEDY), None)
    own = table.add(settings | {"shape": 2}, first.scaled({"draft": 3.0}))
    again = shaped(levels)
    again.prepare(GREEDY)
    assert other_costs(again, GREEDY, first, CostTable(tmp_path / "costs.json")) == [found[0], own]
    assert other_costs(program_of(model("llama-gqa"), None, 1), GREEDY, first, table) == []


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_costs_without_a_measurement_follow_the_sizes_of_the_models(levels: int) -> None:
    draft = draft_of("llama-gqa") if levels > 1 else None
    program = program_of(model("llama-gqa"), draft, levels, 2, rounds=None)
    program.prepare(GREEDY)
    found = guessed(program, program.max_seq_len - 1)
    measured = stage_costs(program, GREEDY, CostTable(None))
    for own, known in zip(found.seconds, measured.seconds, strict=True):
        ratios = own.scaled(dict.fromkeys(vars(own), 1 / own.plain))
        assert {n for n, s in vars(own).items() if 0 < s < math.inf} == {
            n for n, s in vars(known).items() if 0 < s < math.inf
        }, "the same stages"
        assert all(ratio > 0.01 for name, ratio in vars(ratios).items() if getattr(own, name))
        assert ratios.tree == math.inf or 1 <= ratios.tree < 3
    short, long = found.seconds
    assert long.plain > short.plain, "keys and values are read"
    assert long.draft == short.draft


def test_measured_times_are_kept_by_shape() -> None:
    seconds = StageSeconds(1.0, 0.1, 0.2, chain=1.2, tree=1.1)
    other = replace(seconds, draft=0.05, tree=1.05)
    first, second = (StageCosts((100, 200), (s, replace(s, plain=2.0))) for s in (seconds, other))
    control = PassController(3, 3, 12, None, True, SHAPES)
    costs = CostsByLength(control, first, [second, None])
    costs.at(100, measured=True)
    assert (control.costs, control.other_costs) == (seconds, [other, None])
    for _ in range(60):
        control.refine(PassKind(2, 1, 1), 0, {"draft": 0.1, "target": 2.1})
        control.refine(PassKind(1, 0), 0, {"target": 1.5})
    assert control.costs.draft == pytest.approx(0.15, rel=0.01), "as plain passes, until it is measured"
    assert control.other_costs[0].draft == pytest.approx(0.1, rel=0.01)
    assert control.other_costs[0].tree == pytest.approx(2.1, rel=0.01)
    assert control.costs.tree == pytest.approx(1.65, rel=0.01), "another shape's times say nothing of its own"
    assert control.costs.plain == control.other_costs[0].plain == pytest.approx(1.5, rel=0.01)
    costs.at(150, measured=True)
    assert costs.factors["tree/1"] == pytest.approx(2, rel=0.01)
    assert control.other_costs[0].tree == pytest.approx(2.1, rel=0.01)
    assert control.costs.plain == pytest.approx(2.25, rel=0.01)
    # One that was dropped while decoding stays dropped.
    control.other_costs = [None, None]
    costs.at(170, measured=True)
    assert control.other_costs == [None, None]


def test_acceptance_by_rank_is_left_to_the_next_request(tmp_path: Path) -> None:
    program = shaped()
    program.prepare(SAMPLED)
    by_rank = ((0.5, 0.25), (0.75, 0.125))
    learnt = LearntChoice(Learnt(0.8, 2.0, 0.6, by_rank), 1.0, {})
    LearntChoices(program, SAMPLED, tmp_path / "table.json").keep(learnt)
    other = shaped()
    other.prepare(SAMPLED)
    found = LearntChoices(other, SAMPLED, tmp_path / "table.json").last()
    assert found == learnt
    control = PassController(3, 3, 12, None, True, SHAPES)
    control.resume(found)
    table = control.learnt({}).estimates.by_rank
    assert table[0][:2] == pytest.approx((0.5, 0.25))
    alone = PassController(3, 3, 12)
    alone.resume(found)
    assert alone.learnt({}).estimates.by_rank == by_rank, "a request with one shape leaves it as it is"


def test_an_explanation_lists_the_shapes() -> None:
    program = shaped()
    program.prepare(GREEDY)
    found = explained(program, GREEDY, PROMPTS[0], 12, 0)
    assert found.trees == ["best-first:3,2,1", *OTHERS]
    assert {"2 levels", "2 levels, tree 2", "2 levels, tree 3"} <= {choice.kind for choice in found.choices}
    assert {"draft", "draft/1", "draft/2", "target_tree/2"} <= found.stages.keys()
    assert found.as_dict()["options"]["other_trees"] == list(OTHERS)

"""Costs of trees of several shapes: measured once, refined by times; acceptance by rank, kept for later."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from program_cases import GREEDY, PROMPTS, SAMPLED, draft_of, model, program_of
from simulated_trees import SHAPES

from triforce_tree.decoding.choice import cost_table
from triforce_tree.decoding.choice.controller import PassController
from triforce_tree.decoding.choice.cost_table import CostTable, other_costs, stage_costs
from triforce_tree.decoding.choice.costs_by_length import CostsByLength
from triforce_tree.decoding.choice.estimates import Learnt, LearntChoice
from triforce_tree.decoding.choice.learnt_table import LearntChoices
from triforce_tree.decoding.choice.passes import OF_SHAPE, PassKind, StageSeconds
from triforce_tree.decoding.choice.stage_costs import StageCosts
from triforce_tree.decoding.explain.explanation import explained
from triforce_tree.decoding.program import DecodingProgram

OTHERS = ("chain:2", "best-first:6,6,6")


def shaped(levels: int = 3) -> DecodingProgram:
    return program_of(model("llama-gqa"), draft_of("llama-gqa"), levels, 1, rounds=None, other_trees=OTHERS)


@pytest.mark.parametrize("levels", [2, 3])
def test_each_shape_is_measured_once(levels: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert {name for name in program.stage_names if name.startswith("draft")} == {
        "draft", "draft/1", "draft/2",
    }  # fmt: skip

    def measured(*_: object) -> None:
        raise AssertionError("they are in the table")

    monkeypatch.setattr(cost_table, "measure_shape", measured)
    again = shaped(levels)
    again.prepare(GREEDY)
    assert other_costs(again, GREEDY, first, CostTable(tmp_path / "costs.json")) == found
    assert not [name for name in again.stage_names if "/" in name], "nor are their stages needed yet"
    assert other_costs(program_of(model("llama-gqa"), None, 1), GREEDY, first, table) == []


def test_a_shape_whose_stages_do_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    program = shaped(2)
    program.prepare(GREEDY)
    prepare = program.prepare_shape

    def short(number: int) -> None:
        if number == 2:
            raise torch.OutOfMemoryError("no memory")
        prepare(number)

    monkeypatch.setattr(program, "prepare_shape", short)
    table = CostTable(None)
    found = other_costs(program, GREEDY, stage_costs(program, GREEDY, table), table)
    assert found[0] is not None
    assert found[1] is None


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
    assert {"draft", "draft/1", "draft/2", "target_tree/2"} <= {stage.stage for stage in found.stages}
    assert found.as_dict()["options"]["other_trees"] == list(OTHERS)

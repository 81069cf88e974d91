"""Stage costs that were measured on a busy machine are corrected by the times of decoding, others kept."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.models.program_cases import GREEDY, PROMPTS, draft_of, finished, model, program_of
from triforce_tree.decoding.choice import chooser
from triforce_tree.decoding.choice.cost_table import CostTable, correct, stage_costs
from triforce_tree.decoding.choice.estimates import Learnt, LearntChoice
from triforce_tree.decoding.choice.passes import PLAIN, PassKind, StageSeconds
from triforce_tree.decoding.choice.stage_costs import StageCosts, settings_of
from triforce_tree.decoding.choice.times import timings as timings_module
from triforce_tree.decoding.choice.times.timings import LEAST_PASSES, StageTimings
from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.verify.probs import DeviceProbs

# By which plain decoding is the fastest, in seconds that no machine takes.
WRONG = StageCosts((100,), (StageSeconds(50.0, draft=500.0, tree=500.0),))
TRUE = StageSeconds(1.0, draft=0.2, retrieval=0.3, chain=1.5, root=1.2, tree=1.3)
BUSY = TRUE.scaled(dict.fromkeys(("plain", "draft", "retrieval", "chain", "root", "tree"), 2.0))


def passes(
    timings: StageTimings, table: StageSeconds, count: int, noise: float = 0.05, outliers: float = 0.1
) -> None:
    """As many passes of each kind, on a machine whose seconds are TRUE; some take ten times as long."""
    rng = random.Random(count)
    timings.begin()

    def took(seconds: float) -> float:
        return seconds * (10 if rng.random() < outliers else rng.uniform(1 - noise, 1 + noise))

    for _ in range(count):
        timings.add(PLAIN, 1.0, {"target": took(1.0)}, table, 1)
        timings.add(PassKind(2, 1), 1.0, {"draft": took(0.2), "target": took(1.3)}, table, 1)
        drafting = {"draft": took(0.6), "retrieval": took(0.9)}
        timings.add(PassKind(3, 3), 0.5, {**drafting, "target": took(1.35)}, table, 1)


def test_costs_measured_on_a_busy_machine_are_corrected() -> None:
    timings = StageTimings()
    for _ in range(2):
        passes(timings, BUSY, LEAST_PASSES)
    factors = timings.factors()
    assert factors.keys() == {"plain", "draft", "retrieval", "chain", "root", "tree", "prepare"}
    assert factors == pytest.approx(dict.fromkeys(factors, 0.5), rel=0.05)
    corrected = StageCosts((100, 200), (BUSY, replace(BUSY, plain=3.0))).scaled(factors)
    assert vars(corrected.seconds[0]) == pytest.approx(vars(TRUE), rel=0.06)
    assert corrected.seconds[1].plain == pytest.approx(1.5, rel=0.06)
    timings.clear()
    assert timings.factors() == {}


def test_chance_and_little_evidence_correct_nothing() -> None:
    for table, requests, count in ((TRUE, 4, 300), (BUSY, 1, 400), (BUSY, 2, LEAST_PASSES // 5)):
        timings = StageTimings()
        for _ in range(requests):
            passes(timings, table, count)
        assert timings.factors() == {}
    # Quartiles on both sides: a machine that is busy half of the time.
    timings = StageTimings()
    for _ in range(4):
        passes(timings, TRUE.scaled({"plain": 1 / 1.3}), 200, noise=0.6)
    assert timings.factors() == {}


def test_stages_that_did_not_run_are_corrected_like_plain_passes() -> None:
    """Else they would seem too slow beside these, and never run."""
    timings = StageTimings()
    for _ in range(2):
        timings.begin()
        for _ in range(LEAST_PASSES):
            timings.add(PLAIN, 1.0, {"target": 1.0}, BUSY, 1)
    assert not timings.ran("tree")
    names = {"plain", "draft", "retrieval", "tree", "chain", "root", "prepare"}
    assert timings.factors() == pytest.approx(dict.fromkeys(names, 0.5))
    for _ in range(20):
        # The draft ran a few times, and takes what the table says; its tree is of the other shape.
        timings.add(PassKind(2, 1, 1), 1.0, {"draft": BUSY.draft, "target": 0.6 * BUSY.tree}, BUSY, 1)
    factors = timings.factors(2)
    assert timings.ran("tree/1")
    assert "draft/1" not in factors
    assert (factors["draft"], factors["tree"], factors["tree/1"]) == pytest.approx((0.5, 0.5, 0.6))


def test_passes_of_another_shape_correct_its_own_stages() -> None:
    timings = StageTimings()
    for _ in range(2):
        timings.begin()
        for _ in range(LEAST_PASSES):
            timings.add(PassKind(2, 1, 2), 1.0, {"draft": 0.4, "target": 1.3}, TRUE, 1)
            timings.add(PassKind(3, 1), 1.0, {"draft": 0.2, "retrieval": 9.0, "target": 1.5}, TRUE, refresh=2)
    assert timings.factors() == pytest.approx({"draft/2": 2.0})


def prepared() -> DecodingProgram:
    program = program_of(model("llama-gqa"), draft_of("llama-gqa"), 2, rounds=None, other_trees=("chain:2",))
    program.prepare(GREEDY)
    return program


def test_the_table_holds_the_correction(tmp_path: Path) -> None:
    program, table = prepared(), CostTable(tmp_path / "costs.json")
    first = stage_costs(program, GREEDY, table)
    other = first.scaled({"draft": 0.5})
    settings = settings_of(program, DeviceProbs.kind(GREEDY), None)
    assert not correct(program, GREEDY, first, [other], table)
    program.learnt["any"] = LearntChoice(Learnt(0.5, 1.0), 1.0, {"plain": 3.0})
    for _ in range(2):
        program.selected.timings.begin()
        for _ in range(LEAST_PASSES):
            seconds = {"target": 3 * first.seconds[0].plain}
            program.selected.timings.add(PLAIN, 1.0, seconds, first.seconds[0], 1)
    assert correct(program, GREEDY, first, [other], table)
    found = CostTable(tmp_path / "costs.json").find(settings)
    assert found is not None
    for own, before in zip(found.seconds, first.seconds, strict=True):
        for name in ("plain", "draft", "tree", "prepare"):
            assert getattr(own, name) == pytest.approx(3 * getattr(before, name), rel=0.06), (
                "stages that did not run were measured on the same machine"
            )
    assert table.find(settings | {"shape": 1}) is None, "its costs are predicted from the first ones"
    assert program.learnt["any"].cost_factors == {}, "they were relative to the old costs"
    assert not correct(program, GREEDY, found, [other], table), "the evidence was used"
    assert stage_costs(program, GREEDY, table) == found


@pytest.mark.parametrize("repeatable", [True, False])
def test_passes_are_compared_with_the_table(repeatable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a seed too, where nothing else corrects costs."""
    monkeypatch.setattr(timings_module, "LEAST_PASSES", 8)
    program = prepared()
    corrected: list[StageCosts] = []
    monkeypatch.setattr(CostTable, "replace", lambda self, settings, costs: corrected.append(costs))
    monkeypatch.setattr(chooser, "stage_costs", lambda *_: WRONG)
    monkeypatch.setattr(chooser, "other_costs", lambda *_: [None])
    for _ in range(2):
        loop = DecodingLoop.over(program, GREEDY, 0, repeatable)
        finished(loop, PROMPTS[:1], [12])
        assert set(loop.passes) == {PLAIN}
    assert len(corrected) == 1, "after the second request"
    assert corrected[0].seconds[0].plain < 1

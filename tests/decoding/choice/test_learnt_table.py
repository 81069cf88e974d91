"""What requests learn about acceptance is kept for later processes, by pair, temperature and context."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import LogitsProcessorList, TopKLogitsWarper

from tests.support.models.program_cases import GREEDY, PROMPTS, SAMPLED, draft_of, finished, model, program_of
from triforce_tree.decoding.choice import chooser
from triforce_tree.decoding.choice.budgets.loss_budget import START_BUDGET
from triforce_tree.decoding.choice.estimates import Learnt, LearntChoice
from triforce_tree.decoding.choice.learnt_table import LearntChoices, temperature_class
from triforce_tree.decoding.choice.passes import StageSeconds
from triforce_tree.decoding.choice.stage_costs import StageCosts
from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.verify.sampling import ProbsFromLogits

LEARNT = LearntChoice(Learnt(0.6, 2.5, 0.4), 1.25, {"plain": 2.0})


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "deep" / "estimates.json"
    monkeypatch.setenv("TRIFORCE_TREE_ESTIMATES", str(file))
    costs = StageSeconds(1.0, 0.05, 0.1, chain=1.1, tree=1.1)
    monkeypatch.setattr(chooser, "stage_costs", lambda *_: StageCosts((100,), (costs,)))
    return file


def program(**options: Any) -> DecodingProgram:
    return program_of(model("llama-gqa"), draft_of("llama-gqa"), 3, 1, **{"rounds": None, **options})


def prepared(to_probs: ProbsFromLogits = SAMPLED, **options: Any) -> LearntChoices:
    made = program(**options)
    made.prepare(to_probs)
    return LearntChoices(made, to_probs)


def test_classes_of_temperatures() -> None:
    at = ProbsFromLogits.at
    found = [temperature_class(p) for p in (at(0), at(0.2), at(0.7), at(0.71), at(1.0), ProbsFromLogits())]
    assert found == ["greedy", "low", "low", "high", "high", "high"]
    assert temperature_class(ProbsFromLogits(LogitsProcessorList([TopKLogitsWarper(3)]))) == "high"


def test_another_process_begins_from_them(path: Path) -> None:
    """With the acceptances and the loss budget; costs are of a process and its load."""
    assert prepared().last() is None
    first = prepared()
    first.keep(LEARNT)
    assert first.last() == LEARNT
    assert prepared().last() == LearntChoice(LEARNT.estimates, 1.25, {})
    assert prepared(ProbsFromLogits.at(0.9)).last() is not None, "the same class"
    for other in (prepared(GREEDY), prepared(ProbsFromLogits.at(0.3)), prepared(budget=32)):
        assert other.last() is None
    [entry] = json.loads(path.read_text())["entries"].values()
    assert entry["settings"]["temperature"] == "high"


@pytest.mark.parametrize(
    "change",
    [{"acceptance": 7}, {"budget": math.nan}, {"tokens_per_round": "x"}, {"tree_acceptance": []}],
    ids=str,
)
def test_a_damaged_entry_is_not_used(path: Path, change: dict[str, Any]) -> None:
    prepared().keep(LEARNT)
    held = json.loads(path.read_text())
    [key] = held["entries"]
    for entry in (held["entries"][key] | change, None, 3):
        path.write_text(json.dumps({"entries": {key: entry}}))
        assert prepared().last() is None


def decoded(own: DecodingProgram, seed: int | None) -> tuple[DecodingLoop, list[int]]:
    loop = DecodingLoop.over(own, SAMPLED, seed or 0, repeatable=seed is not None)
    [tokens] = finished(loop, PROMPTS[:1], [40])
    return loop, tokens


def test_requests_without_a_seed_write_and_read_them(path: Path) -> None:
    before = decoded(program(), 3)[1]
    assert not path.exists()
    fresh = DecodingLoop.over(program(), SAMPLED, 0).controller
    first = decoded(program(), None)[0].controller
    assert path.is_file()
    again = DecodingLoop.over(program(), SAMPLED, 0).controller
    assert again.acceptance == pytest.approx(first.acceptance) != fresh.acceptance
    assert again.budget.left <= START_BUDGET
    assert decoded(program(), 3)[1] == before, "a seed's tokens follow from the seed alone"


def test_an_empty_name_keeps_nothing_on_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIFORCE_TREE_ESTIMATES", "")
    own = program()
    own.prepare(SAMPLED)
    LearntChoices(own, SAMPLED).keep(LEARNT)
    assert LearntChoices(own, SAMPLED).last() == LEARNT, "within the program"
    assert prepared().last() is None
    assert not path.exists()

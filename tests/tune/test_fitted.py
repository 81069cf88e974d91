"""Trees that tune fits to measured acceptance and stage times, beside brute force over sizes."""

import itertools

import numpy as np
import pytest
import torch

from tests.support.models.tune_cases import CONTEXT, plan
from triforce_tree import Engine
from triforce_tree.config import HierarchyConfig
from triforce_tree.eval import overlap
from triforce_tree.eval.results import Records
from triforce_tree.trees.shapes import Static, expected_acceptances, parse_shape, sequoia
from triforce_tree.trees.sizes import measured_seconds
from triforce_tree.tune.fitted import MOST_DEPTH, MOST_TOKENS, fitted_trees
from triforce_tree.tune.plan import Watch
from triforce_tree.tune.search import OutOfTime, Space
from triforce_tree.tune.tuner import Tuner

BY_DEPTH = [[0.5, 0.2, 0.1], [0.6, 0.1, 0.1], [0.7, 0.1]]
FLAT = [(3, 1.0), (64, 1.02)]
DEAR = [(3, 1.0), (64, 60.0)]


@pytest.mark.parametrize("verified", [FLAT, DEAR, [(3, 1.0), (16, 1.1), (64, 3.0)]])
@pytest.mark.parametrize("beside", [1, 5])
def test_no_other_size_has_more_tokens_a_second(verified: list[tuple[int, float]], beside: int) -> None:
    verified = [(tokens + beside - 1, seconds) for tokens, seconds in verified]
    stages = {"target": verified, "draft": [(3, 0.05), (64 + beside, 0.1)]}
    [name] = fitted_trees({"draft -> target": BY_DEPTH}, stages, beside)
    seconds = measured_seconds(stages["target"], stages["draft"], beside)

    def rate(tree: Static) -> float:
        depth = max(map(len, tree.paths))
        return (1 + expected_acceptances(tree, BY_DEPTH)) / seconds(tree.size, depth)

    tree = parse_shape(name)
    assert isinstance(tree, Static)
    sizes = itertools.product(range(1, MOST_TOKENS + 1), range(1, MOST_DEPTH + 1))
    assert rate(tree) == pytest.approx(max(rate(sequoia(BY_DEPTH, *size)) for size in sizes))
    assert rate(tree) >= max(rate(sequoia(BY_DEPTH, *old)) for old in ((15, 3), (24, 5)))


def test_each_level_that_verifies_has_its_own_tree() -> None:
    acceptance = {"draft -> target": BY_DEPTH, "draft -> retrieval": BY_DEPTH}
    draft = [(3, 0.05), (64, 0.05)]
    large, small = fitted_trees(acceptance, {"target": FLAT, "retrieval": DEAR, "draft": draft}, 1)
    assert parse_shape(large).size > 8 * parse_shape(small).size
    assert fitted_trees(acceptance, {"target": FLAT, "draft": draft}, 1) == [large]
    assert fitted_trees(acceptance, {"target": FLAT, "retrieval": FLAT, "draft": draft}, 1) == [large]
    assert fitted_trees({"draft -> target": [[0.0, 0.0]]}, {"target": FLAT, "draft": draft}, 1) == []
    # Rounded shares may add up to a little more than one.
    assert fitted_trees({"draft -> target": [[0.6667, 0.1667, 0.1667]]}, {"target": FLAT, "draft": draft}, 1)


def test_the_largest_tree_fits_the_buffers_of_the_measurements() -> None:
    for lookup in (None, 9):
        space = Space(HierarchyConfig(lookup=lookup), 8192, gpu=False, draft=True)
        limits = space.extent()
        assert limits.nodes >= 1 + MOST_TOKENS + (lookup or 0)
        assert limits.depth >= MOST_DEPTH


def test_what_is_fitted_is_tried_and_kept(
    engine: Engine, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acceptance and stage times of a small pair; measurements of settings are made up."""
    tried: list[str] = []

    def measured(self: Tuner, options: dict[str, object], number: int) -> dict[str, object]:
        tried.append(str(options.get("tree")))
        return {
            "ms_per_token": 5.0, "step_ms": {"target": 5.0}, "tokens_per_pass": {}, "draft_length": {},
            "repeated_8grams": 0.0,
        }  # fmt: skip

    monkeypatch.setattr(Tuner, "_measured", measured)
    records = Records(None, {})
    Tuner(engine, ids, plan(temperatures=[0.6], new_tokens=40), records).entries(lambda each: None)
    [accepted] = [r["found"] for r in records.all if r["measured"] == "acceptance by depth"]
    assert set(accepted["by_depth"]) == {"draft -> retrieval", "draft -> target"}
    [stages] = [r["found"] for r in records.all if r["measured"] == "stages"]
    assert set(stages) == {"draft", "target", "retrieval"}
    for points in stages.values():
        assert [tokens for tokens, _ in points] == [3, 16, 64]
        assert all(seconds > 0 for _, seconds in points)
    assert set(fitted_trees(accepted["by_depth"], stages, 1)) <= set(tried)
    assert any(tree.startswith("static:") for tree in tried)

    def fail(self: Tuner, *given: object) -> dict[str, object]:
        raise AssertionError("measured again")

    monkeypatch.setattr(Tuner, "_accepted", fail)
    again = Tuner(engine, ids, plan(temperatures=[0.6], new_tokens=40), records)
    assert len(again.entries(lambda each: None)) == 1
    stopped = Tuner(engine, ids, plan(), Records(None, {}), Watch(wanted=lambda: False))
    stopped._cell = {"context": CONTEXT, "temperature": 0.0}
    stopped._end = None
    with pytest.raises(OutOfTime):
        stopped._once("stages", dict)


def test_depths_that_few_positions_reach_have_no_acceptance_of_their_own(
    engine: Engine, ids: list[int]
) -> None:

    steps = list(overlap.teacher_forced(engine, ids[:200], 120))
    found = overlap.acceptance_by_depth(steps, 4, 8, greedy=False)
    for vectors in found.values():
        assert 1 <= len(vectors) <= 8
        assert all(len(vector) == 4 and sum(vector) <= 1.001 for vector in vectors)
    accepted = np.zeros((40, 2))
    accepted[:20, 0] = 1

    assert len(overlap.by_depth(torch.tensor(accepted), 8, least=16.0)) == 6
    assert len(overlap.by_depth(torch.tensor(accepted), 8)) == 8

"""Overlaps of the levels with the target on a given text, on a tiny pair."""

from typing import Any

import pytest
import torch

from scripts.train_pair.given import overlaps
from tests.support.models import tiny_pair
from triforce_tree import Engine


@pytest.fixture(scope="module")
def engine(pair: tiny_pair.TinyPair) -> Engine:
    return pair.load(budget=64, recent=32)


@pytest.fixture(scope="module")
def ids(engine: Engine) -> list[int]:
    return tiny_pair.prompt(engine, 400)


def test_a_complete_retrieval_cache_overlaps_entirely(engine: Engine, ids: list[int]) -> None:
    retrieval, draft = overlaps.overlaps(engine, ids, 200, 1024, 2)
    assert retrieval == pytest.approx(1, abs=1e-4)
    assert 0.2 < draft < 0.999
    partial, _ = overlaps.overlaps(engine, ids, 200, 64, 2)
    assert partial < 0.999


def test_distributions_are_the_models_own(engine: Engine, ids: list[int]) -> None:
    steps = list(overlaps.teacher_forced(engine, ids[:250], 180))
    model: Any = engine.target.model
    with torch.no_grad():
        expected = model(torch.tensor([ids[:250]])).logits[0, 179:249].softmax(-1)
    torch.testing.assert_close(torch.cat([s.target for s in steps]), expected, atol=1e-5, rtol=1e-3)

"""What passes cost: by the length of the context, the times of earlier passes and the shape of the tree."""

import random
from dataclasses import replace
from typing import Any

import pytest

from tests.support.distributions.simulated_passes import shape_of
from triforce_tree.policy.costs import EVIDENCE, KnownCosts, PassCosts, StageCosts, predicted
from triforce_tree.policy.passes import PLAIN, PassKind, StageSeconds

COSTS = StageCosts(
    (100, 500),
    (
        StageSeconds(0.008, 0.001, 0.001, chain=0.01, root=0.008),
        StageSeconds(0.02, 0.001, 0.001, chain=0.03, root=0.02),
    ),
)
TRUE = StageSeconds(1.0, draft=0.2, retrieval=0.3, chain=1.5, root=1.2, tree=1.3, prepare=0.5)
TWO, THREE = PassKind(2, 1), PassKind(3, 2)


def times(seconds: StageSeconds, factor: float) -> StageSeconds:
    """Each stage takes so many times as long."""
    return StageSeconds(**{name: factor * value for name, value in vars(seconds).items()})


# By length


def test_costs_are_interpolated_between_lengths() -> None:
    assert COSTS.at(100) == COSTS.seconds[0]
    level_0 = {"draft": 0.001, "retrieval": 0.001, "prepare": 0.0, "tree": float("inf")}
    between = level_0 | {"plain": 0.014, "chain": 0.02, "root": 0.014}
    assert vars(COSTS.at(300)) == pytest.approx(between)
    assert COSTS.at(1) == COSTS.at(100), "a pass costs its weights, however short the context"
    assert COSTS.at(900) == COSTS.at(500)
    alone = StageCosts((64,), (StageSeconds(1.5, 1.0, tree=2.0),))
    assert alone.at(1) == alone.at(1000) == StageSeconds(1.5, 1.0, tree=2.0)
    bent = StageCosts((10, 20, 40), tuple(StageSeconds(1.0, 1.0, tree=tree) for tree in (1.0, 1.0, 3.0)))
    assert [bent.at(n).tree for n in (15, 20, 30, 50)] == pytest.approx([1.0, 1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    "wrong", [{"lengths": ()}, {"lengths": (500, 100)}, {"seconds": COSTS.seconds[:1]}], ids=str
)
def test_impossible_costs_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"lengths"):
        StageCosts(**(vars(COSTS) | wrong))
    for seconds in ({"plain": 0.0}, {"plain": 1.0, "draft": float("nan")}, {"plain": 1.0, "prepare": -1.0}):
        with pytest.raises(ValueError, match=r"seconds must be above 0"):
            StageSeconds(**seconds)
    with pytest.raises(ValueError, match=r"plain=inf seconds must be finite"):
        StageSeconds(float("inf"))


def test_shorter_chains_cost_less_where_their_verification_does() -> None:
    """Each verified token takes its own time, as on a CPU."""
    cost = StageSeconds(1.0, draft=0.1, retrieval=0.4, chain=5.0, root=1.0)
    assert cost.of(PassKind(3, 2), 0.25) == pytest.approx(1.0 + 2.0)
    assert cost.of(PassKind(3, 2), 2.0) == pytest.approx(1.0 + 5.0), "no chain is longer than the longest"
    assert replace(cost, root=7.0).of(PassKind(3, 1), 0.0) == pytest.approx(0.5 + 5.0)


def test_costs_of_a_shorter_context_hold_after_a_change() -> None:
    found = PassCosts(KnownCosts([COSTS]))
    found.at(500)
    found.at(100)
    assert found.of(PLAIN) == 0.02, "a text only grows"
    found.changed()
    found.at(100)
    assert found.of(PLAIN) == 0.008


# By the times of passes


def known(seconds: StageSeconds, *others: StageSeconds) -> KnownCosts:
    return KnownCosts([StageCosts((1,), (own,)) for own in (seconds, *others)])


def test_costs_follow_measured_times_and_no_outlier() -> None:
    table = known(TRUE)
    found, frozen = PassCosts(table), PassCosts(table, follow=False)
    for _ in range(20):
        found.learn(THREE, 1.0, False, 3.0)
        found.learn(TWO, 1.0, True, 1.0)
        found.learn(PLAIN, 1.0, False, 0.5)
    for _ in range(5):
        found.learn(THREE, 1.0, False, 1e3)
    assert (found.of(PLAIN), found.of(THREE)) == pytest.approx((0.5, 3.0))
    assert found.of(TWO, resumed=True) == pytest.approx(1.0)
    assert found.of(TWO) == pytest.approx(0.75), "without what the drafter did before"
    assert PassCosts(table).of(PLAIN) == 0.5, "the next request goes on with them"
    assert [frozen.of(kind) for kind in (PLAIN, TWO)] == [1.0, 1.5]


def test_passes_that_were_not_measured_are_as_far_off_as_plain_ones() -> None:
    """The table is from a time when the machine was three times as busy."""
    found = PassCosts(known(times(TRUE, 3.0), times(TRUE, 3.0)))
    assert not found.certain(PLAIN)
    for _ in range(20):
        found.learn(PLAIN, 1.0, False, 1.0)
    assert found.certain(PLAIN)
    assert not found.certain(TWO)
    assert found.of(TWO) == pytest.approx(1.5)
    for _ in range(20):
        found.learn(TWO, 1.0, False, 1.2)
    for _ in range(20):
        found.learn(PLAIN, 1.0, False, 0.7)
    assert (found.of(PLAIN), found.of(TWO)) == pytest.approx((0.7, 1.2))
    assert found.of(PassKind(2, 1, 1)) == pytest.approx(1.05), "each shape has times of its own"
    found.drop_other_shapes()
    assert found.shapes == [0]


def test_plain_passes_are_measured_anew() -> None:
    """The machine was busy while the first ones were measured."""
    found = PassCosts(known(TRUE))
    for _ in range(3):
        found.learn(PLAIN, 1.0, False, 3.0)
    for _ in range(1000):
        found.learn(TWO, 1.0, False, 1.5)
    assert not found.certain(PLAIN)
    for seconds in (1.0, 30.0, 1.0):
        found.learn(PLAIN, 1.0, False, seconds)
    assert found.certain(PLAIN)
    assert found.of(PLAIN) == 1.0, "one of three may be an outlier"


def test_times_hold_at_all_lengths() -> None:
    found = PassCosts(KnownCosts([COSTS]))
    for _ in range(20):
        found.learn(PLAIN, 1.0, False, 0.016)
    found.at(500)
    assert found.of(PLAIN) == pytest.approx(0.04)


# Corrections of the table


def passes(found: KnownCosts, factor: float, count: int, noise: float = 0.05, outliers: float = 0.1) -> None:
    """Adds passes that take ``factor`` times as long as the table says, and some ten times as long."""
    rng = random.Random(count)
    for kind in (PLAIN, TWO, THREE):
        for _ in range(count):
            long = 10 if rng.random() < outliers else rng.uniform(1 - noise, 1 + noise)
            found.add(kind, factor * long)


def test_costs_measured_on_a_busy_machine_are_corrected() -> None:
    found = known(times(TRUE, 2.0))
    passes(found, 0.5, EVIDENCE)
    corrected = found.corrected()
    assert corrected is not None
    assert vars(corrected.seconds[0]) == pytest.approx(vars(TRUE), rel=0.06)
    found.replace([corrected])
    assert found.corrected() is None


def test_chance_and_little_evidence_correct_nothing() -> None:
    for factor, count in ((1.0, 300), (0.5, EVIDENCE - 1)):
        found = known(TRUE)
        passes(found, factor, count)
        assert found.corrected() is None
    # Quartiles on both sides: a machine that is busy half of the time.
    found = known(TRUE)
    passes(found, 1.3, EVIDENCE, noise=0.6)
    assert found.corrected() is None


def test_passes_that_were_not_made_are_corrected_like_plain_ones() -> None:
    """They would otherwise seem too slow beside these, and never be made."""
    found = known(TRUE)
    for _ in range(EVIDENCE):
        found.add(PLAIN, 0.5)
    corrected = found.corrected()
    assert corrected is not None
    assert vars(corrected.seconds[0]) == pytest.approx(vars(times(TRUE, 0.5)))
    for _ in range(EVIDENCE):
        found.add(TWO, 1.0)
    corrected = found.corrected()
    assert corrected is not None
    assert (corrected.seconds[0].tree, corrected.seconds[0].chain) == pytest.approx((1.3, 0.75))


# By shape


def test_costs_of_a_shape_are_predicted_by_its_tokens_and_forwards() -> None:
    """On a device whose verifications cost 1 + 0.01 a token, and a draft's forward 0.1."""

    def exact(name: str, slope: float) -> StageSeconds:
        shape = shape_of(name)
        tree, chain = 1 + slope * (shape.nodes - 1), 1 + slope * 40
        parts = {"draft": 0.1 * len(shape.widths), "retrieval": 0.3 * tree}
        return StageSeconds(1.0, **parts, chain=chain, tree=tree)

    name = "best-first:4,4,4,3"
    first = StageCosts((100, 400), (exact(name, 0.01), exact(name, 0.02)))
    for other in ("best-first:16,17,16,14", "chain:6", "chain:2"):
        found = predicted(first, shape_of(name), shape_of(other), 41)
        for seconds, slope in zip(found.seconds, (0.01, 0.02), strict=True):
            assert vars(seconds) == pytest.approx(vars(exact(other, slope)))
    # Matched tokens are verified by the target alone, and take no forward of the draft.
    for copied, chain in zip(
        predicted(first, shape_of(name), shape_of("lookup:6"), 41).seconds,
        predicted(first, shape_of(name), shape_of("chain:6"), 41).seconds,
        strict=True,
    ):
        assert copied.tree == chain.tree
        assert copied.draft < 0.1 * chain.draft
        assert copied.retrieval == float("inf")
    # With two levels there are two points, and no retrieval level.
    alone = StageCosts((100,), (StageSeconds(1.0, draft=0.4, tree=1.15),))
    [seconds] = predicted(alone, shape_of(name), shape_of("chain:30"), 0).seconds
    assert seconds.tree == pytest.approx(1.30)
    assert seconds.retrieval == seconds.chain == float("inf")

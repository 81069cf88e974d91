"""Tests what passes cost: by the length of the context, the times of decoding and the shape of the tree."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.distributions.simulated_passes import shape_of
from triforce_tree.policy import costs
from triforce_tree.policy.costs import (
    LEAST_PASSES,
    CostTable,
    MeasuredTimes,
    PassCosts,
    StageCosts,
    predicted,
)
from triforce_tree.policy.passes import PLAIN, STAGE_FIELDS, PassKind, StageSeconds

COSTS = StageCosts(
    (100, 500),
    (
        StageSeconds(0.008, 0.001, 0.001, chain=0.01, root=0.008),
        StageSeconds(0.02, 0.001, 0.001, chain=0.03, root=0.02),
    ),
)
SETTINGS = {"machine": "abacus", "levels": 3}
TRUE = StageSeconds(1.0, draft=0.2, retrieval=0.3, chain=1.5, root=1.2, tree=1.3, prepare=0.5)


def times(seconds: StageSeconds, factor: float) -> StageSeconds:
    """Each stage takes so many times as long."""
    return StageSeconds(**{name: factor * value for name, value in vars(seconds).items()})


BUSY = times(TRUE, 2.0)


# By length


def test_costs_are_interpolated_between_lengths() -> None:
    assert COSTS.at(100) == COSTS.seconds[0]
    level_0 = {"draft": 0.001, "retrieval": 0.001, "prepare": 0.0, "tree": float("inf")}
    between = level_0 | {"plain": 0.014, "chain": 0.02, "root": 0.014}
    assert vars(COSTS.at(300)) == pytest.approx(between)
    assert COSTS.at(1) == COSTS.at(100), "a pass costs its weights, however short the context"
    beyond = level_0 | {"plain": 0.032, "chain": 0.05, "root": 0.032}
    assert vars(COSTS.at(900)) == pytest.approx(beyond)
    alone = StageCosts((64,), (StageSeconds(1.5, 1.0, tree=2.0),))
    assert alone.at(1) == alone.at(1000) == StageSeconds(1.5, 1.0, tree=2.0)
    bent = StageCosts((10, 20, 40), tuple(StageSeconds(1.0, 1.0, tree=tree) for tree in (1.0, 1.0, 3.0)))
    assert [bent.at(n).tree for n in (15, 20, 30, 50)] == pytest.approx([1.0, 1.0, 2.0, 4.0])


@pytest.mark.parametrize(
    "wrong",
    [
        {"lengths": ()},
        {"lengths": (500, 100)},
        {"seconds": COSTS.seconds[:1]},
        {"seconds": COSTS.seconds[::-1]},
    ],
    ids=str,
)
def test_impossible_costs_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"lengths|costs less"):
        StageCosts(**(vars(COSTS) | wrong))
    for seconds in ({"plain": 0.0}, {"plain": 1.0, "draft": float("nan")}, {"plain": 1.0, "prepare": -1.0}):
        with pytest.raises(ValueError, match=r"seconds must be above 0"):
            StageSeconds(**seconds)
    with pytest.raises(ValueError, match=r"plain=inf seconds must be finite"):
        StageSeconds(float("inf"))


# By the times of decoding


def test_costs_follow_measured_times_and_no_outlier() -> None:
    table = StageSeconds(1.0, 0.2, 0.8, chain=4.0, root=2.0, tree=2.0, prepare=1.0)
    found = PassCosts([StageCosts((1,), (table,))])
    for _ in range(20):
        found.learn(
            PassKind(3, 2), 1.0, {"draft": 0.2, "retrieval": 0.8, "target": 3.0, "prepare": 9.0}, False
        )
        found.learn(PassKind(2, 1), 1.0, {"draft": 0.1, "target": 4.0, "prepare": 0.5}, True)
        found.learn(PLAIN, 1.0, {"target": 0.5}, False)
    now = {
        "plain": 0.5,
        "draft": 0.1,
        "retrieval": 0.4,
        "chain": 3.0,
        "root": 1.5,
        "tree": 4.0,
        "prepare": 0.5,
    }
    assert vars(found.stages(0)) == pytest.approx(now)
    found.learn(PassKind(3, 2), 1.0, {"draft": 1e3, "retrieval": 1e3, "target": 1e3}, False)
    assert found.stages(0).chain == pytest.approx(3.0)
    frozen = PassCosts([StageCosts((1,), (table,))], follow=False)
    frozen.learn(PLAIN, 1.0, {"target": 0.5}, False)
    frozen.learn_host(PLAIN, 3.0)
    assert frozen.stages(0) == table
    assert frozen.of(PLAIN) == 1.0


def test_stages_that_were_not_measured_follow_plain_passes() -> None:
    """A table of a machine that was three times as busy: plain passes alone are made, and drafting pays."""
    found = PassCosts([StageCosts((1,), (times(TRUE, 3.0),))])
    for _ in range(20):
        found.learn(PLAIN, 1.0, {"target": 1.0}, False)
    assert vars(found.stages(0)) == pytest.approx(vars(TRUE))
    # What was measured no longer follows.
    for _ in range(20):
        found.learn(PassKind(2, 1), 1.0, {"draft": 0.3, "target": 1.1}, False)
    for _ in range(20):
        found.learn(PLAIN, 1.0, {"target": 0.7}, False)
    now = found.stages(0)
    assert (now.plain, now.draft, now.tree) == pytest.approx((0.7, 0.3, 1.1))
    drafting = PassCosts([StageCosts((1,), (TRUE,))])
    for _ in range(20):
        drafting.learn(PassKind(2, 1), 1.0, {"draft": 0.1, "target": 0.9}, False)
    assert drafting.stages(0).plain == 1.0, "drafts may be fast or slow by themselves"


def test_measured_times_are_kept_by_shape_and_hold_at_all_lengths() -> None:
    other = replace(TRUE, draft=0.05, tree=1.05)
    table = [StageCosts((100, 200), (own, replace(own, plain=2.0))) for own in (TRUE, other)]
    measured = MeasuredTimes()
    found = PassCosts([*table, None], measured)
    assert found.shapes == [0, 1]
    found.at(100)
    assert (found.stages(0), found.stages(1)) == (TRUE, other)
    for _ in range(20):
        found.learn(PassKind(2, 1, 1), 1.0, {"draft": 0.1, "target": 2.1}, False)
        found.learn(PLAIN, 1.0, {"target": 1.5}, False)
    assert found.stages(0).draft == pytest.approx(0.3), "as plain passes, until it is measured"
    assert (found.stages(1).draft, found.stages(1).tree) == pytest.approx((0.1, 2.1))
    assert found.stages(0).tree == pytest.approx(1.95), "another shape's times say nothing of its own"
    assert found.stages(0).plain == found.stages(1).plain == pytest.approx(1.5)
    found.at(150)
    assert found.stages(1).tree == pytest.approx(2.1)
    assert found.stages(0).plain == pytest.approx(2.25)
    later = PassCosts(table, measured)
    assert later.stages(1).tree == pytest.approx(2.1), "the next request goes on with them"
    found.drop_other_shapes()
    found.at(190)
    assert found.shapes == [0]


def test_costs_of_a_shorter_context_hold_after_a_change() -> None:
    found = PassCosts([COSTS])
    found.at(500)
    found.at(100)
    assert found.stages(0).plain == 0.02, "a text only grows"
    found.changed()
    found.at(100)
    assert found.stages(0).plain == 0.008


def test_the_hosts_time_is_a_median() -> None:
    host, drafting = MeasuredTimes(), PassKind(2, 1)
    assert host.host(PLAIN) == host.host(drafting) == 0
    for seconds in (5.0, 1e-4, 1e-4, 1.5e-4, 1e-4):
        host.add_host(PLAIN, seconds)
    assert host.host(PLAIN) == 1e-4
    assert host.host(drafting) == 1e-4, "as plain passes, until it is measured"
    for _ in range(2):
        host.add_host(drafting, 3.0)
    assert host.host(drafting) == 1e-4, "the first ones may be chance"
    for _ in range(6):
        host.add_host(drafting, 4e-4)
    assert host.host(drafting) == 4e-4
    for _ in range(20):
        host.add_host(PLAIN, 5e-4)
    assert host.host(drafting) == 5e-4, "the machine has become busy"
    for _ in range(20):
        host.add_host(PLAIN, -1e-3)
    assert host.host(PLAIN) == 0


# Corrections of the table


def passes(
    found: MeasuredTimes, table: StageSeconds, count: int, noise: float = 0.05, outliers: float = 0.1
) -> None:
    """One request of so many passes of each kind, which take what TRUE says; some ten times as long."""
    rng = random.Random(count)
    found.begin()

    def took(seconds: float) -> float:
        return seconds * (10 if rng.random() < outliers else rng.uniform(1 - noise, 1 + noise))

    for _ in range(count):
        found.add(PLAIN, 1.0, {"target": took(1.0)}, table, False)
        found.add(PassKind(2, 1), 1.0, {"draft": took(0.2), "target": took(1.3)}, table, False)
        drafting = {"draft": took(0.6), "retrieval": took(0.9)}
        found.add(PassKind(3, 3), 0.5, {**drafting, "target": took(1.35)}, table, False)


def test_costs_measured_on_a_busy_machine_are_corrected() -> None:
    found = MeasuredTimes()
    for _ in range(2):
        passes(found, BUSY, LEAST_PASSES)
    factors = found.corrections()
    assert factors == pytest.approx(dict.fromkeys(STAGE_FIELDS, 0.5), rel=0.05)
    corrected = StageCosts((100, 200), (BUSY, replace(BUSY, plain=3.0))).scaled(factors)
    assert vars(corrected.seconds[0]) == pytest.approx(vars(TRUE), rel=0.06)
    assert corrected.seconds[1].plain == pytest.approx(1.5, rel=0.06)
    found.clear()
    assert found.corrections() == {}


def test_chance_and_little_evidence_correct_nothing() -> None:
    for table, requests, count in ((TRUE, 4, 300), (BUSY, 1, 400), (BUSY, 2, LEAST_PASSES // 5)):
        found = MeasuredTimes()
        for _ in range(requests):
            passes(found, table, count)
        assert found.corrections() == {}
    # Quartiles on both sides: a machine that is busy half of the time.
    found = MeasuredTimes()
    for _ in range(4):
        passes(found, replace(TRUE, plain=1 / 1.3), 200, noise=0.6)
    assert found.corrections() == {}


def test_stages_that_did_not_run_are_corrected_like_plain_passes() -> None:
    """They would otherwise seem too slow beside these, and never run."""
    found = MeasuredTimes()
    for _ in range(2):
        found.begin()
        for _ in range(LEAST_PASSES):
            found.add(PLAIN, 1.0, {"target": 1.0}, BUSY, False)
    assert found.corrections() == pytest.approx(dict.fromkeys(STAGE_FIELDS, 0.5))
    for _ in range(20):
        # The draft ran a few times, and takes what the table says.
        found.add(PassKind(2, 1), 1.0, {"draft": BUSY.draft, "target": 0.6 * BUSY.tree}, BUSY, False)
    factors = found.corrections()
    assert "draft" not in factors
    assert (factors["retrieval"], factors["tree"]) == pytest.approx((0.5, 0.6))


# By shape


def test_costs_of_a_shape_are_predicted_by_its_tokens_and_forwards() -> None:
    """The device's verifications cost 1 + 0.01 a token, and a draft's forward 0.1."""

    def exact(name: str, slope: float) -> StageSeconds:
        shape = shape_of(name)
        parts = {"draft": 0.1 * len(shape.widths), "retrieval": 0.5 + 0.01 * shape.nodes}
        tree, chain = 1 + slope * (shape.nodes - 1), 1 + slope * 40
        return StageSeconds(1.0, **parts, chain=chain, tree=tree)

    name = "best-first:4,4,4,3"
    first = StageCosts((100, 400), (exact(name, 0.01), replace(exact(name, 0.02), retrieval=0.66)))
    for other in ("best-first:16,17,16,14", "chain:6", "chain:2"):
        found = predicted(first, shape_of(name), shape_of(other), 41)
        for seconds, slope in zip(found.seconds, (0.01, 0.02), strict=True):
            expected = exact(other, slope)
            assert seconds.tree == pytest.approx(expected.tree)
            assert seconds.draft == pytest.approx(expected.draft)
        assert found.seconds[0].retrieval == pytest.approx(exact(other, 0.01).retrieval)
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


# On disk


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "stage_costs.json"


def test_the_file_keeps_costs_by_their_settings(path: Path) -> None:
    table = CostTable(path)
    assert table.find(SETTINGS) is None
    assert table.add(SETTINGS, COSTS) == COSTS
    assert CostTable(path).find(dict(reversed(SETTINGS.items()))) == COSTS
    assert CostTable(path).find(SETTINGS | {"levels": 2}) is None
    [entry] = json.loads(path.read_text())["entries"].values()
    assert entry["settings"] == SETTINGS
    assert list(path.parent.iterdir()) == [path], "no temporary file is left"


def test_concurrent_writers_agree(path: Path) -> None:
    """Each keeps what others have written, and uses the costs that were written first."""
    other = StageCosts((7,), (StageSeconds(1.0),))
    tables = [CostTable(path), CostTable(path), CostTable(path)]
    assert all(table.find(SETTINGS) is None for table in tables)
    assert tables[0].add(SETTINGS, COSTS) == COSTS
    assert tables[1].add(SETTINGS | {"levels": 2}, other) == other
    assert tables[2].add(SETTINGS, other) == COSTS
    fresh = CostTable(path)
    assert (fresh.find(SETTINGS), fresh.find(SETTINGS | {"levels": 2})) == (COSTS, other)


def test_the_oldest_entries_are_dropped(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "MOST_ENTRIES", 3)
    table = CostTable(path)
    for levels in range(5):
        table.add({"levels": levels}, COSTS)
    assert [CostTable(path).find({"levels": n}) is None for n in range(5)] == [True] * 2 + [False] * 3


@pytest.mark.parametrize(
    "content, needed",
    {
        "no JSON": ("{", "cannot be read"),
        "no UTF-8": (b"\xff\xfe\x00", "cannot be read"),
        "a list": ("[]", "is no table"),
        "no entries": ('{"entries": 5}', "is no table"),
        "deep": ("[" * 900 + "]" * 900, "cannot be read"),
    }.values(),
)
def test_a_damaged_file_is_replaced_with_a_sentence(
    path: Path, content: str | bytes, needed: str, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    table = CostTable(path)
    assert table.find(SETTINGS) is None
    assert table.find({}) is None
    [record] = caplog.records
    assert needed in record.getMessage()
    assert str(path) in record.getMessage()
    table.add(SETTINGS, COSTS)
    assert CostTable(path).find(SETTINGS) == COSTS
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"lengths": "x"},
        {"seconds": {"plain": [0.1, 0.2]}},
        {"seconds": None},
        {"seconds": {name: [-1.0, 1.0] for name in STAGE_FIELDS}},
        {"lengths": [float("inf")]},
    ],
    ids=str,
)
def test_a_damaged_entry_is_measured_again(path: Path, change: dict[str, Any]) -> None:
    CostTable(path).add(SETTINGS, COSTS)
    held = json.loads(path.read_text())
    [key] = held["entries"]
    for entry in (held["entries"][key] | change, 3, {}):
        path.write_text(json.dumps({"entries": {key: entry}}))
        assert CostTable(path).find(SETTINGS) is None
        CostTable(path).add(SETTINGS, COSTS)
        assert CostTable(path).find(SETTINGS) == COSTS
    path.write_text(json.dumps({"entries": 5}))
    assert CostTable(path).find(SETTINGS) is None


def test_without_a_folder_costs_are_kept_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    table = CostTable(tmp_path / "file" / "stage_costs.json")
    for levels in (2, 3):
        assert table.find({"levels": levels}) is None
        table.add({"levels": levels}, COSTS)
        assert table.find({"levels": levels}) == COSTS
    [record] = caplog.records
    assert "set TRIFORCE_TREE_CACHE to another folder" in record.getMessage()

"""The search for the fastest settings, with known times, and the space that it searches."""

from dataclasses import replace
from typing import Any

import pytest

from tests.support.models.tune_cases import FEW
from triforce_tree.config import HierarchyConfig
from triforce_tree.trees.shapes import WithChain, chain_shape
from triforce_tree.tune.search import OutOfTime, Space, relevant, search


def test_descent_finds_the_fastest_of_known_settings() -> None:
    asked = []

    def measure(options: dict[str, Any], against: dict[str, Any] | None) -> float:
        asked.append((options["gamma"], options["tree"], options["levels"]))
        return 1.0 + abs(options["gamma"] - 2) + 5 * (options["tree"] != "chain:2") + options["levels"]

    start = {"levels": 3, "tree": "best-first:3,2", "gamma": 6}
    two = start | {"levels": 2}
    best = {"levels": 3, "tree": "chain:2", "gamma": 2}
    assert search(measure, [start], FEW, lambda options: True) == ([best], True)
    assert search(measure, [start], FEW, lambda options: False) == ([start], True)
    # gamma does not apply to two levels.
    found, finished = search(measure, [start, two], FEW, lambda options: True)
    assert finished
    assert found == [best, two | {"tree": "chain:2"}]
    slow = two | {"tree": "best-first:3,2", "gamma": 60}
    assert search(measure, [best, slow], FEW, lambda options: True)[0] == [best, slow]
    # With as many levels only the fastest starting point is searched from.
    assert search(measure, [slow | {"levels": 3}, best, two], FEW, lambda options: False)[0] == [best, two]


def test_an_interrupted_search_keeps_its_best() -> None:
    def measure(options: dict[str, Any], against: dict[str, Any] | None) -> float:
        if options["gamma"] == 2:
            raise OutOfTime
        return float(options["gamma"])

    start = {"levels": 3, "gamma": 6}
    assert search(measure, [start], FEW[1:], lambda options: True) == ([{"levels": 3, "gamma": 4}], False)
    never = {"levels": 2, "gamma": 2}
    assert search(measure, [start, never], FEW[1:], lambda options: True) == ([start, never], False)
    with pytest.raises(OutOfTime):
        search(measure, [never], FEW[1:], lambda options: True)


def test_a_gain_within_noise_is_ignored() -> None:
    start = {"levels": 3, "gamma": 4}
    found, _ = search(lambda o, _: 10 - 0.01 * o["gamma"], [start], FEW[1:], lambda options: True)
    assert found == [start]


def test_the_space_fits_machine_pair_and_context() -> None:
    long = Space(HierarchyConfig(), 16_384, gpu=True, draft=True)
    assert {c.name for c in long.coordinates()} >= {"tree", "retrieval_weight_bits", "runner_ups"}
    assert "lookup" not in {c.name for c in long.coordinates()}
    assert all("lookup" not in start for start in long.starts())
    assert [start["levels"] for start in long.starts()] == [3, 2]
    assert long.starts()[0]["runner_ups"] is True
    longer = replace(long, context=122_880, fixed=frozenset({"gamma"}))
    assert [start["levels"] for start in longer.starts()] == [3, 2, 3]
    assert longer.starts()[2] | {"budget": 1536} != longer.starts()[0]
    assert longer.starts()[2]["gamma"] == longer.starts()[0]["gamma"]
    assert len(replace(longer, gpu=False).starts()) == 2
    trees = next(c for c in long.coordinates(["chain:7"]) if c.name == "tree").values
    assert trees[-1] == "chain:7"
    assert len(trees) == 1 + len(next(c for c in long.coordinates() if c.name == "tree").values)
    host = Space(HierarchyConfig(), 2048, gpu=False, draft=False, fixed=frozenset({"gamma"}))
    assert all("tree" not in start for start in host.starts())
    assert {c.name for c in host.coordinates()}.isdisjoint({"tree", "retrieval_weight_bits", "gamma"})
    carried = replace(long, start=HierarchyConfig.from_options(window=9)).complete(
        {"levels": 2, "tree": "chain:2", "gamma": 3, "lookup": 8}
    )
    assert carried == {"levels": 2, "tree": "chain:2", "sinks": 4, "window": 9}
    first = host.starts()[0]
    assert (first["levels"], first["budget"], first["runner_ups"]) == (3, 1024, False)
    assert [start["levels"] for start in replace(host, context=600).starts()] == [2]
    auto = replace(long, start=HierarchyConfig(retrieval_weight_bits="auto"))
    assert auto.starts() == long.starts()
    copied = replace(long, start=HierarchyConfig(retrieval_weight_bits=8))
    bits = [(start["levels"], start["retrieval_weight_bits"]) for start in copied.starts()]
    assert bits == [(3, 8), (3, 16), (2, 8)]
    fixed = replace(copied, fixed=frozenset({"retrieval_weight_bits"}))
    assert [start["levels"] for start in fixed.starts()] == [3, 2]
    one = replace(host, start=HierarchyConfig(levels=1), fixed=frozenset({"levels"}))
    assert [start["levels"] for start in one.starts()] == [1]
    assert not long.allows(long.starts()[0] | {"budget": 1537})
    assert not long.allows(long.starts()[0] | {"budget": 16_000})
    assert relevant(long.starts()[1]).keys() == {"levels", "tree", "other_trees"}
    assert relevant({"levels": 1, "gamma": 3}) == {"levels": 1}


def test_other_trees_are_those_of_the_start_in_every_setting() -> None:
    """By name, without the chain that stands beside every tree, and in what is written into a profile."""
    given = HierarchyConfig(other_trees=(chain_shape(2), "lookup:5"))
    beside = HierarchyConfig(
        lookup=3, tree=WithChain("chain:4", 3), other_trees=(WithChain("best-first:2,1", 3),)
    )
    for start, expected in (
        (given, "static:0;0.0 lookup:5"), (beside, "best-first:2,1"), (HierarchyConfig(), "none"),
    ):  # fmt: skip
        space = Space(start, 8192, gpu=True, draft=True)
        for options in space.starts():
            assert options["other_trees"] == expected
            assert space.config(options).other_trees == HierarchyConfig(other_trees=expected).other_trees
            assert space.complete(options)["other_trees"] == expected
        assert space.complete({"levels": 1, "other_trees": expected}) == {"levels": 1}
        alone = replace(space, draft=False)
        assert not any("other_trees" in alone.complete(options) for options in alone.starts())
    # The largest trees and chains that are tried hold them.
    assert Space(given, 8192, gpu=False, draft=True).extent().depth == 8
    longer = Space(HierarchyConfig(other_trees="lookup:40"), 8192, gpu=False, draft=True).extent()
    assert (longer.depth, longer.nodes) == (40, 64)


def test_three_levels_are_measured_as_a_profile_runs_them() -> None:
    """With passes of two levels, unless the number of levels was given."""
    three, two = {"levels": 3, "gamma": 4}, {"levels": 2}
    for fixed in (frozenset[str](), frozenset({"levels"})):
        auto = Space(HierarchyConfig(), 8192, gpu=False, draft=True, fixed=fixed)
        assert auto.measured(three) == {"levels": "auto", "gamma": 4}
        assert auto.measured(two) == two
    given = Space(HierarchyConfig(levels=3), 8192, gpu=False, draft=True, fixed=frozenset({"levels"}))
    assert given.measured(three) == three

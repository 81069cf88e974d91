"""A profile's entry above the device's defaults: which shapes and matched tokens stand beside its tree."""

from typing import Any

import pytest

from tests.support.models.tune_cases import CONTEXT
from triforce_tree import Engine
from triforce_tree.config import HierarchyConfig
from triforce_tree.planning.device_defaults import chosen_settings
from triforce_tree.planning.profiles import Entry, Profile

TREE = {"levels": 2, "tree": "chain:4"}
TUNED = {**TREE, "other_trees": "best-first:2,2,1 chain:2 lookup:12"}
MERGED = {**TREE, "lookup": 8}


def settings(engine: Engine, options: dict[str, Any], **given: Any) -> HierarchyConfig:
    """For a prompt like that of an entry with these options; ``given`` by the user."""
    entry = Entry(CONTEXT, 0.0, options, 1.0, 2.0)
    models = engine.hierarchy.target, engine.hierarchy.draft
    profile = Profile("", "", None, (entry,))
    config, found = chosen_settings(
        HierarchyConfig.from_options(**given), frozenset(given), *models, CONTEXT, 0.0, profile
    )
    assert found is entry
    return config


@pytest.mark.parametrize(
    ("options", "given", "expected"),
    [
        (TUNED, {}, ("best-first:2,2,1", "chain:2", "lookup:12")),
        (TREE | {"other_trees": ["chain:2", "lookup:3"]}, {}, ("chain:2", "lookup:3")),
        # Earlier releases measured one tree alone, and did not say so.
        (TREE, {}, ()),
        (TREE | {"other_trees": None}, {}, ()),
        (TREE | {"other_trees": "none"}, {}, ()),
        # What a user gives is kept, and a tree that is given is alone.
        (TUNED, {"other_trees": "chain:3"}, ("chain:3",)),
        (TUNED, {"other_trees": "none"}, ()),
        (TUNED, {"tree": "chain:2"}, None),
        # lookup=0 asks for no matched tokens, lookup=N for some beside every tree.
        (TUNED, {"lookup": 0}, ("best-first:2,2,1", "chain:2")),
        (TUNED, {"lookup": 4}, ()),
        # Buffers of more shapes are not in a plan of bounded memory.
        (TUNED, {"gpu_memory": "8GiB"}, ()),
        # The defaults, where the entry has nothing to say.
        ({"levels": 1}, {"levels": 2}, ("best-first:2,2,1", "chain:2", "lookup:12", "lookup:31")),
        (MERGED, {}, ()),
        (MERGED | {"other_trees": "chain:2"}, {}, ("chain:2",)),
        ({"levels": 2, "lookup": 15}, {}, ()),
    ],
)
def test_other_trees_of_an_entry(
    engine: Engine, options: dict[str, Any], given: dict[str, Any], expected: tuple[str, ...] | None
) -> None:
    found = settings(engine, options, **given)
    assert found.other_trees == expected
    assert found.tree == given.get("tree", options.get("tree", HierarchyConfig().tree))
    if "lookup" in given:
        assert found.lookup == given["lookup"]


def test_matched_tokens_that_are_given_take_the_place_of_those_measured(engine: Engine) -> None:
    """They are asked for once: beside every tree, or in its place."""
    found = settings(engine, MERGED, other_trees="chain:2 lookup:5")
    assert (found.lookup, found.other_trees, found.tree) == (None, ("chain:2", "lookup:5"), "chain:4")
    assert settings(engine, MERGED, other_trees="chain:2").lookup == 8

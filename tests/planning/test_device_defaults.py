"""Defaults by device, context and heads; options that a user sets are kept."""

import json
from pathlib import Path
from typing import Any

import pytest

from triforce_tree.config import HierarchyConfig
from triforce_tree.planning.device_defaults import (
    BUDGETS,
    ModelFacts,
    Read,
    bytes_of_token,
    missed,
    resolve,
    retrieval_size,
)


def settings(
    config: HierarchyConfig | None = None, given: tuple[str, ...] = (), **changed: Any
) -> dict[str, Any]:
    facts = {
        "gpu": True,
        "group": 1,
        "grows_trees": True,
        "takes_matches": False,
        "weights": 52.3e6,
        "slot": 18_432,
        "drafted": 28.3e6 / 3,
    }
    facts |= {name: changed.pop(name) for name in list(changed) if name in facts}
    # A CPU's retrieval cache stays as it is where a prompt is too short for any other.
    request = {"prompt": 122_880 if facts["gpu"] else 2000, **changed}
    return resolve(config or HierarchyConfig(), frozenset(given), ModelFacts(**facts), **request).as_options()


def test_a_cpu_keeps_the_defaults() -> None:
    defaults = HierarchyConfig().as_options()
    assert settings(gpu=False, grows_trees=False) == defaults
    others = ("best-first:2,2,1", "chain:2", "lookup:31")
    assert settings(gpu=False) == {**defaults, "other_trees": others}
    for bits in (16, 8):
        given = HierarchyConfig(retrieval_weight_bits=bits)
        assert settings(given, gpu=False)["retrieval_weight_bits"] == bits


@pytest.mark.parametrize("gpu", [True, False])
def test_other_trees_are_for_trees_and_memory_that_were_not_given(gpu: bool) -> None:
    found = settings(gpu=gpu)["other_trees"]
    assert len(found) == 3
    assert settings(gpu=gpu)["tree"] not in found
    for given in (("tree",), ("other_trees",)):
        assert settings(given=given, gpu=gpu)["other_trees"] is None
    for changed in ({"tree": "chain:3"}, {"gpu_memory": "8GiB"}, {"offload": True}):
        own = HierarchyConfig.from_options(**changed)
        assert settings(own, gpu=gpu)["other_trees"] is None, changed
    assert settings(grows_trees=False, gpu=gpu)["other_trees"] is None
    matched = tuple(name for name in found if name.startswith("lookup:"))
    beside = settings(grows_trees=False, takes_matches=True, gpu=gpu)
    assert beside["other_trees"] == matched, "a drafter has its own trees, and none of matched tokens"
    assert matched


def test_a_gpu_has_its_own() -> None:
    found = settings()
    names = ("gamma", "tree", "budget", "chunk", "runner_ups", "recent", "retrieval_weight_bits")
    assert [found[name] for name in names] == [20, "best-first:4,4,3,2,1,1", 8192, 32, None, 256, "auto"]
    grouped = settings(group=4)
    assert (grouped["gamma"], grouped["runner_ups"], grouped["budget"]) == (15, False, 8192)
    assert grouped["other_trees"][0] != found["other_trees"][0], "many rows cost more there"
    assert settings(grows_trees=False)["tree"] == HierarchyConfig().tree, "a drafter has its own trees"


def test_a_gpu_verifies_a_tree_behind_the_chain_where_few_tokens_are_added() -> None:
    assert settings()["tail_tree"] is True
    assert settings(group=8)["tail_tree"] is True
    assert settings(gpu=False)["tail_tree"] is False
    assert settings(grows_trees=False)["tail_tree"] is False, (
        "how many nodes a drafter's trees have is not known here"
    )
    assert settings(given=("tail_tree",))["tail_tree"] is False
    for changed in (
        {"gamma": 25},
        {"tree": "best-first:16,17,16,14"},
        {"offload": True},
        {"gpu_memory": "8GiB"},
    ):
        assert settings(HierarchyConfig.from_options(**changed))["tail_tree"] is False, changed
    assert settings(HierarchyConfig(gamma=24))["tail_tree"] is True
    assert [settings(batch=n)["tail_tree"] for n in (2, 3)] == [True, False], "56 tokens each"
    assert [settings(batch=n, group=4)["tail_tree"] for n in (4, 5)] == [True, False], "31 tokens each"


@pytest.mark.parametrize("prompt", [1, 4096, 8192, 32_768, 65_536, 122_880, 1_000_000])
def test_the_budget_follows_the_context(prompt: int) -> None:
    config = resolve(HierarchyConfig(), frozenset(), ModelFacts(gpu=True, group=1, grows_trees=True), prompt)
    retrieval = config.retrieval
    assert retrieval.budget <= max(1024, prompt // 4)
    assert prompt >= 98_304 or prompt / retrieval.chunk <= 6144, "not too many means to read in each round"
    assert config.levels_for(prompt) == (3 if prompt >= 4096 else 2)


def test_given_options_are_kept() -> None:
    defaults = HierarchyConfig().as_options()
    for name in ("gamma", "tree", "retrieval_weight_bits"):
        assert settings(given=(name,))[name] == defaults[name], "even at their defaults"
    own = HierarchyConfig.from_options(gamma=7, tree="chain:2", runner_ups=True)
    assert {name: settings(own, group=8)[name] for name in ("gamma", "tree", "runner_ups")} == {
        "gamma": 7, "tree": "chain:2", "runner_ups": True,
    }  # fmt: skip
    # Budget, chunk and recent depend on each other.
    for changed in ({"recent": 512}, {"budget": 3072}, {"chunk": 16}):
        found = settings(HierarchyConfig.from_options(**changed))
        assert {name: found[name] for name in ("budget", "chunk", "recent")} == {
            **{name: defaults[name] for name in ("budget", "chunk", "recent")},
            **changed,
        }
    assert settings(given=("budget",))["chunk"] == defaults["chunk"]


def test_bits_of_level_1_are_numbers_or_auto() -> None:
    assert HierarchyConfig() == HierarchyConfig(retrieval_weight_bits="auto")
    for given, number in ((16, 16), (8, 8), (4, 4), ("auto", 16)):
        config = HierarchyConfig.from_options(retrieval_weight_bits=given)
        assert (config.as_options()["retrieval_weight_bits"], config.weight_bits) == (given, number)
        assert HierarchyConfig.from_options(**config.as_options()) == config
    for wrong in (2, 0, True, None, "8", "none"):
        with pytest.raises(ValueError, match=f"retrieval_weight_bits={wrong!r} must be 16, 8, 4 or 'auto'"):
            HierarchyConfig.from_options(retrieval_weight_bits=wrong)


RESULTS = Path(__file__).with_name("budgets_cpu.json")
# The embedded pair in fp32: its target, a slot, three forwards of its draft.
PAIR = Read(52.3e6, 52.3e6, 18_432, 28.3e6)


def measured() -> dict[int, dict[tuple[int, int], list[dict[str, Any]]]]:
    """Rows of several texts where tokens are drawn, by context and size."""
    found: dict[int, dict[tuple[int, int], list[dict[str, Any]]]] = {}
    for row in json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]:
        if row["temperature"] > 0 and row["texts"] > 1:
            found.setdefault(row["context"], {}).setdefault((row["budget"], row["chunk"]), []).append(row)
    assert len(found) >= 3
    return found


def test_the_law_is_close_to_what_was_measured() -> None:
    for context, sizes in measured().items():
        for (budget, chunk), rows in sizes.items():
            refused = sum(1 - row["overlap"] for row in rows) / len(rows)
            assert missed(budget, chunk, context) == pytest.approx(refused, rel=0.25), (
                context,
                budget,
                chunk,
            )


def test_what_is_chosen_is_nearly_the_fastest_of_those_that_were_measured() -> None:
    for context, sizes in measured().items():
        times = {size: sum(row["expected_ms"] for row in rows) for size, rows in sizes.items()}
        chosen = retrieval_size(PAIR, context, 12)
        alike = [time for (budget, _), time in times.items() if budget == chosen["budget"]]
        assert min(alike) <= 1.08 * min(times.values()), (context, chosen)


def test_more_is_read_where_it_costs_less() -> None:
    budgets = [retrieval_size(PAIR, context, 12)["budget"] for context in (2048, 8192, 32_768, 131_072)]
    assert budgets == sorted(set(budgets))
    # Weights that take long beside keys and values.
    heavy = Read(100 * PAIR.weights, 100 * PAIR.level_one, PAIR.slot, PAIR.draft)
    assert retrieval_size(heavy, 32_768, 12)["budget"] > retrieval_size(PAIR, 32_768, 12)["budget"]
    assert retrieval_size(PAIR, 2047, 12) == {}
    assert all(missed(2 * b, 8, 131_072) < missed(b, 8, 131_072) < missed(b, 16, 131_072) for b in BUDGETS)
    assert missed(1024, 8, 1024) == 0.0
    assert bytes_of_token(PAIR, 1024, 1024, 8, 12) > 0


def test_a_cpus_defaults_follow_it_unless_an_option_is_given() -> None:
    def chosen(given: tuple[str, ...] = (), prompt: int = 32_768, **options: Any) -> tuple[int, int]:
        made = settings(HierarchyConfig.from_options(**options), given, gpu=False, prompt=prompt)
        return made["budget"], made["chunk"]

    assert chosen() == tuple(retrieval_size(PAIR, 32_768, 12).values()) != (1536, 8)
    assert chosen(prompt=2000) == (1536, 8)
    assert chosen(("chunk",)) == chosen(recent=128) == (1536, 8)
    assert chosen(budget=3000) == (3000, 8)

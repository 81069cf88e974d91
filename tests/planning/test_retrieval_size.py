"""Budget and chunk of level 1 by the expected time of a token, beside times that were measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from triforce_tree.config import HierarchyConfig
from triforce_tree.planning.device_defaults import device_defaults
from triforce_tree.planning.retrieval_size import BUDGETS, Read, bytes_of_token, missed, retrieval_size

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "budgets_cpu.json"
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
        config = HierarchyConfig.from_options(**options)
        made = device_defaults(config, given, False, prompt, 1, True, read=lambda: PAIR).retrieval
        return made.budget, made.chunk

    assert chosen() == tuple(retrieval_size(PAIR, 32_768, 12).values()) != (1536, 8)
    assert chosen(prompt=2000) == (1536, 8)
    assert chosen(("chunk",)) == chosen(recent=128) == (1536, 8)
    assert chosen(budget=3000) == (3000, 8)

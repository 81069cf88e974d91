"""A small sample of ``scripts/checks/grammar_fuzz``."""

import json
from pathlib import Path

import pytest

import triforce_tree
from scripts.checks.grammar_fuzz import checked_texts, schemas, suite_problems
from triforce_tree import Engine


@pytest.fixture(scope="module")
def engine() -> Engine:
    return triforce_tree.load()


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_texts_are_valid_under_random_schemas(engine: Engine, levels: int) -> None:
    small = {"chunk": 2, "recent": 4, "sinks": 1, "window": 8}
    engine = engine.with_options(levels=levels, **({"budget": 8, "advanced": small} if levels == 3 else {}))
    found = checked_texts(engine, schemas(5, levels), levels, 120)
    assert sum(each.ended for each in found) >= 3
    assert [each.problem for each in found] == [None] * 5


def test_a_suite_finds_what_a_grammar_should_not_allow(engine: Engine, tmp_path: Path) -> None:
    cases = [
        {
            "description": "bounds", "schema": {"type": "integer", "minimum": 3},
            "tests": [{"data": 3, "valid": True}, {"data": 2, "valid": False}, {"data": 7, "valid": False}],
        },
        {"description": "not", "schema": {"not": {"type": "null"}}, "tests": []},
    ]  # fmt: skip
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    counts, problems = suite_problems(engine.tokenizer, tmp_path)
    assert counts == {"enforced": 1, "refused": 1, "valid": 1, "invalid": 2, "valid and allowed": 1}
    # The suite says wrongly that 7 is below 3.
    assert problems == ["cases: bounds: 7"]

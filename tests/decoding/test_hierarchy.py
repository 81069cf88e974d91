"""Tests how many levels a prompt gets, which buffers serve it, and memory plans that change nothing."""

import pytest

from tests.support.models.families import perturbed, prompt_of, tiny, without_tree
from tests.support.models.program_cases import SMALL, draft_of, model, reference
from triforce_tree import Engine, load
from triforce_tree.config import HierarchyConfig, load_arguments

AUTO = {**SMALL, "levels": "auto"}
# Twice the budget.
PROMPT = prompt_of(48)


def names(engine: Engine, new: int = 3, prompt: list[int] = PROMPT) -> list[str]:
    out = engine.generate(prompt, max_new_tokens=new, do_sample=False, eos_token_id=None)
    assert out.sequences[0, len(prompt) :].tolist() == reference(engine.target.model, prompt, new)
    return [level.name for level in out.levels]


@pytest.mark.parametrize("family", ["llama-gqa", "gemma3"])
def test_auto_takes_three_levels_where_some_layer_sees_the_whole_prompt(family: str) -> None:
    assert names(load(model(family), draft_of(family), **load_arguments(AUTO))) == [
        "draft",
        "retrieval",
        "target",
    ]


def test_a_short_prompt_takes_the_buffers_of_a_long_one() -> None:
    """Others would be captured for seconds on a GPU, and hold less of a conversation that grows."""
    options = load_arguments({**AUTO, "rounds": None})
    engine = load(model("llama-gqa"), draft_of("llama-gqa"), **options)
    assert len(names(engine)) == 3
    held = engine.last_program
    assert len(names(engine, 8, prompt_of(12))) == 3
    assert engine.last_program is held
    assert len(names(engine.with_options(levels=2), 8, prompt_of(12))) == 2, "as the user wants"


@pytest.mark.parametrize("draft", [True, False])
def test_auto_takes_two_levels_where_all_layers_have_a_sliding_window(draft: bool) -> None:
    """Level 1 would read as much as level 2."""
    target = model("mistral-window")
    settings = AUTO if draft else without_tree(AUTO)
    engine = load(target, draft_of("mistral-window") if draft else None, **load_arguments(settings))
    assert names(engine) == ["draft" if draft else "lookup", "target"]
    assert names(engine.with_options(levels=3))[1:] == ["retrieval", "target"], "unless it is asked for"


@pytest.mark.parametrize("window, levels", [(1024, 3), (1023, 2)])
def test_a_window_that_hides_nothing_is_none(window: int, levels: int) -> None:
    """Buffers are made for 1024 tokens."""
    target = tiny("mistral-window", sliding_window=window)
    assert len(names(load(target, perturbed(target, 0.05), **load_arguments(AUTO)))) == levels


def test_a_plan_for_windows_alone_keeps_its_buffers() -> None:
    """Plan and program agree about the levels; else each request would plan and capture again."""
    engine = load(model("mistral-window"), draft_of("mistral-window"), offload=True, **load_arguments(AUTO))
    assert names(engine) == ["draft", "target"]
    assert engine.memory is not None
    assert engine.memory.levels == 2
    held = engine._hierarchy.last_program
    assert names(engine, 5) == ["draft", "target"]
    assert engine._hierarchy.last_program is held


def test_planning_takes_nothing_up() -> None:
    engine = load(model("llama-gqa"), draft_of("llama-gqa"), offload=True)
    before = engine.config
    plan = engine.memory_plan(600, 20)
    assert plan is not None
    assert plan.offload is not None
    assert plan.config != before
    assert engine.config == before
    assert engine.memory is None
    assert not engine.offloads


def test_a_warm_request_makes_its_settings_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(model("llama-gqa"), draft_of("llama-gqa"), **load_arguments(AUTO))
    names(engine)
    made, check = [], HierarchyConfig.__post_init__
    monkeypatch.setattr(HierarchyConfig, "__post_init__", lambda self: made.append(check(self)))
    names(engine, 4)
    assert len(made) <= 1, "none where the length is known"

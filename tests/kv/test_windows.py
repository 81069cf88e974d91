"""Decoding with models that have sliding windows, and layers of different heads.

Rings are rounded up to a few slots, so that sequences wrap around many times, and chunks of a prompt attend
in small blocks; memory holds NaN until it is written.
"""

from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.support.models.families import perturbed, prompt_of, tiny
from tests.support.models.program_cases import (
    COVERED,
    EVERYTHING,
    GREEDY,
    SAMPLED,
    decoded,
    program_of,
    reference,
)
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.kv import prefill as prefill_module
from triforce_tree.kv import store as store_module
from triforce_tree.verify.sampling import ProbsFromLogits

pytestmark = pytest.mark.usefixtures("poisoned_empty")

WINDOWED = {
    "mistral-window": 11,
    "gemma2": 12,
    "gemma3": 12,
    "ministral": 40,
    "olmo3": 40,
    "command-r7b": 40,
    "exaone4": 40,
    "qwen2-window": 40,
    "gpt-oss": 40,
    "gemma4": 40,
    "llama4": 40,
}
# Shorter than the wider windows, and several rings long.
PROMPTS = [prompt_of(33), prompt_of(170)]


@pytest.fixture(autouse=True)
def _small_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "RING_PAGE", 8)
    monkeypatch.setattr(prefill_module, "_BLOCK", 5)


def check(target: PreTrainedModel, levels: int, new: int = 10, **options: object) -> DecodingProgram:
    """Greedy tokens are those of transformers; returns the program."""
    draft = perturbed(target, 0.05)
    settings = {"budget": 16, "window": 200, **options}
    program = program_of(target, draft, levels, len(PROMPTS), max_seq_len=200, **settings)
    tokens, decoder = decoded(program, PROMPTS, [new] * len(PROMPTS))
    assert tokens == [reference(target, prompt, new) for prompt in PROMPTS], levels
    assert all(level.accepted for level in decoder.levels[1:]), levels
    return program


@pytest.mark.parametrize("family", WINDOWED)
def test_families(family: str) -> None:
    target = tiny(family)
    for levels in (1, 2, 3):
        program = check(target, levels)
        shapes = program.target.kv_shapes
        for group in program.store.groups:
            assert {shapes[layer].window for layer in group.layers} == {group.shape.window}
            if group.shape.window is not None:
                assert group.shape.window == WINDOWED[family]
                assert group.ring == group.slots < program.store.slots
        assert any(group.ring for group in program.store.groups)


def test_phi3_with_a_window() -> None:
    target = tiny("phi3", sliding_window=9)
    for levels in (1, 2, 3):
        check(target, levels)


@pytest.mark.parametrize("window", [2, 4])
@pytest.mark.parametrize(("levels", "tree"), [(2, "chain:5"), (3, "best-first:3,2,1,1")])
def test_windows_smaller_than_the_tree_is_deep(window: int, levels: int, tree: str) -> None:
    check(tiny("gemma3", sliding_window=window), levels, tree=tree, gamma=6)


@pytest.mark.parametrize("window", [3, 12])
@pytest.mark.parametrize("to_probs", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_draft_with_windows_that_is_the_target_is_always_accepted(
    to_probs: ProbsFromLogits, window: int
) -> None:
    """The draft model sees what the target sees, tree nodes included."""
    target = tiny("gemma3", sliding_window=window)
    program = program_of(target, target, 2, 2, max_seq_len=120, tree="chain:4", window=200)
    new, decoder = decoded(program, [prompt_of(61), prompt_of(90)], [20, 15], to_probs)
    assert not to_probs.greedy or new[0] == reference(target, prompt_of(61), 20)
    assert decoder.levels[-1].acceptance_rate == 1.0
    assert decoder.levels[-1].mean_accepted_length == 5.0


def test_a_draft_whose_window_is_narrower_than_its_cache() -> None:
    """Drafting continues after its cache is recomputed, with positions counted inside it."""
    target = tiny("mistral-window")
    program = program_of(target, target, 2, 1, max_seq_len=200, window=16, tree="chain:3")
    new, decoder = decoded(program, [prompt_of(61)], [60])
    assert new == [reference(target, prompt_of(61), 60)]
    rate = decoder.levels[-1].acceptance_rate
    assert rate is not None
    assert rate > 0.9, "a cache wider than the window hides little of what the target sees"


@pytest.mark.parametrize("to_probs", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_retrieval_whose_budget_covers_the_sequence_is_always_accepted(to_probs: ProbsFromLogits) -> None:
    """For the retrieval model layers with a window see all of it, and the others all chunks."""
    target = tiny("gemma3")
    program = program_of(target, perturbed(target, 0.05), 3, 3, **{**EVERYTHING, "window": 6})
    _, decoder = decoded(program, COVERED, [20] * 3, to_probs)
    full, retrieval = decoder.levels[-1], decoder.levels[1]
    assert full.accepted == full.proposed > 30
    assert 0 < retrieval.accepted < retrieval.proposed


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_rings_draw_what_whole_stores_draw(levels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled tokens of the same seeds."""
    target = tiny("gemma2")
    draft = perturbed(target, 0.05)
    drawn = []
    program = program_of(target, draft, levels, 2, max_seq_len=200, budget=16)
    drawn = [decoded(program, PROMPTS, [12, 12], SAMPLED, seed)[0] for seed in (1, 2)]
    assert any(group.ring for group in program.store.groups)
    # Rings of so large pages would save no memory.
    monkeypatch.setattr(store_module, "RING_PAGE", 1024)
    other = program_of(target, draft, levels, 2, max_seq_len=200, budget=16)
    assert not any(group.ring for group in other.store.groups)
    assert drawn == [decoded(other, PROMPTS, [12, 12], SAMPLED, seed)[0] for seed in (1, 2)]
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize("levels", [1, 3])
def test_a_rewind_prefills_again_what_rings_have_overwritten(
    levels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny("gemma3")
    program = program_of(target, perturbed(target, 0.05), levels, 2, max_seq_len=240, budget=16)
    first, _ = decoded(program, PROMPTS, [30, 30])
    lengths: list[int] = []
    prefill = DecodingProgram.prefill

    def recorded(self: DecodingProgram, prompts: list[list[int]], **how: Any) -> None:
        lengths.extend(map(len, prompts))
        prefill(self, prompts, **how)

    monkeypatch.setattr(DecodingProgram, "prefill", recorded)
    beginnings = [[*prompt, *new[:7]] for prompt, new in zip(PROMPTS, first, strict=True)]
    assert decoded(program, beginnings, [23, 23], again=True)[0] == [new[7:] for new in first]
    assert lengths == [40, 177]
    assert decoded(program, PROMPTS, [30, 30], again=True)[0] == first

"""Greedy output, off the GPU, is the target's own for all trees and levels.

A batch of three prompts of different lengths, caches much smaller than the sequences, memory that holds NaN
until it is written.
"""

import pytest

from tests.support.models.families import prompt_of, tiny
from tests.support.models.program_cases import (
    NEW,
    PROMPTS,
    decoded,
    draft_of,
    exact,
    model,
    program_of,
    reference,
    references,
)

pytestmark = pytest.mark.usefixtures("poisoned_empty")


@pytest.mark.parametrize(
    "tree", ["best-first:4,3,2", "best-first:5", "chain:3", "sequoia:8x3", "static:0;0.1;1"]
)
@pytest.mark.parametrize("levels, runner_ups", [(2, None), (3, True), (3, False)])
def test_every_tree(levels: int, runner_ups: bool | None, tree: str) -> None:
    exact(levels, tree=tree, runner_ups=runner_ups)


@pytest.mark.parametrize(
    "tree", ["best-first:4,3,2", "best-first:5", "chain:3", "sequoia:8x3", "static:0;0.1;1"]
)
@pytest.mark.parametrize("gamma, rounds", [(1, 1), (4, 1), (9, 3), (9, 7), (3, None)])
def test_a_tree_at_the_end_of_the_chain(tree: str, gamma: int, rounds: int | None) -> None:
    exact(3, tree=tree, gamma=gamma, rounds=rounds, tail_tree=True, runner_ups=gamma > 3)


@pytest.mark.parametrize("family", ["mistral-window", "gemma2", "llama4"])
@pytest.mark.parametrize("gamma", [4, 30])
def test_a_tree_at_the_end_of_the_chain_behind_windows(family: str, gamma: int) -> None:
    """A chain of up to thirty tokens and a tree are longer than the windows and chunks of these families."""
    options = {"gamma": gamma, "rounds": gamma // 2, "tree": "best-first:3,2,1", "tail_tree": True}
    program = program_of(model(family), draft_of(family), 3, len(PROMPTS), **options)
    assert decoded(program, PROMPTS, NEW)[0] == references(family)


def test_one_level() -> None:
    program = program_of(model("llama-gqa"), None, 1, len(PROMPTS))
    new, decoder = decoded(program, PROMPTS, NEW)
    assert new == references()
    assert decoder.levels[0].forwards == sum(NEW)


@pytest.mark.parametrize("gamma, rounds", [(1, 4), (9, 3), (9, 7), (3, None)])
@pytest.mark.parametrize("runner_ups", [True, False])
def test_every_gamma_and_count_of_rounds(gamma: int, rounds: int | None, runner_ups: bool) -> None:
    """Chains that end before gamma, at it, and in rounds that cannot extend them."""
    exact(3, gamma=gamma, rounds=rounds, runner_ups=runner_ups)


@pytest.mark.parametrize("refresh", [0, 1, 3])
def test_every_refresh(refresh: int) -> None:
    exact(3, refresh=refresh, rounds=5, gamma=8)


@pytest.mark.parametrize(
    "options", [{"budget": 12, "recent": 4}, {"budget": 8, "chunk": 1, "recent": 1}], ids=str
)
def test_the_smallest_retrieval_caches(options: dict[str, int]) -> None:
    exact(3, rounds=4, gamma=9, **options)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_retrieval_level_of_few_bits(bits: int) -> None:
    exact(3, retrieval_weight_bits=bits)


@pytest.mark.parametrize("levels", [2, 3])
def test_an_unrelated_draft(levels: int) -> None:
    """Nearly every tree is rejected whole."""
    unrelated = tiny("qwen2", seed=5, num_hidden_layers=1)
    program = program_of(model("llama-gqa"), unrelated, levels, len(PROMPTS))
    assert decoded(program, PROMPTS, NEW)[0] == references()


@pytest.mark.parametrize("levels", [2, 3])
def test_sequences_many_times_longer_than_the_drafts_window(levels: int) -> None:
    """110 tokens over windows of 6 to 12."""
    target, prompts = model("llama-gqa"), [prompt_of(44), prompt_of(59)]
    program = program_of(target, target, levels, 2, max_seq_len=250)
    new, decoder = decoded(program, prompts, [110, 60])
    assert new == [reference(target, prompt, n) for prompt, n in zip(prompts, [110, 60], strict=True)]
    assert all(level.accepted for level in decoder.levels[1:])

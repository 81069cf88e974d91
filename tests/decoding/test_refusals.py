"""Tests what decoding refuses with a message, and unusual requests that it serves."""

import pytest
import torch

from tests.support.distributions.enumeration import NOISE
from tests.support.distributions.generation_cases import Case
from tests.support.distributions.generation_distributions import Generations, stranger
from tests.support.models.families import prompt_of, tiny
from tests.support.models.program_cases import (
    GREEDY,
    NEW,
    PROMPTS,
    SAMPLED,
    SMALL,
    decoded,
    draft_of,
    model,
    program_of,
    reference,
    references,
)
from triforce_tree import Engine
from triforce_tree.config import HierarchyConfig
from triforce_tree.verify.sampling import ProbsFromLogits

pytestmark = pytest.mark.usefixtures("poisoned_empty")


@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("to_probs", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_nan_logits_are_refused(levels: int, to_probs: ProbsFromLogits) -> None:
    target = tiny("llama-gqa")
    program = program_of(target, draft_of("llama-gqa"), levels, 3)
    weight = target.lm_head.weight[5].clone()
    with torch.no_grad():
        target.lm_head.weight[5] = torch.nan
    with pytest.raises(ValueError, match=r"NaN logits.*dtype=torch\.float32"):
        decoded(program, PROMPTS, NEW, to_probs)
    with torch.no_grad():
        target.lm_head.weight[5] = weight
    assert decoded(program, PROMPTS, NEW)[0] == references(), "the program can be used again"


@pytest.mark.parametrize("levels", [2, 3])
def test_greedy_text_is_the_targets_with_a_draft_that_returns_nan(levels: int) -> None:
    draft = tiny("llama-gqa", seed=3)
    with torch.no_grad():
        draft.lm_head.weight.fill_(torch.nan)
    assert decoded(program_of(model("llama-gqa"), draft, levels, 3), PROMPTS, NEW)[0] == references()


@pytest.mark.parametrize("levels", [2, 3])
def test_the_distribution_is_the_targets_with_a_draft_that_returns_nan(levels: int) -> None:
    case, draft = Case(levels, 3, 3), stranger(3, 3)
    with torch.no_grad():
        draft.lm_head.weight.fill_(torch.nan)
    made = Generations(stranger(3, 0, 1), draft, levels, case.prompt)
    assert case.distance(made) < NOISE


@pytest.mark.parametrize("levels", [2, 3])
def test_several_levels_need_a_drafter(levels: int) -> None:
    with pytest.raises(ValueError, match=f"levels={levels} needs a drafter; give one, or levels=1"):
        program_of(model("llama-gqa"), None, levels)


def engine_of(draft: bool = True, **options: object) -> Engine:
    small = draft_of("llama-gqa") if draft else None
    return Engine(model("llama-gqa"), small, config=HierarchyConfig.from_options(**{**SMALL, **options}))


def new_tokens(engine: Engine, prompt: list[int], count: int, **more: object) -> list[int]:
    out = engine.generate(prompt, max_new_tokens=count, do_sample=False, **more)
    return out.sequences[0, len(prompt) :].tolist()


@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 2, 4, 6, 20])
def test_prompts_of_any_length_are_served(levels: int, length: int) -> None:
    """Shorter than the draft's window, the recent window and the budget."""
    prompt = prompt_of(length)
    expected = reference(model("llama-gqa"), prompt, 40)
    assert new_tokens(engine_of(levels=levels), prompt, 40) == expected


@pytest.mark.parametrize("levels", [2, 3])
def test_prompt_lookup_proposes_and_is_verified(levels: int) -> None:
    prompt = prompt_of(23) * 4
    engine = engine_of(draft=False, levels=levels)
    out = engine.generate(prompt, max_new_tokens=60, do_sample=False)
    assert out.sequences[0, len(prompt) :].tolist() == reference(model("llama-gqa"), prompt, 60)
    assert out.levels[0].name == "lookup"
    assert 0 < out.levels[1].accepted < out.levels[1].proposed

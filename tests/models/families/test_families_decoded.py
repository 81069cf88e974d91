"""The decoding program decodes models of all families, and does not change the user's model.

Families with windows are in ``tests/kv/test_windows.py``.
"""

import pytest
import torch

from tests.support.models.families import CAPPED, perturbed, tiny
from tests.support.models.program_cases import PROMPTS, decoded, model, program_of, reference, references

pytestmark = pytest.mark.usefixtures("poisoned_empty")

WITHOUT_WINDOWS = [
    "llama",
    "llama-mqa",
    "llama-yarn",
    "llama3-rope",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "olmo2",
    "granite",
    "smollm3",
    "gpt-neox",
    "mixtral",
]


@pytest.mark.parametrize("family", [*WITHOUT_WINDOWS, *CAPPED])
def test_families(family: str) -> None:
    target = CAPPED[family]() if family in CAPPED else model(family)
    draft = perturbed(target, 0.05)
    expected = [reference(target, prompt, 14) for prompt in PROMPTS[:2]]
    for levels in (1, 2, 3):
        program = program_of(target, draft, levels, 2, window=200, budget=40)
        new, decoder = decoded(program, PROMPTS[:2], [14, 14])
        assert new == expected, levels
        assert all(level.accepted for level in decoder.levels[1:]), levels


def test_the_users_model_is_unchanged() -> None:
    target, draft = tiny("llama-gqa"), tiny("llama-gqa", seed=1)
    target.train()
    before = [m.config._attn_implementation for m in (target, draft)]
    weights = {name: weight.clone() for name, weight in target.named_parameters()}
    program = program_of(target, draft, 3)
    decoded(program, PROMPTS[:1], [8])
    assert [m.config._attn_implementation for m in (target, draft)] == before
    assert target.training
    assert all(torch.equal(weight, weights[name]) for name, weight in target.named_parameters())
    shared = {weight.data_ptr() for weight in target.parameters()}
    assert {weight.data_ptr() for weight in program.full.model.parameters()} == shared
    assert reference(target.eval(), PROMPTS[0], 4) == references()[0][:4]

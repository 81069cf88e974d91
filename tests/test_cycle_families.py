"""The device cycle decodes models of all families without windows, and leaves the user's model as it was."""

from collections.abc import Callable

import pytest
import torch
from cycle_cases import (
    PROMPTS,
    cycle_of,
    decoded,
    model,
    reference,
    references,
)
from families import VOCABULARY, build, perturbed, tiny
from transformers import (
    PreTrainedModel,
)

pytestmark = pytest.mark.usefixtures("poisoned_empty")


FULL = {"layer_types": ["full_attention"] * 2, "head_dim": 8}
OWN: dict[str, Callable[[], PreTrainedModel]] = {
    # Softcapped scores and sinks, without the windows that these families have elsewhere.
    "gemma2-full": lambda: tiny("gemma2", query_pre_attn_scalar=8, **FULL),
    "gpt-oss-full": lambda: build(
        "GptOssConfig",
        "GptOssForCausalLM",
        **FULL,
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.2,
        eos_token_id=None,
        pad_token_id=None,
    ),
}
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


@pytest.mark.parametrize("family", [*WITHOUT_WINDOWS, *OWN])
def test_families(family: str) -> None:
    target = OWN[family]() if family in OWN else model(family)
    draft = perturbed(target, 0.05)
    expected = [reference(target, prompt, 14) for prompt in PROMPTS[:2]]
    for levels in (1, 2, 3):
        cycle = cycle_of(target, draft, levels, 2, window=200, budget=40)
        new, decoder = decoded(cycle, PROMPTS[:2], [14, 14])
        assert new == expected, levels
        assert all(level.accepted for level in decoder.levels[1:]), levels


def test_the_users_model_is_untouched() -> None:
    target, draft = tiny("llama-gqa"), tiny("llama-gqa", seed=1)
    target.train()
    before = [m.config._attn_implementation for m in (target, draft)]
    weights = {name: weight.clone() for name, weight in target.named_parameters()}
    cycle = cycle_of(target, draft, 3)
    decoded(cycle, PROMPTS[:1], [8])
    assert [m.config._attn_implementation for m in (target, draft)] == before
    assert target.training
    assert all(torch.equal(weight, weights[name]) for name, weight in target.named_parameters())
    shared = {weight.data_ptr() for weight in target.parameters()}
    assert {weight.data_ptr() for weight in cycle.full.model.parameters()} == shared
    assert reference(target.eval(), PROMPTS[0], 4) == references()[0][:4]


def test_windows_of_attention_are_refused() -> None:
    target = tiny("mistral-window")
    with pytest.raises(NotImplementedError, match="sliding windows"):
        decoded(cycle_of(target, None, 1), PROMPTS[:1], [4])

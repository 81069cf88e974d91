"""A custom retrieval policy changes what the retrieval model sees, and never the tokens that are emitted."""

from typing import Any

import pytest
import torch
from families import greedy, perturbed, prompt_of, tiny

import triforce_tree

SMALL = {
    "levels": 3,
    "gamma": 4,
    "rounds": 2,
    "tree": "best-first:3,2,1",
    "budget": 24,
    "chunk": 4,
    "recent": 8,
    "sinks": 2,
    "window": 6,
    "prefill_chunk": 16,
}


@pytest.mark.parametrize("offload", [None, True])
def test_a_custom_policy_selects_the_chunks(offload: bool | None) -> None:
    selected: list[int] = []

    def oldest(
        q: torch.Tensor, means: torch.Tensor, limit: torch.Tensor, table: torch.Tensor, slots: int, *_: Any
    ) -> None:
        selected.append(slots)
        table[..., :slots] = torch.arange(slots, dtype=torch.int32)

    target = tiny("llama-gqa")
    prompt = prompt_of(120)
    expected = greedy(target, prompt, 20)
    rates = []
    for policy in (None, oldest):
        engine = triforce_tree.load(
            target, perturbed(target, 0.02), profile=False, select_chunks=policy, offload=offload, **SMALL
        )
        out = engine.generate(prompt, max_new_tokens=20, do_sample=False)
        assert out.sequences[0, len(prompt) :].tolist() == expected
        rates.append(out.levels[-1].acceptance_rate)
    assert selected
    assert rates[0] > rates[1], "the chunks of the highest scores are better than the oldest"


def test_a_policy_must_be_a_function() -> None:
    with pytest.raises(ValueError, match="select_chunks='best' must be a function"):
        triforce_tree.load(tiny("llama"), select_chunks="best")

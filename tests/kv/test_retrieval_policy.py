"""A custom retrieval policy changes what the retrieval model sees, and never the tokens that are emitted."""

from typing import Any

import pytest
import torch

import triforce_tree
from tests.support.models.families import SMALL_SETTINGS, greedy, perturbed, prompt_of, tiny
from triforce_tree.config import load_arguments
from triforce_tree.kernels import step

SMALL = {**SMALL_SETTINGS, "levels": 3, "gamma": 4}


@pytest.mark.parametrize("offload", [None, True])
def test_a_custom_policy_selects_the_chunks(offload: bool | None) -> None:
    selected: list[int] = []

    def oldest(
        q: torch.Tensor, means: torch.Tensor, limit: torch.Tensor, table: torch.Tensor, slots: int, *_: Any
    ) -> None:
        selected.append(slots)
        table[..., :slots] = torch.arange(slots, dtype=torch.int32)

    target = tiny("llama-gqa")
    prompt = prompt_of(160)
    expected = greedy(target, prompt, 20)
    # Of an offloaded cache a quarter of the slots is selected: three chunks.
    options = SMALL | {"budget": 48}
    rates = []
    for policy in (None, oldest):
        engine = triforce_tree.load(
            target,
            perturbed(target, 0.02),
            offload=offload,
            **load_arguments({**options, "select_chunks": policy}),
        )
        out = engine.generate(prompt, max_new_tokens=20, do_sample=False)
        assert out.sequences[0, len(prompt) :].tolist() == expected
        rates.append(out.levels[-1].acceptance_rate)
    assert selected
    assert rates[0] > rates[1], "the chunks of the highest scores are better than the oldest"


class ByItsKeys:
    """Selects by the mean keys, which it computes from all keys."""

    capturable = False
    needs_context = True

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.same: list[bool] = []

    def __call__(
        self,
        q: torch.Tensor,
        means: torch.Tensor,
        limit: torch.Tensor,
        table: torch.Tensor,
        slots: int,
        scale: float,
        *,
        layer: int,
        keys: torch.Tensor,
    ) -> None:
        self.layers.append(layer)
        chunk = keys.shape[2] // means.shape[2]
        own = keys.unflatten(2, (-1, chunk)).mean(3)
        expected = table.clone()
        step.select_chunks(q, means, limit, expected, slots, scale)
        step.select_chunks(q, own, limit, table, slots, scale)
        self.same.append(torch.equal(table, expected))


def test_a_policy_may_ask_for_the_layer_and_its_keys() -> None:
    target, prompt = tiny("llama-gqa"), prompt_of(120)
    draft, policy = perturbed(target, 0.02), ByItsKeys()
    engine = triforce_tree.load(target, draft, **load_arguments({**SMALL, "select_chunks": policy}))
    engine.generate(prompt, max_new_tokens=20, do_sample=False)
    assert set(policy.layers) == set(range(target.config.num_hidden_layers))
    # The first forwards measure costs, on keys of no text.
    assert all(policy.same[-16:])
    engine = triforce_tree.load(
        target, draft, offload=True, **load_arguments({**SMALL, "select_chunks": policy})
    )
    with pytest.raises(ValueError, match="needs all keys, which an offloaded cache has in host memory"):
        engine.generate(prompt, max_new_tokens=4, do_sample=False)


@pytest.mark.parametrize("offload", [None, True])
def test_variances_of_keys_enter_the_selection(offload: bool | None) -> None:
    columns: list[int] = []

    def recorded(q: torch.Tensor, means: torch.Tensor, *rest: Any) -> None:
        columns.append(means.shape[-1] // q.shape[-1])
        step.select_chunks(q, means, *rest)

    target, prompt = tiny("llama-gqa"), prompt_of(120)
    engine = triforce_tree.load(
        target,
        perturbed(target, 0.02),
        offload=offload,
        **load_arguments({**SMALL, "select_chunks": recorded, "key_variance": True}),
    )
    out = engine.generate(prompt, max_new_tokens=20, do_sample=False)
    assert out.sequences[0, len(prompt) :].tolist() == greedy(target, prompt, 20)
    assert set(columns) == {2}


def test_key_variance_is_a_bool() -> None:
    with pytest.raises(ValueError, match="key_variance=2 must be True or False"):
        triforce_tree.load(tiny("llama"), advanced={"key_variance": 2})


def test_a_policy_must_be_a_function() -> None:
    with pytest.raises(ValueError, match="select_chunks='best' must be a function"):
        triforce_tree.load(tiny("llama"), advanced={"select_chunks": "best"})

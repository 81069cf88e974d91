"""Every family's greedy output equals transformers' own, token for token, with one, two and three levels.

The caches are far smaller than the sequences: chunks are selected and dropped again, the draft's window and
sliding windows move. Drafts are perturbed copies of their targets, so that some proposals are accepted and
some rejected.
"""

from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

import triforce_tree
from tests.support.models.families import (
    FAMILIES,
    SMALL_SETTINGS,
    VOCABULARY,
    build,
    greedy,
    perturbed,
    prompt_of,
    tiny,
    without_tree,
)
from triforce_tree.config import HierarchyConfig, load_arguments
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.models.hf_model import HFModel
from triforce_tree.trees.ancestors import ancestor_mask

target_of = cache(tiny)


@cache
def expected(target: PreTrainedModel, prompt: tuple[int, ...], new_tokens: int) -> list[int]:
    return greedy(target, list(prompt), new_tokens)


def accepted_per_level(
    target: PreTrainedModel, draft: PreTrainedModel | None, prompt: list[int], new_tokens: int, **options
) -> list[int]:
    """Checks greedy equality; returns the accepted tokens of every level."""
    settings = SMALL_SETTINGS if draft else without_tree(SMALL_SETTINGS)
    engine = triforce_tree.load(target, draft, **load_arguments({**settings, **options}))
    out = engine.generate(prompt, max_new_tokens=new_tokens, do_sample=False)
    assert out.sequences[0, len(prompt) :].tolist() == expected(target, tuple(prompt), new_tokens)
    return [level.accepted for level in out.levels]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_equals_the_targets(family: str) -> None:
    target = target_of(family)
    draft = perturbed(target, 0.05)
    assert len(set(expected(target, tuple(prompt_of(37)), 32))) > 3, "an output that varies"
    accepted = accepted_per_level(target, draft, prompt_of(37), 32, levels=3)
    assert min(accepted[1:]) > 0
    accepted_per_level(target, draft, prompt_of(203), 12, levels=3, refresh=0)
    assert accepted_per_level(target, draft, prompt_of(37), 32, levels=2)[-1] > 0
    accepted_per_level(target, draft, prompt_of(2), 6, levels=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_forward_equals_a_forward_of_each_path(family: str) -> None:
    """One forward over a tree against separate forwards over each of its paths, twice in a row."""
    model = tiny(family)
    target = HFModel(model)
    program = DecodingProgram(target, None, HierarchyConfig(prefill_chunk=16), 1, 64, 1)
    tokens = prompt_of(37)
    parents = [-1, 0, 0, 1, 1, 2, 3, 3, 5, 6]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    view = program.full_view(len(parents), ancestor_mask(parents), depths)
    with target.active():
        program.prefill([tokens])
        for path in ([0, 1, 3, 7], [0, 2]):
            nodes = [tokens[-1], *prompt_of(9)]
            root = torch.tensor([len(tokens) - 1])
            view.begin(root)
            logits = program.full(torch.tensor([nodes]), root[:, None] + torch.tensor(depths), view)[0]
            expected = torch.stack([next_logits(model, tokens, nodes, parents, node) for node in range(10)])
            torch.testing.assert_close(logits, expected, atol=2e-5, rtol=2e-5)
            view.move(torch.tensor([path]))
            tokens = [*tokens, *(nodes[node] for node in path[1:]), 5]


@torch.no_grad()
def next_logits(
    model: PreTrainedModel, tokens: list[int], nodes: list[int], parents: list[int], node: int
) -> torch.Tensor:
    """``[V]``, by the model with eager attention and no cache."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    branch = []
    while node:
        branch.append(nodes[node])
        node = parents[node]
    path = [*tokens, *branch[::-1]]
    logits = model(torch.tensor([path]), use_cache=False).logits[0, -1]
    model.set_attn_implementation(before)
    return logits


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_models_attention_setting_is_unchanged(attention: str) -> None:
    target, draft = tiny("llama"), tiny("llama", seed=1)
    for model in (target, draft):
        model.set_attn_implementation(attention)
    target.train()
    engine = triforce_tree.load(target, draft, levels=3, **load_arguments(SMALL_SETTINGS))
    engine.generate(prompt_of(40), max_new_tokens=5)
    with pytest.raises(ValueError, match="empty"):
        engine.generate([])
    assert target.config._attn_implementation == draft.config._attn_implementation == attention
    assert target.training
    assert not draft.training


def gpt2() -> PreTrainedModel:
    return build(
        "GPT2Config",
        "GPT2LMHeadModel",
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=512,
    )


def test_models_with_learned_positions_work_as_target_and_as_draft() -> None:
    target = gpt2()
    accepted_per_level(target, tiny("llama"), prompt_of(70), 40, levels=3)
    assert accepted_per_level(target, perturbed(target, 0.05), prompt_of(70), 40, levels=2)[-1] > 0
    engine = triforce_tree.load(tiny("llama"), gpt2(), advanced={"window": 256})
    with pytest.raises(ValueError, match=r"512 learned positions, and its window needs 644; set window<=190"):
        engine.generate(prompt_of(70), max_new_tokens=4)


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_a_sequence_may_use_all_learned_positions(levels: int) -> None:
    """Tree nodes beyond the last position share it; their results are not needed."""
    target, prompt = gpt2(), prompt_of(500)
    accepted_per_level(target, perturbed(target, 0.05), prompt, 12, levels=levels)

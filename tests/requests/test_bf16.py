"""Greedy texts in 16 bits differ from the target's own at near ties only.

A forward over many positions and one over a single position differ there in the last bits.
"""

import pytest

import triforce_tree
from tests.support.distributions.wrong_acceptance import accept_all_proposals
from tests.support.models.families import perturbed, prompt_of, tiny
from triforce_tree import Engine
from triforce_tree.check import losslessness as check
from triforce_tree.config import load_arguments

SMALL = {"gamma": 4, "tree": "best-first:3,2", "budget": 24, "chunk": 4, "recent": 8, "sinks": 2, "window": 6}
NEW_TOKENS = 80


def engine_of(family: str) -> Engine:
    target = tiny(family)
    draft = perturbed(target, 0.05)
    return triforce_tree.load(target.bfloat16(), draft.bfloat16(), **load_arguments({**SMALL, "rounds": 1}))


@pytest.mark.parametrize("family", ["llama-gqa", "qwen3", "gemma2"])
@pytest.mark.parametrize("levels", [2, 3])
def test_texts_differ_at_near_ties_only(family: str, levels: int) -> None:
    result = check.greedy(engine_of(family), prompt_of(47), NEW_TOKENS, levels)
    assert result.compared == NEW_TOKENS
    assert result.failures == 0, f"a gap of {result.widest_gap}, noise {result.noise}"
    assert result.ties < NEW_TOKENS / 4
    assert result.noise < 1.0, "larger noise would count any difference as a tie"


def test_a_wrong_choice_is_no_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("llama-gqa")
    accept_all_proposals(monkeypatch)
    assert check.greedy(engine, prompt_of(47), NEW_TOKENS, levels=3).failures > 0


def test_sampled_texts_have_all_their_tokens() -> None:
    engine = engine_of("llama-gqa").with_options(levels=3)
    for seed in range(3):
        out = engine.generate(prompt_of(60), max_new_tokens=40, temperature=1.0, top_p=0.9, seed=seed)
        assert out.new_tokens == 40
        assert out.levels[-1].accepted > 0

"""Seeded draws, by chi-square over batches of equal prompts.

Random numbers are new for every draw, independent across a batch, and of the right distribution; what they
decide is enumerated in ``test_generation_distributions``.
"""

from collections import Counter

import pytest
import torch

from tests.support.distributions.enumeration import chi_square_p
from tests.support.distributions.sampled_cases import (
    BATCH,
    FAULTY,
    PLAIN,
    PROGRAMS,
    PROMPT,
    SMALL,
    SOUND,
    TOKENS,
    VOCABULARY,
    exact_distribution,
    prepared,
    sampled,
    stranger,
    target,
    with_warpers,
)
from tests.support.models.families import prompt_of
from tests.support.models.program_cases import decoded, program_of
from triforce_tree.verify.noise import Noise


@pytest.mark.parametrize("name", PROGRAMS)
def test_three_tokens_follow_the_targets_distribution(name: str) -> None:
    """The levels are unrelated models, since related ones would prove little."""
    chance, levels = sampled(name)
    assert chance > SOUND
    for level in levels[1:]:
        assert 0.2 < level.acceptance_rate < 0.8, level


@pytest.mark.parametrize("name", ["plain", "hierarchy, chain"])
def test_noise_that_is_drawn_once_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass has the same random numbers. The enumeration uses none, and cannot detect it."""
    draw, drawn = Noise.draw, set()

    def once(self: Noise, generator: torch.Generator) -> None:
        if id(self) not in drawn:
            drawn.add(id(self))
            draw(self, generator)

    monkeypatch.setattr(Noise, "draw", once)
    assert sampled(name)[0] < FAULTY


def test_a_budget_beyond_the_prompt_keeps_the_distribution() -> None:
    """Level 1 sees no KV slot twice, and none of the nodes that it judges; or the request is refused."""
    prompt = prompt_of(9, VOCABULARY)
    options = {**SMALL, "budget": 16, "tree": "chain:2", "runner_ups": False}
    refused = False
    try:
        program = program_of(target(), stranger(3), 3, BATCH, max_seq_len=64, **options)
        program.prefill([prompt] * BATCH)
        new, _ = decoded(program, [prompt] * BATCH, [TOKENS] * BATCH, with_warpers(PLAIN), again=True)
    except ValueError:
        refused = True
    assert refused or chi_square_p(Counter(map(tuple, new)), exact_distribution(PLAIN, tuple(prompt))) > SOUND


def test_a_runner_up_is_another_token_than_the_chains() -> None:
    program = prepared("hierarchy, runner-ups")
    program.prepare(with_warpers(PLAIN))
    program.rewind([PROMPT] * BATCH)
    generator = torch.Generator().manual_seed(0)
    for stage in ("draft", "retrieval_refresh", "draft", "retrieval"):
        program.run(stage, generator)
    state = program.state
    offsets = torch.arange(state.max_draft_tokens)
    chain = state.tokens.gather(1, state.length[:, None] + 1 + offsets)
    runner_ups, there = state.runner_ups[:, : state.max_draft_tokens], offsets < state.chain[:, None]
    assert (runner_ups != chain)[there].all()
    assert (runner_ups >= 0)[there].all(), "all five tokens are possible"
    assert state.chain.unique().numel() > 1

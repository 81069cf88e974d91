"""Seeded draws of the device cycle, by chi-square over batches of equal prompts.

That random numbers are fresh, independent across a batch, and of the right distribution; what is decided
by them is enumerated in ``test_generation_laws``.
"""

from collections import Counter

import pytest
import torch
from batched_ops import prefill_alike, share_windows, use_batched_ops
from cycle_cases import cycle_of, decoded
from cycle_law_cases import (
    BATCH,
    CYCLES,
    FAULTY,
    PLAIN,
    PROMPT,
    SMALL,
    SOUND,
    TOKENS,
    VOCABULARY,
    exact_law,
    prepared,
    sampled,
    stranger,
    target,
    token_law,
)
from enumeration import chi_square_p
from families import prompt_of

from triforce_tree.verify.noise import Noise


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Ops for large batches of equal prompts."""
    use_batched_ops(monkeypatch)
    share_windows(monkeypatch)
    return monkeypatch


@pytest.mark.parametrize("name", CYCLES)
@pytest.mark.usefixtures("many")
def test_three_tokens_follow_the_targets_law(name: str) -> None:
    """By levels that are strangers to each other: else it would prove little."""
    chance, levels = sampled(name)
    assert chance > SOUND
    for level in levels[1:]:
        assert 0.2 < level.acceptance_rate < 0.8, level


@pytest.mark.parametrize("name", ["plain", "hierarchy, chain"])
def test_noise_that_is_drawn_once_is_found_out(name: str, many: pytest.MonkeyPatch) -> None:
    """Random numbers that serve every pass: what the enumeration, which has none, cannot see."""
    draw, drawn = Noise.draw, set()

    def once(self: Noise, generator: torch.Generator) -> None:
        if id(self) not in drawn:
            drawn.add(id(self))
            draw(self, generator)

    many.setattr(Noise, "draw", once)
    assert sampled(name)[0] < FAULTY


@pytest.mark.usefixtures("many")
def test_a_budget_beyond_the_prompt_changes_no_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """What level 1 sees holds no row twice, and none of the nodes that it judges; or it is refused."""
    prompt = prompt_of(9, VOCABULARY)
    options = {**SMALL, "budget": 16, "tree": "chain:2", "runner_ups": False}
    refused = False
    try:
        cycle = cycle_of(target(), stranger(3), 3, BATCH, room=64, **options)
        prefill_alike(cycle, prompt, monkeypatch)
        texts, _ = decoded(cycle, [prompt] * BATCH, [TOKENS] * BATCH, token_law(PLAIN), again=True)
    except ValueError:
        refused = True
    assert refused or chi_square_p(Counter(map(tuple, texts)), exact_law(PLAIN, tuple(prompt))) > SOUND


@pytest.mark.usefixtures("many")
def test_a_runner_up_is_another_token_than_the_chains() -> None:
    cycle = prepared("hierarchy, runner-ups")
    cycle.prepare(token_law(PLAIN))
    cycle.rewind([PROMPT] * BATCH)
    generator = torch.Generator().manual_seed(0)
    for stage in ("grow", "choose", "grow", "middle"):
        cycle.run(stage, generator)
    texts = cycle.texts
    places = torch.arange(texts.reach)
    chain = texts.tokens.gather(1, texts.length[:, None] + 1 + places)
    runner_ups, there = texts.runner_ups[:, : texts.reach], places < texts.chain[:, None]
    assert (runner_ups != chain)[there].all()
    assert (runner_ups >= 0)[there].all(), "all five tokens are possible"
    assert texts.chain.unique().numel() > 1

"""Seeded draws, by chi-square: 1,000 copies of one prompt in a batch, whose first three tokens are counted.

Random numbers are new for every draw, independent across a batch, and of the right distribution; what they
decide is enumerated in ``test_generation_distributions``. Draft and target are unrelated models, since
related ones would prove little, and the retrieval cache holds a small part of the prompt.
"""

from collections import Counter
from functools import cache

import pytest
import torch

from tests.support.distributions.enumeration import chi_square_p
from tests.support.distributions.generation_distributions import stranger, target_distribution
from tests.support.models.families import prompt_of
from tests.support.models.program_cases import decoded, program_of
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.runtime.stats import LevelStats
from triforce_tree.verify.noise import Noise
from triforce_tree.verify.sampling import ProbsFromLogits

VOCABULARY, TOKENS, BATCH = 5, 3, 1000
PROMPT = prompt_of(41, VOCABULARY)
SOUND, FAULTY = 1e-4, 1e-6
SAMPLED = ProbsFromLogits.at(1.0)
# levels, options
PROGRAMS: dict[str, tuple[int, dict[str, object]]] = {
    "plain": (1, {}),
    "best-first": (2, {"tree": "best-first:3,2"}),
    "hierarchy, runner-ups": (3, {"tree": "best-first:3,2", "runner_ups": True}),
    "hierarchy, chain": (3, {"tree": "chain:1", "runner_ups": True}),
}
SMALL = {"gamma": 3, "rounds": 2, "budget": 8, "chunk": 2, "recent": 4, "sinks": 1, "window": 8}


def made(levels: int, prompt: list[int], **options: object) -> DecodingProgram:
    """Returns a program that holds the prompt's keys and values in every sequence of its batch."""
    models = stranger(VOCABULARY, 0), stranger(VOCABULARY, 3)
    program = program_of(*models, levels, BATCH, max_seq_len=64, **{**SMALL, **options})
    program.prefill([prompt] * BATCH)
    return program


@cache
def prepared(name: str) -> DecodingProgram:
    levels, options = PROGRAMS[name]
    return made(levels, PROMPT, **options)


def chance_of(program: DecodingProgram, prompt: list[int]) -> tuple[float, list[LevelStats]]:
    """Returns the p-value of the new tokens, 0 if some have probability 0; and statistics."""
    new, loop = decoded(program, [prompt] * BATCH, [TOKENS] * BATCH, SAMPLED, again=True)
    counts = Counter(map(tuple, new))
    exact = target_distribution(stranger(VOCABULARY, 0), SAMPLED, prompt, TOKENS)
    return 0.0 if counts.keys() - exact.keys() else chi_square_p(counts, exact), loop.levels


@pytest.mark.parametrize("name", PROGRAMS)
def test_three_tokens_follow_the_targets_distribution(name: str) -> None:
    chance, levels = chance_of(prepared(name), PROMPT)
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
    assert chance_of(prepared(name), PROMPT)[0] < FAULTY


def test_a_budget_beyond_the_prompt_keeps_the_distribution() -> None:
    """Level 1 sees no KV slot twice, and none of the nodes that it judges."""
    prompt = prompt_of(9, VOCABULARY)
    program = made(3, prompt, budget=16, tree="chain:2", runner_ups=False)
    assert chance_of(program, prompt)[0] > SOUND


def test_a_runner_up_is_another_token_than_the_chains() -> None:
    program = prepared("hierarchy, runner-ups")
    program.prepare(SAMPLED)
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

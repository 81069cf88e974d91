"""Batches of equal prompts through a decoding program, and how far their tokens are from the target's probs.

1,000 copies of one prompt are decoded in one batch with independent draws. The joint distribution of their
first three tokens is compared with the target's, computed from plain forwards. Draft and target are
unrelated, and the retrieval cache holds a small part of the prompt.
"""

from collections import Counter
from functools import cache

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
)

from tests.support.distributions.enumeration import chi_square_p
from tests.support.models.families import prompt_of, tiny
from tests.support.models.program_cases import decoded, program_of
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.runtime.stats import LevelStats
from triforce_tree.verify.sampling import ProbsFromLogits

VOCABULARY, TOKENS, BATCH = 5, 3, 1000
PROMPT = prompt_of(41, VOCABULARY)
SOUND, FAULTY = 1e-4, 1e-6

Warpers = tuple[object, ...]
PLAIN: Warpers = (TemperatureLogitsWarper(1.0),)
# levels, options
PROGRAMS: dict[str, tuple[int, dict[str, object]]] = {
    "plain": (1, {}),
    "best-first": (2, {"tree": "best-first:3,2"}),
    "hierarchy, runner-ups": (3, {"tree": "best-first:3,2", "runner_ups": True}),
    "hierarchy, chain": (3, {"tree": "chain:1", "runner_ups": True}),
}
SMALL = {"gamma": 3, "rounds": 2, "budget": 8, "chunk": 2, "recent": 4, "sinks": 1, "window": 8}


@cache
def target() -> PreTrainedModel:
    return stranger(seed=0)


@cache
def stranger(seed: int) -> PreTrainedModel:
    return tiny(
        "llama",
        seed,
        vocab_size=VOCABULARY,
        num_hidden_layers=1,
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.5,
    )


def with_warpers(warpers: Warpers) -> ProbsFromLogits:
    return ProbsFromLogits(LogitsProcessorList(warpers))


@cache
def prepared(name: str) -> DecodingProgram:
    """Returns a program that holds the prompt's keys and values, for all tests of its kind."""
    levels, options = PROGRAMS[name]
    program = program_of(target(), stranger(3), levels, BATCH, max_seq_len=64, **{**SMALL, **options})
    program.prefill([PROMPT] * BATCH)
    return program


@cache
@torch.no_grad()
def _logits(prompt: tuple[int, ...]) -> list[Tensor]:
    """Returns ``[V^n, V]`` for n = 0, 1, 2 tokens after the prompt."""
    result = []
    for n in range(TOKENS):
        more = torch.cartesian_prod(*[torch.arange(VOCABULARY)] * n).view(-1, n) if n else torch.empty(1, 0)
        sequences = torch.cat([torch.tensor(prompt).expand(VOCABULARY**n, -1), more.long()], 1)
        result.append(target()(sequences, use_cache=False).logits[:, -1])
    return result


def exact_distribution(
    warpers: Warpers, prompt: tuple[int, ...] = tuple(PROMPT)
) -> dict[tuple[int, ...], float]:
    """Returns the target's joint distribution of the next ``TOKENS`` tokens."""
    to_probs = with_warpers(warpers)
    joint = torch.ones(1, dtype=torch.float64)
    for logits in _logits(prompt):
        joint = (joint[:, None] * to_probs.scores(logits, list).double().softmax(-1)).flatten()
    continuations = torch.cartesian_prod(*[torch.arange(VOCABULARY)] * TOKENS).tolist()
    return {
        tuple(tokens): chance for tokens, chance in zip(continuations, joint.tolist(), strict=True) if chance
    }


def sampled(name: str, warpers: Warpers = PLAIN, seed: int = 0) -> tuple[float, list[LevelStats]]:
    """Returns the p-value of one batch's first ``TOKENS`` tokens, 0 if one has probability 0; statistics."""
    program = prepared(name)
    sequences, decoder = decoded(
        program, [PROMPT] * BATCH, [TOKENS] * BATCH, with_warpers(warpers), seed, again=True
    )
    counts = Counter(tuple(sequence) for sequence in sequences)
    exact = exact_distribution(warpers)
    return 0.0 if counts.keys() - exact.keys() else chi_square_p(counts, exact), decoder.levels

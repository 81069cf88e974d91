"""Small decoding programs, and three prompts whose greedy continuations are known."""

from collections.abc import Sequence as Sequences
from functools import cache

import torch
from transformers import PreTrainedModel

from tests.support.models.families import greedy, perturbed, prompt_of, tiny
from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.sequence import Ending, Sequence
from triforce_tree.drafters.draft_level import DraftLevel
from triforce_tree.models.hf_model import HFModel
from triforce_tree.verify.sampling import ProbsFromLogits

GREEDY = ProbsFromLogits(greedy=True)
SAMPLED = ProbsFromLogits.at(0.8)
SMALL = {
    "gamma": 4,
    "tree": "best-first:3,2,1",
    "runner_ups": True,
    "rounds": 2,
    "budget": 24,
    "chunk": 4,
    "recent": 8,
    "sinks": 2,
    "window": 6,
    "prefill_chunk": 16,
}
PROMPTS = [prompt_of(length) for length in (61, 43, 90)]
NEW = [22, 17, 12]
# Caches that hold all of up to 127 tokens: chunk 0, one more chunk and the recent window; the draft's too.
EVERYTHING = {"budget": 96, "chunk": 32, "recent": 32, "window": 200}
COVERED = [prompt_of(length) for length in (98, 101, 100)]

model = cache(tiny)


def program_of(
    target: PreTrainedModel,
    draft: PreTrainedModel | None,
    levels: int,
    batch: int = 1,
    max_seq_len: int = 150,
    **options: object,
) -> DecodingProgram:
    """A program whose caches are far smaller than its sequences."""
    config = HierarchyConfig.from_options(**{**SMALL, **options})
    wrapped = HFModel(target)
    drafter = None
    if draft is not None and levels > 1:
        drafter = DraftLevel(wrapped, HFModel(draft), None).drafter(config)
    return DecodingProgram(wrapped, drafter, config, batch, max_seq_len, levels)


def decoded(
    program: DecodingProgram,
    prompts: Sequences[Sequences[int]],
    endings: Sequences[Ending | int],
    to_probs: ProbsFromLogits = GREEDY,
    seed: int = 0,
    again: bool = False,
) -> tuple[list[list[int]], DecodingLoop]:
    """Every sequence's new tokens, and the loop; ``again``: the prompts are in the cache already."""
    loop = DecodingLoop.over(program, to_probs, seed)
    return finished(loop, prompts, endings, again), loop


def sequences_of(prompts: Sequences[Sequences[int]], endings: Sequences[Ending | int]) -> list[Sequence]:
    """Sequences with these stop criteria; a number is the most new tokens."""
    ends = [Ending(ending) if isinstance(ending, int) else ending for ending in endings]
    return [Sequence(list(prompt), ending) for prompt, ending in zip(prompts, ends, strict=True)]


def finished(
    loop: DecodingLoop,
    prompts: Sequences[Sequences[int]],
    endings: Sequences[Ending | int],
    again: bool = False,
) -> list[list[int]]:
    """Returns the new tokens of each prompt; ``again``: the prompts are in the cache already."""
    sequences = sequences_of(prompts, endings)
    loop.begin(sequences, cached=again)
    for fresh in loop.decode():
        assert all(new for _, new in fresh)
    return [sequence.new for sequence in sequences]


@cache
def draft_of(family: str) -> PreTrainedModel:
    return perturbed(model(family), 0.05)


@cache
def _reference(target: PreTrainedModel, prompt: tuple[int, ...], new_tokens: int) -> list[int]:
    return greedy(target, list(prompt), new_tokens, attention_mask=torch.ones(1, len(prompt)))


def reference(target: PreTrainedModel, prompt: list[int], new_tokens: int) -> list[int]:
    return _reference(target, tuple(prompt), new_tokens)


def references(family: str = "llama-gqa", new: list[int] = NEW) -> list[list[int]]:
    return [reference(model(family), p, n) for p, n in zip(PROMPTS, new, strict=True)]


def exact(
    levels: int, family: str = "llama-gqa", draft: PreTrainedModel | None = None, **options: object
) -> DecodingLoop:
    """Checks greedy equality of the batch; returns the loop, for its statistics."""
    program = program_of(model(family), draft or draft_of(family), levels, len(PROMPTS), **options)
    new, loop = decoded(program, PROMPTS, NEW)
    assert new == references(family)
    assert [row and row.finish_reason for row in loop.sequences] == ["length"] * len(PROMPTS)
    # Without fixed rounds the policy may correctly fall back to autoregressive decoding.
    for level in loop.levels[1:] if program.config.rounds is not None else ():
        assert 0 < level.accepted < level.proposed, level
    return loop

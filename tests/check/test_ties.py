"""Ties are judged by scores after the logits processors of the generation."""

from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import RepetitionPenaltyLogitsProcessor

import triforce_tree
from tests.support.models.families import prompt_of, tiny
from triforce_tree import Engine
from triforce_tree.check import losslessness as check
from triforce_tree.check.compare import judged
from triforce_tree.check.own_forward import greedy_scores, last_logits
from triforce_tree.check.ties import first_difference, forward_noise

PROMPT = prompt_of(60)
NEW = 8


def engine_of(**settings: Any) -> Engine:
    model = tiny("llama-gqa").to(torch.bfloat16)
    model.generation_config.update(**settings)
    return triforce_tree.load(model, levels=1)


def chosen(engine: Engine) -> tuple[int, int, int]:
    """The first token of the greedy text; a token of the prompt; and one that is not in it."""
    out = engine.generate(PROMPT, max_new_tokens=1, do_sample=False)
    first = int(out.sequences[0, -1])
    others = [token for token in range(engine.target.vocab_size) if token != first]
    return first, next(t for t in others if t in PROMPT), next(t for t in others if t not in PROMPT)


def with_logit(engine: Engine, token: int, like: int, factor: float) -> None:
    """Lets a token's logits be those of another one, times a power of two, which rounds nothing."""
    weight: Any = engine.target.model.lm_head.weight
    with torch.no_grad():
        weight[token] = factor * weight[like]


def test_equal_logits_of_which_one_is_penalised_are_no_tie() -> None:
    engine = engine_of(repetition_penalty=2.0)
    first, repeated, _ = chosen(engine)
    assert first not in PROMPT
    with_logit(engine, repeated, like=first, factor=1.0)
    raw = last_logits(engine, PROMPT)
    assert raw[first] == raw[repeated] > 0
    found = first_difference(engine, PROMPT, [repeated] * NEW, [first] * NEW)
    assert found is not None
    assert not found.tie
    assert found.gap == pytest.approx(float(raw[first]) / 2)
    engine.target.model.generation_config.repetition_penalty = None
    found = first_difference(engine, PROMPT, [repeated] * NEW, [first] * NEW)
    assert found is not None
    assert found.tie


def test_logits_far_apart_that_a_penalty_makes_equal_are_a_tie() -> None:
    engine = engine_of()
    first, repeated, _ = chosen(engine)
    with_logit(engine, repeated, like=first, factor=2.0)
    asked = {"repetition_penalty": 2.0}
    found = first_difference(
        engine, PROMPT, [repeated] * NEW, [first] * NEW, greedy_scores(engine, PROMPT, NEW, **asked)
    )
    assert found is not None
    assert found.tie
    assert found.gap == 0
    own = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(2.0)])
    to_scores = greedy_scores(engine, PROMPT, NEW, logits_processor=own)
    assert judged(engine, PROMPT, [repeated] * NEW, [first] * NEW, to_scores) == found
    plain = first_difference(engine, PROMPT, [repeated] * NEW, [first] * NEW)
    assert plain is not None
    assert not plain.tie


def test_noise_is_that_of_scores() -> None:
    engine = engine_of()
    plain = forward_noise(engine, PROMPT, greedy_scores(engine, PROMPT, NEW))
    every = list(range(engine.target.vocab_size))
    # All tokens stand in the text, so that each logit is multiplied or divided by the penalty.
    text = [*every, *PROMPT]
    ratio = [
        forward_noise(engine, text, greedy_scores(engine, text, NEW, repetition_penalty=penalty))
        for penalty in (1.0, 0.25)
    ]
    assert 0 < plain < 1
    assert ratio[1] > 2 * ratio[0] > 0


def test_forbidden_tokens_are_no_noise_and_no_tie() -> None:
    engine = engine_of()
    first, _, other = chosen(engine)
    with_logit(engine, other, like=first, factor=1.0)
    to_scores = greedy_scores(engine, PROMPT, NEW, bad_words_ids=[[other]])
    found = first_difference(engine, PROMPT, [other] * NEW, [first] * NEW, to_scores)
    assert found is not None
    assert found.gap == float("inf")
    assert 0 < found.noise < 1
    assert not found.tie


def test_greedy_check_under_a_penalty_of_the_checkpoint() -> None:
    engine = engine_of(repetition_penalty=1.3, no_repeat_ngram_size=3)
    result = check.greedy(engine, PROMPT, 30, 2)
    assert result.compared == 30
    assert result.failures == 0
    assert result.noise < 1

"""Logits processors that read the tokens so far: the output is that of ``model.generate`` with them."""

from functools import cache, partial
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

import triforce_tree
from tests.support.distributions.enumeration import NOISE
from tests.support.distributions.generation_cases import Case
from tests.support.models.families import perturbed, prompt_of, tiny
from tests.support.models.own_drafters import FixedSiblings
from triforce_tree import Engine
from triforce_tree.config import load_arguments
from triforce_tree.drafters.suffix_matching import SuffixMatching

NEW, VOCABULARY = 16, 40
TARGET = tiny("llama-gqa", vocab_size=VOCABULARY)
SMALL = {"gamma": 3, "tree": "best-first:3,2", "budget": 24, "chunk": 4, "recent": 8, "sinks": 2, "window": 6}


class EvenAfterOdd(LogitsProcessor):
    """A user's own: an even token may not follow an even one, and long texts prefer low tokens."""

    keeps_state = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        places = torch.arange(scores.shape[1])
        even = (input_ids[:, -1:] % 2 == 0) & (places % 2 == 0)
        return (scores - 0.02 * input_ids.shape[1] * places).masked_fill(even, -torch.inf)


class Drift(LogitsProcessor):
    """Scores that depend on the length, and on the two newest tokens in their order."""

    keeps_state = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        turned = scores.roll(input_ids.shape[1], -1)
        return turned + (2 * input_ids[:, -1:] + input_ids[:, -2:-1]) % 3 * torch.arange(scores.shape[1])


class EvenAfterOddAtTemperature(TemperatureLogitsWarper):
    """A user's own by inheritance: its base alone would not read the text."""

    keeps_state = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return EvenAfterOdd()(input_ids, super().__call__(input_ids, scores))


class TopKByLength(TopKLogitsWarper):
    """A user's own by inheritance: texts of an odd length are drawn without their most probable token."""

    keeps_state = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        best = scores.argmax(-1, keepdim=True)
        odd = scores.scatter(1, best, -torch.inf)
        return super().__call__(input_ids, odd if input_ids.shape[1] % 2 else scores)


def two_of_three(row: int, sent: torch.Tensor) -> list[int]:
    """Allowed tokens depend on the newest one and on the length."""
    return [t for t in range(VOCABULARY) if (t + int(sent[-1]) + len(sent)) % 3]


two_of_three.keeps_state = False

OPTIONS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": list(range(0, VOCABULARY, 2))},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": two_of_three},
    "own": {"logits_processor": LogitsProcessorList([EvenAfterOdd()])},
    "derived from a temperature": {"logits_processor": LogitsProcessorList([EvenAfterOddAtTemperature(0.7)])},
    "derived from top-k": {"logits_processor": LogitsProcessorList([TopKByLength(5)])},
    "several": {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "logits_processor": LogitsProcessorList([EvenAfterOdd()]),
    },
}


@cache
def engine(levels: int, draft: str) -> Engine:
    if draft == "draft":
        return triforce_tree.load(TARGET, perturbed(TARGET, 0.1), levels=levels, **load_arguments(SMALL))
    options = {name: value for name, value in SMALL.items() if name != "tree"}
    if draft == "own":
        own = FixedSiblings("static:0;1;0.0", VOCABULARY)
        return triforce_tree.load(TARGET, drafter=own, levels=levels, **load_arguments(options))
    return triforce_tree.load(TARGET, drafter="lookup", levels=levels, **load_arguments(options))


@cache
def named(name: str, length: int) -> list[int]:
    """transformers' text after ``prompt_of(length)``, with the options of that name."""
    return expected(prompt_of(length, VOCABULARY), **OPTIONS[name])


def expected(prompt: list[int], **options: Any) -> list[int]:
    out = TARGET.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False, max_new_tokens=NEW, **{"pad_token_id": 0, **options},
    )  # fmt: skip
    return out[0].tolist()


HIERARCHIES = [(1, "alone"), *((levels, draft) for levels in (2, 3) for draft in ("draft", "lookup", "own"))]
hierarchies = pytest.mark.parametrize(("levels", "draft"), HIERARCHIES)


@hierarchies
@pytest.mark.parametrize("name", OPTIONS)
def test_greedy_text_is_that_of_transformers(name: str, levels: int, draft: str) -> None:
    options, prompt = OPTIONS[name], prompt_of(41, VOCABULARY)
    made = engine(levels, draft).generate(prompt, do_sample=False, max_new_tokens=NEW, **options)
    assert made.sequences[0].tolist() == named(name, 41)


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_changes_the_text(name: str) -> None:
    ends = OPTIONS[name].get("eos_token_id")
    assert named(name, 41) != expected(prompt_of(41, VOCABULARY), eos_token_id=ends)


# Around the 2 sinks, the n-grams of 3, the chunks of 4 and the 8 recent tokens.
@hierarchies
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 9])
def test_short_prompts(length: int, levels: int, draft: str) -> None:
    prompt, options = prompt_of(length, VOCABULARY), OPTIONS["several"]
    made = engine(levels, draft).generate(prompt, do_sample=False, max_new_tokens=NEW, **options)
    assert made.sequences[0].tolist() == named("several", length)


@hierarchies
@pytest.mark.parametrize("name", ["several", "prefix_allowed_tokens_fn"])
def test_sequences_of_a_batch_are_those_alone(name: str, levels: int, draft: str) -> None:
    options, prompts = OPTIONS[name], [prompt_of(length, VOCABULARY) for length in (30, 30, 30)]
    prompts[1][0] += 1
    prompts[2] = prompts[2][::-1]
    made = engine(levels, draft).generate(prompts, do_sample=False, max_new_tokens=NEW, **options)
    assert made.sequences.tolist() == [expected(prompt, **options) for prompt in prompts]


# Trees of a draft model, of prompt lookup, and through level 1.
BOUND = (RepetitionPenaltyLogitsProcessor(1.8), Drift())
SAMPLED = {
    "plain": Case(1, 3, 3, processors=BOUND),
    "chain": Case(2, 3, 2, None, {"tree": "chain:2", "runner_ups": False}, BOUND),
    "live tree": Case(2, 3, 2, 1, {"tree": "best-first:2,1", "runner_ups": False}, BOUND),
    "lookup": Case(2, 3, 3, None, {}, BOUND, drafter=partial(SuffixMatching, 2)),
    "runner-ups": Case(3, 3, 2, 1, {"tree": "chain:1", "runner_ups": True}, BOUND),
    "own": Case(3, 3, 2, 1, {"runner_ups": False}, BOUND, drafter=partial(FixedSiblings, "static:0;1", 3)),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_text_follows_the_processed_distribution(name: str) -> None:
    """Every draw enumerated."""
    case = SAMPLED[name]
    assert case.distance(case.generations(batch=1)) < NOISE


@hierarchies
def test_a_grammar_is_not_asked_about_what_it_forbids(levels: int, draft: str) -> None:
    """Proposals may break a grammar; its function must not be called with a text that does."""
    prompt = prompt_of(41, VOCABULARY)

    def allowed(row: int, sent: torch.Tensor) -> list[int]:
        new = sent.tolist()[len(prompt) :]
        assert all(token in (n + 1, n + 2) for n, token in enumerate(new)), new
        return [len(new) + 1, len(new) + 2]

    allowed.keeps_state = False
    options = {"prefix_allowed_tokens_fn": allowed}
    made = engine(levels, draft).generate(prompt, do_sample=False, max_new_tokens=NEW, **options)
    assert made.sequences[0].tolist() == expected(prompt, **options)
    drawn = engine(levels, draft).generate(prompt, do_sample=True, max_new_tokens=NEW, seed=0, **options)
    assert drawn.new_tokens == NEW

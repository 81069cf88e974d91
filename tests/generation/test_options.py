"""Options of ``generate`` act as in transformers, and those that we do not carry out are refused by name."""

import itertools

import pytest
import torch
from api_cases import EXPECTED, PROMPT, TARGET, new, ours, small_engine, text_of
from families import greedy
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
)

from triforce_tree import Engine


@pytest.fixture(scope="module")
def engine() -> Engine:
    return small_engine()


def test_end_tokens(engine: Engine) -> None:
    stop = EXPECTED[11]
    cut = EXPECTED[: EXPECTED.index(stop) + 1]
    for eos in (stop, [stop, 999_999]):
        out = engine.generate(PROMPT, max_new_tokens=40, do_sample=False, eos_token_id=eos)
        assert new(out) == cut
        assert out.finish_reason == "eos"
    least = len(cut) + 2
    kwargs = {"eos_token_id": stop, "min_new_tokens": least}
    assert ours(engine, max_new_tokens=40, do_sample=False, **kwargs) == greedy(TARGET, PROMPT, 40, **kwargs)


def test_a_users_own_length_and_eos_criteria_replace_those_of_transformers(engine: Engine) -> None:
    stop = EXPECTED[11]
    own = StoppingCriteriaList([EosTokenCriteria(stop), MaxLengthCriteria(len(PROMPT) + 30)])
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": EXPECTED[0]}
    out = engine.generate(PROMPT, stopping_criteria=own, **options)
    expected = TARGET.generate(torch.tensor([PROMPT]), stopping_criteria=own, **options)
    assert out.sequences.tolist() == expected.tolist()
    assert new(out) == EXPECTED[: EXPECTED.index(stop) + 1]
    assert out.finish_reason == "eos"


def test_stop_strings_cut_at_the_token_that_completes_them(engine: Engine) -> None:
    wanted = text_of(EXPECTED[7:9])
    pairs = list(itertools.pairwise(EXPECTED))
    cut = EXPECTED[: pairs.index((EXPECTED[7], EXPECTED[8])) + 2]
    for kwargs in (
        {"stop_strings": [wanted]},
        {"generation_config": GenerationConfig(stop_strings=[wanted])},
        {"stop_strings": wanted, "generation_config": {"stop_strings": ["never"]}},
    ):
        out = engine.generate(PROMPT, max_new_tokens=40, do_sample=False, **kwargs)
        assert new(out) == cut
        assert out.finish_reason == "stop"


class AfterTokens(StoppingCriteria):
    """Ends a text of ``length`` tokens; fails if it is not asked at every length."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.asked: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores, **kwargs) -> torch.Tensor:
        self.asked.append(input_ids.shape[1])
        return torch.tensor([input_ids.shape[1] >= self.length])


def test_stopping_criteria_see_every_length(engine: Engine) -> None:
    criterion = AfterTokens(len(PROMPT) + 6)
    out = engine.generate(
        PROMPT,
        max_new_tokens=40,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([criterion]),
    )
    assert new(out) == EXPECTED[:6]
    assert criterion.asked == list(range(len(PROMPT) + 1, len(PROMPT) + 7))


GREEDY_OPTIONS = [
    {"repetition_penalty": 1.7},
    {"no_repeat_ngram_size": 2},
    {"suppress_tokens": EXPECTED[:3]},
    {"bad_words_ids": [[EXPECTED[0]], EXPECTED[2:4]]},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 5},
    {"max_length": len(PROMPT) + 8, "max_new_tokens": None},
]


@pytest.mark.parametrize("options", GREEDY_OPTIONS, ids=lambda options: "+".join(options))
def test_options_act_as_in_transformers(engine: Engine, options: dict) -> None:
    options = {"max_new_tokens": 25, **options}
    expected = TARGET.generate(torch.tensor([PROMPT]), do_sample=False, **options)[0, len(PROMPT) :].tolist()
    assert ours(engine, do_sample=False, **options) == expected
    assert expected != EXPECTED[: len(expected)] or "max_length" in options, "the option does something"


def test_a_generation_config_and_keywords_over_it(engine: Engine) -> None:
    config = GenerationConfig(max_new_tokens=7, do_sample=False, repetition_penalty=1.7)
    expected = greedy(TARGET, PROMPT, 9, repetition_penalty=1.7)
    assert ours(engine, generation_config=config) == expected[:7]
    assert ours(engine, generation_config=config, max_new_tokens=9) == expected
    assert config.max_new_tokens == 7, "the user's object is left alone"


def test_own_logits_processors(engine: Engine) -> None:
    banned = SuppressTokensLogitsProcessor(EXPECTED[:2], device="cpu")
    out = ours(engine, max_new_tokens=20, do_sample=False, logits_processor=LogitsProcessorList([banned]))
    assert out == greedy(TARGET, PROMPT, 20, suppress_tokens=EXPECTED[:2])


def test_same_seed_same_tokens(engine: Engine) -> None:
    sample = {"max_new_tokens": 20, "do_sample": True, "temperature": 2.0}
    assert ours(engine, seed=5, **sample) == ours(engine, seed=5, **sample) != ours(engine, seed=6, **sample)


def test_without_a_seed_torchs_own_decides(engine: Engine) -> None:
    # A draft length chosen by the clock would change which draws are made.
    steady = engine.with_options(rounds=1)

    def after(seed: int) -> list[int]:
        torch.manual_seed(seed)
        return ours(steady, max_new_tokens=20, do_sample=True, temperature=2.0)

    assert after(1) == after(1) != after(2)
    torch.manual_seed(1)
    first, second = (ours(engine, max_new_tokens=20, temperature=2.0) for _ in range(2))
    assert first != second, "every call has new draws"


def test_temperature_decides_whether_to_sample(engine: Engine) -> None:
    assert ours(engine, temperature=0, max_new_tokens=10) == EXPECTED[:10]
    assert ours(engine, temperature=0.0, max_new_tokens=10) == EXPECTED[:10]
    assert ours(engine, temperature=3.0, seed=1, max_new_tokens=10) != EXPECTED[:10]
    assert ours(engine, temperature=1e-4, top_k=0, seed=1, max_new_tokens=10) == EXPECTED[:10]


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}])
def test_a_distribution_of_one_token_is_greedy(engine: Engine, narrow: dict) -> None:
    assert ours(engine, do_sample=True, seed=3, max_new_tokens=15, **narrow) == EXPECTED[:15]


UNSUPPORTED = {
    "output_attentions": True,
    "penalty_alpha": 0.6,
    "guidance_scale": 2.0,
    "prompt_lookup_num_tokens": 4,
    "cache_implementation": "static",
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_options_are_refused_by_name(engine: Engine, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        engine.generate(PROMPT, max_new_tokens=3, **{name: UNSUPPORTED[name]})

"""Options of ``generate`` act as in transformers, and those that we do not carry out are refused by name."""

import itertools
from typing import Any

import pytest
import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from tests.support.models.api_cases import EXPECTED, PROMPT, TARGET, new, ours, small_engine, text_of
from tests.support.models.families import greedy
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


def test_without_a_seed_torchs_own_decides(engine: Engine) -> None:
    # A draft length chosen by the clock would change which draws are made.
    steady = engine.with_options(advanced={"rounds": 1})

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


INF, NAN = float("inf"), float("nan")
OUT_OF_RANGE: list[tuple[str, list[Any], str]] = [
    ("temperature", [1e300, 4e38, 10**400], "is above 1e+38"),
    ("temperature", [NAN, INF, -1, 1e-31], "means greedy"),
    ("top_p", [NAN, INF, 1.5, -0.1], "1 keeps all tokens"),
    ("top_k", [-1, -(10**30)], "0 keeps all tokens"),
    ("min_p", [NAN, 1.5, -0.1], "0 keeps all tokens"),
    ("typical_p", [NAN, INF, 0, -1, 1.5], "1 keeps all tokens"),
    ("top_h", [NAN, 0, 1.5], "leave it out"),
    ("epsilon_cutoff", [NAN, INF, -1, 1, 1e300], "0 keeps all tokens"),
    ("eta_cutoff", [NAN, INF, -1, 1, 1e300], "0 keeps all tokens"),
    ("repetition_penalty", [NAN, INF, 0, -1, 1e-300, 1e300], "1 changes nothing"),
    ("max_time", [NAN, -1], "leave it out"),
    ("max_new_tokens", [-1, 10**30], ""),
    ("min_new_tokens", [-1], "leave it out"),
    ("eos_token_id", [NAN, 1.5, 10**30, [10**30]], "integers of 64 bits"),
    ("pad_token_id", [NAN, 10**30, [3]], "token id"),
    ("suppress_tokens", [[10**30], [1.5]], "integers of 64 bits"),
    ("forced_eos_token_id", [64], "give a token id below 64"),
    ("sequence_bias", [[[[5], NAN]], [[[5], INF]], {(5,): 1e300}], "-inf forbids it"),
    ("exponential_decay_length_penalty", [(3, NAN), (3, INF), (3,), "x", (3, -1.0)], "the factor"),
    ("seed", [2**70, -(2**63) - 1, 1.5, NAN, True], "give one from"),
    ("num_return_sequences", [10**30, 0], "at least 1"),
    ("num_beams", [10**30, -1], "at least 1"),
]


@pytest.mark.parametrize(
    ("name", "values", "remedy"), OUT_OF_RANGE, ids=[f"{case[0]}-{case[2][:12]}" for case in OUT_OF_RANGE]
)
def test_values_out_of_range_are_refused_at_once(
    engine: Engine, name: str, values: list[Any], remedy: str
) -> None:
    def fail(tokens: int) -> None:
        raise AssertionError("the prompt was read")

    for value in values:
        asked = {"max_new_tokens": 3, "do_sample": True, "progress": fail, name: value}
        if name == "temperature":
            del asked["do_sample"]
        with pytest.raises(ValueError, match="new" if name == "max_new_tokens" else name) as caught:
            engine.generate(PROMPT, **asked)
        said = str(caught.value)
        assert remedy in said, said
        assert "weights" not in said
        assert len(said) < 250
        if name in ("temperature", "repetition_penalty", "top_p"):
            with pytest.raises(ValueError, match=name):
                engine.generate(PROMPT, generation_config={"do_sample": True, name: value})


def test_penalties_of_beams_out_of_range(engine: Engine) -> None:
    for value in (NAN, INF, 1e300):
        with pytest.raises(ValueError, match=r"length_penalty=.* must lie in .-50, 50."):
            engine.generate(PROMPT, num_beams=2, length_penalty=value, max_new_tokens=3)


def test_the_ends_of_ranges_are_allowed(engine: Engine) -> None:
    for options in (
        {"temperature": 1e38}, {"temperature": 1e-30}, {"repetition_penalty": 1e30}, {"top_p": 1.0},
        {"repetition_penalty": 1e-30}, {"top_k": 10**30}, {"epsilon_cutoff": 0.0}, {"typical_p": 1.0},
        {"sequence_bias": [[[5], -INF]]}, {"seed": 2**64 - 1}, {"eos_token_id": -1}, {"min_p": 1.0},
    ):  # fmt: skip
        assert engine.generate(PROMPT, max_new_tokens=2, **{"do_sample": True, **options}).new_tokens == 2


def test_nan_of_a_processor_is_not_blamed_on_the_model(engine: Engine) -> None:
    class Broken(LogitsProcessor):
        keeps_state = False

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores * NAN

    with pytest.raises(ValueError, match=r"logits processor \(Broken\)"):
        engine.generate(PROMPT, max_new_tokens=3, do_sample=False, logits_processor=[Broken()])

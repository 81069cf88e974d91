"""One program for many prompts, kinds of sampling and seeds: no request affects a later one."""

import pytest
from transformers import (
    LogitsProcessorList,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TypicalLogitsWarper,
)

from tests.support.models.families import prompt_of
from tests.support.models.program_cases import (
    GREEDY,
    NEW,
    PROMPTS,
    SAMPLED,
    decoded,
    draft_of,
    model,
    program_of,
    references,
)
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.verify.sampling import ProbsFromLogits, kind_of

pytestmark = pytest.mark.usefixtures("poisoned_empty")


@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("to_probs", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_rewinding_gives_the_same_tokens_again(levels: int, to_probs: ProbsFromLogits) -> None:
    program = program_of(model("llama-gqa"), draft_of("llama-gqa"), levels, 3)
    first, _ = decoded(program, PROMPTS, NEW, to_probs)
    assert decoded(program, PROMPTS, NEW, to_probs, again=True)[0] == first
    longer = [[*prompt, *new[:9]] for prompt, new in zip(PROMPTS, first, strict=True)]
    rest, _ = decoded(program, longer, [new - 9 for new in NEW], to_probs, again=True)
    if to_probs.greedy:
        assert rest == [new[9:] for new in first]


@pytest.mark.slow
def test_a_chain_longer_than_the_recent_window_is_the_same_after_rewinding() -> None:
    """Chunks of the chain itself can be retrieved; what their slots held before must not matter."""
    program = program_of(
        model("llama-gqa"), draft_of("llama-gqa"), 3, 3, gamma=12, rounds=8, budget=6, recent=1, chunk=1
    )
    for seed in (0, 8):
        first, _ = decoded(program, PROMPTS, [14] * 3, SAMPLED, seed)
        assert decoded(program, PROMPTS, [14] * 3, SAMPLED, seed, again=True)[0] == first


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_kinds_of_sampling_take_turns_on_one_program(levels: int) -> None:
    program = program_of(model("llama-gqa"), draft_of("llama-gqa"), levels, 3)
    other = program_of(model("llama-gqa"), draft_of("llama-gqa"), levels, 3)
    hot = ProbsFromLogits.at(1.7)
    few = ProbsFromLogits(LogitsProcessorList([TemperatureLogitsWarper(1.7), TopKLogitsWarper(3)]))
    drawn = [decoded(other, PROMPTS, NEW, to_probs, seed=3)[0] for to_probs in (SAMPLED, hot, few)]
    assert decoded(program, PROMPTS, NEW)[0] == references()
    for to_probs, expected in zip((SAMPLED, hot, few), drawn, strict=True):
        assert decoded(program, PROMPTS, NEW, to_probs, seed=3)[0] == expected
        assert decoded(program, PROMPTS, NEW, again=True)[0] == references()
    assert len({str(tokens) for tokens in drawn}) == 3


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_shorter_sequences_after_longer_ones(levels: int) -> None:
    program = program_of(model("llama-gqa"), draft_of("llama-gqa"), levels, 3)
    decoded(program, [prompt_of(120)] * 3, [30] * 3)
    assert decoded(program, PROMPTS, NEW)[0] == references()


def test_stages_of_a_kind_serve_all_values_of_its_options() -> None:
    def kind(*processors: object) -> object:
        return kind_of([ProbsFromLogits(LogitsProcessorList(processors))])

    warm, hot, top = TemperatureLogitsWarper(0.7), TemperatureLogitsWarper(1.4), TopKLogitsWarper(5)
    assert kind(warm) == kind(hot) == kind()
    assert kind(warm, top) == kind(hot, top) == kind(top) == kind(TopKLogitsWarper(6))
    assert kind(top) != kind()
    assert kind(top, warm) != kind(top, hot), "a temperature in another place"
    many = [[token for token in range(5, 1500) if token != spared] for spared in (700, 701)]
    assert kind(SuppressTokensLogitsProcessor(many[0])) == kind(SuppressTokensLogitsProcessor(many[1]))
    typical = [kind(TypicalLogitsWarper(mass)) for mass in (0.5, 0.6)]
    assert typical[0] != typical[1], "values of other processors are parts of the stages"


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_same_seed_same_tokens(levels: int) -> None:
    program = program_of(model("llama-gqa"), draft_of("llama-gqa"), levels, 3)
    first, again, other = (decoded(program, PROMPTS, NEW, SAMPLED, seed)[0] for seed in (7, 7, 8))
    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))
    alike = decoded(program, [PROMPTS[0]] * 3, [20] * 3, SAMPLED, 7)[0]
    assert len({tuple(tokens) for tokens in alike}) == 3, "sequences of a batch draw apart"


def test_a_program_is_prepared_once_for_each_kind_of_sampling() -> None:
    program: DecodingProgram = program_of(model("llama-gqa"), draft_of("llama-gqa"), 3, 1)
    for temperature in (0.5, 0.8, 0.5):
        to_probs = ProbsFromLogits.at(temperature)
        program.prepare(to_probs)
        assert program.selected.to_probs.temperature.item() == pytest.approx(temperature)
    program.prepare(GREEDY)
    assert len(program.prepared) == 2

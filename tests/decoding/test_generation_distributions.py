"""Generated sequences follow the target's own distribution exactly: every draw is enumerated."""

import pytest

from tests.support.distributions.enumeration import NOISE, summed, total_variation
from tests.support.distributions.generation_cases import BOTH, CASES, Case
from tests.support.distributions.generation_distributions import (
    SMALL,
    Generations,
    stranger,
    target_distribution,
)
from triforce_tree.decoding.sequence import Ending
from triforce_tree.kernels.cpu.fp32 import library as fp32_library
from triforce_tree.models.host import layers as host_layers
from triforce_tree.models.host import linears as host_linears
from triforce_tree.verify.sampling import ProbsFromLogits


@pytest.mark.parametrize("name", CASES)
def test_generated_tokens_follow_the_targets_distribution(name: str) -> None:
    """The levels are unrelated models, and only the full cache holds the whole prompt."""
    case = CASES[name]
    assert len(case.prompt) > 2 * max(SMALL["budget"], SMALL["window"])
    assert case.distance(case.generations()) < NOISE


@pytest.mark.parametrize("name", ["best-first, cold", "runner-ups"])
def test_the_operators_decide_as_their_definitions(name: str) -> None:
    """The random numbers are constructed to give each outcome."""
    case = CASES[name]
    assert case.distance(case.generations(operators=True)) < NOISE


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_decide_as_the_definitions(name: str) -> None:
    case = CASES[name]
    assert case.distance(case.generations("cuda", batch=128, operators=True)) < 1e-5


GREEDY = ProbsFromLogits(greedy=True)
GREEDY_CASES = {
    "plain": (1, {}),
    "chain": (2, {"tree": "chain:3", "runner_ups": False}),
    "best-first": (2, {"tree": "best-first:3,2", "runner_ups": False}),
    "static": (2, {"tree": "static:2;0.1;0.1.0", "runner_ups": False}),
    "hierarchy": (3, {"tree": "chain:2", "runner_ups": False, "rounds": 2}),
    "runner-ups": (3, {"tree": "best-first:2,2", "runner_ups": True, "gamma": 6, "rounds": 3}),
}


@pytest.mark.parametrize("name", GREEDY_CASES)
def test_greedy_output_is_the_targets_choice_alone(name: str) -> None:
    """There is one outcome: nothing is drawn."""
    levels, options = GREEDY_CASES[name]
    case = Case(levels, 5, 12, options=options)
    generations = case.generations(batch=2)
    made = generations.distribution(GREEDY, 12)
    assert generations.runs == 1
    assert made == target_distribution(generations.target, GREEDY, case.prompt, 12)


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_stop_tokens_only_cut_the_distribution(levels: int) -> None:
    """The distribution is the target's cut there, though levels drafted beyond it."""
    case, stop = (
        Case(levels, 3, 2, options={"tree": "chain:1", "runner_ups": False, "gamma": 2}),
        frozenset({2}),
    )
    generations = case.generations()
    whole = target_distribution(generations.target, case.to_probs, case.prompt, 2)
    cut = summed((text[:1] if text[0] in stop else text, chance) for text, chance in whole.items())
    assert len(cut) < len(whole)
    assert total_variation(generations.distribution(case.to_probs, Ending(2, stop)), cut) < NOISE


def test_a_draft_that_is_the_target_is_never_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """If its window holds the prompt, only the drafted tokens and the bonus token are drawn."""
    # Torch computes draft and target alike, bit by bit; the C kernels round a window's sums in another order.
    for module in (fp32_library, host_layers, host_linears):
        monkeypatch.setattr(module, "library", lambda way=None: None)
    prompt = Case(2, 3, 3).prompt
    target = stranger(3, 0)
    generations = Generations(target, target, 2, prompt, tree="chain:2", runner_ups=False, window=64)
    sampled = ProbsFromLogits()
    runs = list(generations.outcomes(lambda n: generations.generated(n, sampled, Ending(3))))
    # On some processors a product's rounding depends on its number of rows: a rejection then has this chance.
    likely = [chance for _, chance in runs if chance > NOISE]
    assert len(likely) == 27
    assert 1 - sum(likely) < NOISE
    made = summed(runs)
    assert total_variation(made, target_distribution(target, ProbsFromLogits(), prompt, 3)) < NOISE


def test_sequences_of_a_batch_are_independent() -> None:
    """The distribution is the same in batches of any size."""
    case = Case(3, 2, 2, options=BOTH)
    probs = [case.generations(batch=batch).distribution(case.to_probs, case.tokens) for batch in (1, 7, 32)]
    assert total_variation(probs[0], probs[1]) < NOISE
    assert total_variation(probs[0], probs[2]) < NOISE

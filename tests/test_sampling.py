"""Laws, residuals and draws."""

from collections import Counter

import pytest
import torch
from enumeration import EnumeratingRandom, chi_square_p, exact_law
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from triforce_tree.sampling import Random, TokenLaw, residual, top_tokens, without

PATHS = [[1, 2, 3, 1, 2], [4, 4, 4], [9], [1, 2, 1, 5, 1]]
PROCESSORS = {
    "none": [],
    "temperature": [TemperatureLogitsWarper(0.7)],
    "top_k": [TopKLogitsWarper(3)],
    "top_p": [TopPLogitsWarper(0.6)],
    "min_p": [MinPLogitsWarper(0.2)],
    "repetition penalty": [RepetitionPenaltyLogitsProcessor(1.8)],
    "no repeated n-gram": [NoRepeatNGramLogitsProcessor(2)],
    "penalty, then warpers": [
        RepetitionPenaltyLogitsProcessor(2.5),
        TemperatureLogitsWarper(1.4),
        TopKLogitsWarper(4),
        TopPLogitsWarper(0.9),
    ],
    "warper, then penalty": [
        TopKLogitsWarper(4),
        NoBadWordsLogitsProcessor([[2], [1, 7]], eos_token_id=0),
    ],
}


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_laws_are_transformers_own_on_every_path(name: str, dtype: torch.dtype) -> None:
    logits = (3 * torch.randn(len(PATHS), 12)).to(dtype)
    processors = LogitsProcessorList(PROCESSORS[name])
    before = logits.clone()
    laws = TokenLaw(processors)(logits, lambda: PATHS)
    for row, path in enumerate(PATHS):
        expected = processors(torch.tensor([path]), logits[row : row + 1].float().clone()).softmax(-1)
        torch.testing.assert_close(laws[row], expected[0])
    assert laws.dtype == torch.float32
    assert torch.equal(logits, before), "the model's logits are left alone"


def test_paths_are_asked_for_only_when_a_processor_needs_them() -> None:
    def unwanted() -> list[list[int]]:
        raise AssertionError("no processor needs the tokens")

    TokenLaw(LogitsProcessorList(PROCESSORS["top_p"]))(torch.randn(2, 5), unwanted)


def test_nan_logits_are_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError, match=r"NaN logits.*float32"):
        TokenLaw()(torch.tensor([[0.0, torch.nan]]), lambda: [[0]])


def test_greedy_is_a_property_of_the_law() -> None:
    assert TokenLaw(greedy=True).greedy
    assert not TokenLaw().greedy
    assert GenerationConfig().do_sample is not True


def test_residual_is_the_normalised_positive_part() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.1, 0.6, 0.1, 0.2])
    torch.testing.assert_close(residual(p, q), torch.tensor([0.8, 0.0, 0.2, 0.0]))
    assert torch.equal(residual(p, p), p), "nothing left: p itself"
    torch.testing.assert_close(p, torch.tensor([0.5, 0.3, 0.2, 0.0]), msg="arguments are left alone")


def test_acceptance_and_residual_make_up_the_target_law() -> None:
    """q(x) min(1, p/q) + P(refused) residual(x) = p(x), the identity that losslessness rests on."""
    for _ in range(20):
        p, q = torch.randn(2, 30).mul(2).softmax(-1)
        both = torch.minimum(p, q)
        torch.testing.assert_close(both + (1 - both.sum()) * residual(p, q), p, atol=1e-6, rtol=1e-5)


def test_without_conditions_on_another_outcome() -> None:
    law = torch.tensor([0.5, 0.25, 0.25])
    torch.testing.assert_close(without(law, 0), torch.tensor([0.0, 0.5, 0.5]))
    assert without(torch.tensor([0.0, 1.0]), 1) is None
    assert law.tolist() == [0.5, 0.25, 0.25]


LAW = torch.tensor([[0.45, 0.3, 0.2, 0.05]])


def test_draws_without_replacement_follow_successive_remainders() -> None:
    """The exponential race against the law of one draw after the other, by chi-square."""
    expected = exact_law(lambda random: random.choose_distinct(LAW, [3])[0])
    random = Random(seed=3)
    rows = random.choose_distinct(LAW.repeat(20_000, 1), [3] * 20_000)
    assert chi_square_p(Counter(map(tuple, rows)), expected) > 1e-3


def test_single_draws_follow_the_law() -> None:
    random = Random(seed=4)
    counts = Counter((random.choose(LAW[0]),) for _ in range(4000))
    assert chi_square_p(counts, {(i,): float(p) for i, p in enumerate(LAW[0])}) > 1e-3
    accepted = Counter((random.accept(0.3),) for _ in range(4000))
    assert chi_square_p(accepted, {(True,): 0.3, (False,): 0.7}) > 1e-3


def test_sure_things_are_sure() -> None:
    random = Random(seed=0)
    assert all(random.accept(1.0) for _ in range(1000))
    assert not any(random.accept(0.0) for _ in range(1000))


@pytest.mark.parametrize("source", [Random(0), EnumeratingRandom()], ids=["real", "enumerating"])
def test_a_row_yields_no_more_tokens_than_its_law_has(source) -> None:
    laws = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.0, 0.5], [0.2, 0.3, 0.5]])
    drawn = source.choose_distinct(laws, [3, 3, 2])
    assert drawn[0] == [1]
    assert sorted(drawn[1]) == [0, 2]
    assert len(set(drawn[2])) == 2
    assert source.choose_distinct(laws, [0, 1, 0])[0] == []
    assert source.choose_distinct(laws, [0, 0, 0]) == [[], [], []]


def test_same_seed_same_draws_and_fresh_ones_every_time() -> None:
    def draws(seed: int) -> list[int]:
        random = Random(seed)
        law = torch.ones(1000) / 1000
        return [random.choose(law) for _ in range(20)]

    assert draws(1) == draws(1) != draws(2)
    assert len(set(draws(1))) > 10


def test_top_tokens_are_the_best_in_order() -> None:
    scores = torch.tensor([[0.1, 3.0, 2.0], [5.0, 4.0, 6.0]])
    assert top_tokens(scores, [2, 3]) == [[1, 2], [2, 0, 1]]
    assert top_tokens(scores, [9, 0]) == [[1, 2, 0], []]

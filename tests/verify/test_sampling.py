"""The computation of probabilities from logits."""

import pytest
import torch
from transformers import (
    InfNanRemoveLogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from triforce_tree.verify.sampling import ProbsFromLogits

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
    "warper, then penalty": [TopKLogitsWarper(4), NoBadWordsLogitsProcessor([[2], [1, 7]], eos_token_id=0)],
}


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probs_equal_transformers_on_every_path(name: str, dtype: torch.dtype) -> None:
    logits = (3 * torch.randn(len(PATHS), 12)).to(dtype)
    processors = LogitsProcessorList(PROCESSORS[name])
    before = logits.clone()
    probs = ProbsFromLogits(processors)(logits, lambda: PATHS)
    for row, path in enumerate(PATHS):
        expected = processors(torch.tensor([path]), logits[row : row + 1].float().clone()).softmax(-1)
        torch.testing.assert_close(probs[row], expected[0])
    assert probs.dtype == torch.float32
    assert torch.equal(logits, before), "the model's logits are not modified"


def test_paths_are_called_only_if_a_processor_needs_them() -> None:
    def paths() -> list[list[int]]:
        raise AssertionError("no processor needs the tokens")

    ProbsFromLogits(LogitsProcessorList(PROCESSORS["top_p"]))(torch.randn(2, 5), paths)


def test_nan_logits_are_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError, match=r"NaN logits.*float32"):
        ProbsFromLogits()(torch.tensor([[0.0, torch.nan]]), lambda: [[0]])


@pytest.mark.parametrize("name", ["none", "repetition penalty"])
def test_a_processor_that_removes_nan_is_given_it(name: str) -> None:
    processors = LogitsProcessorList([*PROCESSORS[name], InfNanRemoveLogitsProcessor()])
    logits = torch.tensor([[0.0, torch.nan, 2.0]])
    probs = ProbsFromLogits(processors)(logits, lambda: [[1, 2]])
    torch.testing.assert_close(probs, processors(torch.tensor([[1, 2]]), logits.clone()).softmax(-1))


def test_probs_at_a_temperature() -> None:
    logits = torch.randn(2, 5)
    torch.testing.assert_close(ProbsFromLogits.at(0.7)(logits, list), (logits / 0.7).softmax(-1))
    assert not ProbsFromLogits.at(0.7).greedy
    assert ProbsFromLogits.at(0).greedy

"""Top-k in slices has the same results as transformers' processor."""

import pytest
import torch
from transformers import LogitsProcessorList, TopKLogitsWarper

from triforce_tree.verify.sampling import ProbsFromLogits
from triforce_tree.verify.top_k import SlicedTopK

LONG = 32 * 600


@pytest.mark.parametrize("vocab", [5000, LONG, LONG + 1])
@pytest.mark.parametrize("k", [1, 50, 599, 6000])
def test_tokens_are_those_of_transformers(vocab: int, k: int) -> None:
    scores = 3 * torch.randn(4, vocab)
    scores[1] = scores[1].bfloat16().float()  # with ties
    scores[2, 40:] = -torch.inf
    scores[3, : vocab // 32] += 100  # the largest are in one slice
    original = TopKLogitsWarper(k, filter_value=-7.0)
    assert torch.equal(SlicedTopK(original)(None, scores), original(None, scores.clone()))


def test_long_rows_are_searched_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsliced(*_: object) -> None:
        raise AssertionError("the whole row was searched")

    monkeypatch.setattr(TopKLogitsWarper, "__call__", unsliced)
    scores = torch.randn(2, LONG)
    to_probs = ProbsFromLogits(LogitsProcessorList([TopKLogitsWarper(50)]))
    assert (to_probs(scores, list) > 0).sum(-1).tolist() == [50, 50]
    with pytest.raises(AssertionError, match="whole row"):
        to_probs(scores[:, :1000], list)

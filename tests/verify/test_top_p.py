"""Top-p without sorting the vocabulary has the same results as transformers' processor."""

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, TopPLogitsWarper

from triforce_tree.verify.sampling import ProbsFromLogits
from triforce_tree.verify.top_p import PartlySortedTopP

VOCABULARY = 5000


def rows() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {f"spread {s}": s * torch.randn(6, VOCABULARY, generator=generator) for s in (0.1, 1.0, 3.0, 9.0)}
    made["after top-k"] = torch.full((3, VOCABULARY), -torch.inf)
    made["after top-k"][:, ::101] = 4 * made["spread 1.0"][:3, ::101]
    made["equal"] = torch.zeros(2, VOCABULARY)
    made["ties"] = made["spread 3.0"].bfloat16().float()
    made["pairs of equals"] = made["spread 9.0"].repeat_interleave(2, 1)[:, :VOCABULARY].contiguous()
    made["one for certain"] = torch.zeros(2, VOCABULARY)
    made["one for certain"][:, 7] = 100.0
    return made


ROWS = rows()


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("keep", [1, 3])
@pytest.mark.parametrize("p", [0.0, 1e-6, 0.3, 0.9, 0.99, 0.999999])
def test_tokens_are_those_of_transformers(kind: str, keep: int, p: float) -> None:
    scores = ROWS[kind]
    original = TopPLogitsWarper(p, min_tokens_to_keep=keep)
    expected = original(None, scores.clone())
    found = PartlySortedTopP(original)(None, scores)
    # transformers' sort is not stable, so which of several equal logits it keeps depends on the other rows.
    for own, other in zip(found, expected, strict=True):
        assert torch.equal(own.sort().values, other.sort().values)
    if "spread" in kind:
        assert torch.equal(found, expected)


def test_most_rows_are_not_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    sorted_rows = []
    inherited = TopPLogitsWarper.__call__

    def counted(self: TopPLogitsWarper, input_ids: None, scores: Tensor) -> Tensor:
        sorted_rows.append(len(scores))
        return inherited(self, input_ids, scores)

    monkeypatch.setattr(TopPLogitsWarper, "__call__", counted)
    scores = 9 * torch.randn(64, VOCABULARY, generator=torch.Generator().manual_seed(1))
    PartlySortedTopP(TopPLogitsWarper(0.9))(None, scores)
    assert sum(sorted_rows) <= 6
    PartlySortedTopP(TopPLogitsWarper(0.9))(None, scores[:, :100])
    assert sorted_rows[-1] == 64, "short rows are"


def test_it_takes_the_place_of_transformers_own() -> None:
    made = ProbsFromLogits(LogitsProcessorList([TopPLogitsWarper(0.8)]))
    [processor] = made.processors
    assert isinstance(processor, PartlySortedTopP)
    assert (processor.top_p, processor.min_tokens_to_keep, processor.filter_value) == (0.8, 1, -torch.inf)
    assert made.context_free

    class Own(TopPLogitsWarper):
        pass

    own = Own(0.8)
    assert ProbsFromLogits(LogitsProcessorList([own])).processors == [own], "a user's class is left as it is"

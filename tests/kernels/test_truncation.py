"""Top-k, top-p and min-p with options of each sequence: transformers' processors, the CPU's way, Triton."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tests.support.kernels import triton_ops
from tests.support.kernels.triton_ops import DEVICE, runs_kernels
from triforce_tree.kernels.probs import truncation_cpu
from triforce_tree.kernels.probs.truncation import truncate_scores

Truncate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
OPTIONS = [
    (0, 1.0, 0.0), (1, 1.0, 0.0), (50, 1.0, 0.0), (700, 1.0, 0.0), (0, 0.0, 0.0), (0, 0.3, 0.0),
    (0, 0.9, 0.0), (0, 0.999999, 0.0), (0, 1.0, 0.05), (0, 1.0, 1.0), (50, 0.9, 0.0), (50, 0.99, 0.02),
    (7, 1.0, 0.3), (10**6, 0.5, 0.1),
]  # fmt: skip


def kinds_of_scores(vocab: int) -> dict[str, Tensor]:
    """Returns fp32 ``[14, 2, V]`` of several kinds."""
    normal = torch.randn(len(OPTIONS), 2, vocab, generator=torch.Generator().manual_seed(vocab))
    few = torch.full_like(normal, -torch.inf)
    few[..., :: max(1, vocab // 40)] = 4 * normal[..., :: max(1, vocab // 40)]
    sure = torch.zeros_like(normal)
    sure[..., vocab // 2] = 100.0
    return {"spread": normal, "peaked": 5 * normal, "few": few, "sure": sure}


def batch() -> tuple[Tensor, Tensor, Tensor]:
    k, p, ratio = zip(*OPTIONS, strict=True)
    return torch.tensor(k), torch.tensor(p, dtype=torch.float64), torch.tensor(ratio, dtype=torch.float64)


def of_transformers(scores: Tensor) -> Tensor:
    """Returns each sequence's scores by its own processors."""
    found = []
    for own, (k, p, ratio) in zip(scores, OPTIONS, strict=True):
        own = TopKLogitsWarper(k)(None, own) if k else own
        own = TopPLogitsWarper(p)(None, own) if p < 1 else own
        found.append(MinPLogitsWarper(ratio)(None, own) if ratio else own)
    return torch.stack(found)


@pytest.mark.parametrize("vocab", [40, 5000])
@pytest.mark.parametrize("kind", ["spread", "peaked", "few", "sure"])
@pytest.mark.parametrize("how", [truncate_scores.definition, truncation_cpu.truncate_scores])
def test_sequences_are_truncated_as_by_transformers(how: Truncate, kind: str, vocab: int) -> None:
    scores = kinds_of_scores(vocab)[kind]
    found, expected = how(scores, *batch()), of_transformers(scores)
    if kind == "sure":  # which of many equals stay is not specified
        assert torch.equal(found.sort(-1).values, expected.sort(-1).values)
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("vocab", [40, 5000])
def test_ties_and_nan_on_a_cpu(vocab: int) -> None:
    scores = (3 * kinds_of_scores(vocab)["spread"]).round()
    found = truncation_cpu.truncate_scores(scores, *batch())
    expected = truncate_scores.definition(scores, *batch())
    assert torch.equal(found.sort(-1).values, expected.sort(-1).values)
    scores[:, 1, 3] = torch.nan
    found = truncation_cpu.truncate_scores(scores, *batch())
    assert found[:, 1, 3].isnan().all()


def test_a_sequence_does_not_depend_on_its_neighbours() -> None:
    scores = kinds_of_scores(5000)["peaked"]
    together = truncation_cpu.truncate_scores(scores, *batch())
    for b in range(len(OPTIONS)):
        alone = truncation_cpu.truncate_scores(scores[b : b + 1], *(each[b : b + 1] for each in batch()))
        assert torch.equal(together[b], alone[0])


def test_most_rows_are_not_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, sort = [], Tensor.sort

    def counted(scores: Tensor, *args: object, **options: object) -> object:
        sizes.append(scores.shape[0])
        return sort(scores, *args, **options)

    scores = 9 * torch.randn(64, 1, 5000, generator=torch.Generator().manual_seed(1))
    options = torch.full((64,), 50), torch.full((64,), 0.9).double(), torch.zeros(64).double()
    monkeypatch.setattr(Tensor, "sort", counted)
    truncation_cpu.truncate_scores(scores, *options)
    assert sum(sizes) <= 6


@runs_kernels
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("vocab, slices, listed", [(40, 1, 4096), (300, 3, 4096), (300, 1, 60), (300, 2, 2)])
@pytest.mark.parametrize("kind", ["spread", "peaked", "few", "sure", "ties"])
def test_the_kernel(kind: str, vocab: int, slices: int, listed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the probability of the removed tokens is not 1 - p within rounding, the same tokens stay.

    If few tokens are listed, ranges are divided; if too few, the threshold is found in the whole row.
    """
    triton_ops.require_triton()
    from triforce_tree.kernels.probs import truncation_kernels

    monkeypatch.setattr(truncation_kernels, "_SLICES", slices)
    monkeypatch.setattr(truncation_kernels, "_LISTED", listed)
    scores = kinds_of_scores(vocab).get(kind, (2 * kinds_of_scores(vocab)["spread"]).round())
    scores[0, 0, 3] = torch.nan
    found = truncation_kernels.truncate_scores(
        scores.to(DEVICE), *(each.to(DEVICE) for each in batch())
    ).cpu()
    expected = truncate_scores.definition(scores, *batch())
    found, expected = (each.nan_to_num(1e9).sort(-1).values for each in (found, expected))
    differs = (found != expected).sum(-1)
    assert (differs[[n for n, (_, p, _) in enumerate(OPTIONS) if p == 1.0]] == 0).all()
    # Rounding may move one token over the border.
    assert differs.max() <= 1
    assert (differs > 0).sum() <= 2


@runs_kernels
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("kind", ["peaked", "ties"])
def test_a_row_of_the_kernel_depends_on_itself_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It depends neither on other rows nor on how the threshold is found; of ties the last tokens stay."""
    triton_ops.require_triton()
    from triforce_tree.kernels.probs import truncation_kernels

    monkeypatch.setattr(truncation_kernels, "_SLICES", 3)
    scores = kinds_of_scores(300).get(kind, (2 * kinds_of_scores(300)["spread"]).round()).to(DEVICE)
    options = [each.to(DEVICE) for each in batch()]
    together = truncation_kernels.truncate_scores(scores, *options)
    removed = together == -torch.inf
    for own, gone in zip(scores[5:8, 0], removed[5:8, 0], strict=True):
        least = own[~gone].min()
        assert not gone[own == least].int().diff().gt(0).any()
    for number, listed in enumerate((2, 20, 60)):
        monkeypatch.setattr(truncation_kernels, "_LISTED", listed)
        own = slice(3 * number + 4, 3 * number + 7)
        alone = truncation_kernels.truncate_scores(scores[own, 1:], *(each[own] for each in options))
        assert torch.equal(alone, together[own, 1:])


@runs_kernels
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("nodes", [slice(0, 2), slice(1, 2)], ids=["some", "one"])
def test_the_kernel_takes_slices(nodes: slice, monkeypatch: pytest.MonkeyPatch) -> None:
    triton_ops.require_triton()
    from triforce_tree.kernels.probs import truncation_kernels

    monkeypatch.setattr(truncation_kernels, "_SLICES", 2)
    options = [each.to(DEVICE) for each in batch()]
    scores = torch.randn(len(OPTIONS), 3, 40).to(DEVICE)[:, nodes]
    found = truncation_kernels.truncate_scores(scores, *options)
    assert torch.equal(found, truncation_kernels.truncate_scores(scores.contiguous(), *options))


@runs_kernels
def test_operator() -> None:
    triton_ops.require_triton()
    from triforce_tree.kernels.probs import truncation_kernels

    options = torch.tensor([3]), torch.ones(1).double(), torch.zeros(1).double()
    with pytest.raises(ValueError, match="takes float32"):
        truncation_kernels.truncate_scores(torch.zeros(1, 1, 8, dtype=torch.float16), *options)
    torch.library.opcheck(
        truncate_scores.overload,
        (torch.randn(1, 2, 7), *options),
        test_utils=("test_schema", "test_faketensor"),
    )

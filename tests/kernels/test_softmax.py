"""Softmax over a vocabulary by Triton beside torch's; off a GPU interpreted."""

import pytest
import torch

from tests.support.kernels import triton_ops
from tests.support.kernels.triton_ops import DEVICE
from triforce_tree.kernels.probs.softmax import softmax_rows

pytestmark = [triton_ops.runs_kernels, pytest.mark.usefixtures("poisoned_empty")]
LONG = 16400


@pytest.fixture
def kernels():
    triton_ops.require_triton()
    from triforce_tree.kernels.probs import softmax_kernels

    return softmax_kernels


@pytest.mark.parametrize("vocab", [50, LONG, 40001])
@pytest.mark.parametrize("scale", [0.1, 5.0, 200.0])
def test_probs(kernels, vocab, scale):
    scores = (scale * torch.randn(2, 3, vocab)).to(DEVICE)
    scores[0, 1, ::3] = -torch.inf
    scores[1, 2, : vocab // 2] = -torch.inf
    found = kernels.softmax_rows(scores)
    torch.testing.assert_close(found.double(), scores.double().softmax(-1), rtol=2e-5, atol=1e-9)
    assert (found[0, 1, ::3] == 0).all()


def test_rows_that_are_no_distribution(kernels):
    scores = torch.randn(4, LONG).to(DEVICE)
    scores[0, 9], scores[1], scores[2, LONG - 1] = torch.nan, -torch.inf, torch.inf
    found = kernels.softmax_rows(scores)
    assert found[:3].isnan().all(1).tolist() == scores[:3].softmax(-1).isnan().all(1).tolist() == [True] * 3
    torch.testing.assert_close(found[3], scores[3].softmax(-1))


def test_bits_do_not_depend_on_other_rows(kernels):
    scores = 5 * torch.randn(3, 2 * LONG).to(DEVICE)
    every_second = scores[:, ::2]
    together = kernels.softmax_rows(every_second)
    for row in range(3):
        assert torch.equal(together[row], kernels.softmax_rows(every_second[row : row + 1])[0])


@pytest.mark.parametrize("nodes", [slice(1, 3), slice(1, 2)], ids=["some", "one"])
def test_slices(kernels, nodes):
    """Rows of a slice have a stride of their own."""
    scores = torch.randn(3, 4, LONG).to(DEVICE)[:, nodes]
    assert torch.equal(kernels.softmax_rows(scores), kernels.softmax_rows(scores.contiguous()))


def test_operator(kernels):
    with pytest.raises(ValueError, match="takes float32"):
        kernels.softmax_rows(torch.zeros(1, LONG, dtype=torch.float16, device=DEVICE))
    torch.library.opcheck(
        softmax_rows.overload, (torch.randn(2, 7),), test_utils=("test_schema", "test_faketensor")
    )
    assert torch.equal(softmax_rows(torch.zeros(1, 4)), torch.full((1, 4), 0.25))

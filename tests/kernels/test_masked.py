"""Logits under masks of allowed tokens, by Triton, by numpy and by the definition; off a GPU interpreted."""

import pytest
import torch
from torch import Tensor

from tests.support.kernels import triton_ops
from tests.support.kernels.triton_ops import DEVICE
from triforce_tree.kernels.probs.masked import mask_logits

pytestmark = [triton_ops.runs_kernels, pytest.mark.usefixtures("poisoned_empty")]


@pytest.fixture
def kernels():
    triton_ops.require_triton()
    from triforce_tree.kernels.probs import masked_kernels

    return masked_kernels


def packed(allowed: Tensor) -> Tensor:
    """Returns the words of a mask, bool ``[..., V]``; bits that belong to no token are set."""
    vocab = allowed.shape[-1]
    bits = torch.nn.functional.pad(allowed, (0, -vocab % 32), value=True).unflatten(-1, (-1, 32))
    words = (bits.long() << torch.arange(32)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


@pytest.mark.parametrize("vocab", [1, 31, 64, 77, 9001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_forbidden_tokens_are_at_minus_infinity(kernels, vocab: int, dtype: torch.dtype) -> None:
    logits = torch.randn(2, 3, vocab).to(DEVICE, dtype)
    allowed = torch.rand(2, 3, vocab) < 0.4
    allowed[0, 1], allowed[1, 2] = True, False
    expected = logits.cpu().clone()
    expected[~allowed] = -torch.inf
    words, given = packed(allowed).to(DEVICE), logits.clone()
    for compute in (mask_logits, mask_logits.definition, kernels.mask_logits):
        found = compute(logits, words)
        assert found.dtype == dtype
        assert torch.equal(found.cpu(), expected)
    assert torch.equal(logits, given)


@pytest.mark.parametrize("nodes", [slice(3, 7), slice(3, 4), slice(0, 9)], ids=["some", "one", "all"])
def test_views(kernels, nodes: slice) -> None:
    """Logits are expanded or a slice, and words are a slice of a buffer."""
    words = torch.randint(-(2**31), 2**31, (5, 9, 2), dtype=torch.int32).to(DEVICE)[:, nodes]
    expanded = torch.randn(5, 1, 50).to(DEVICE).expand(-1, words.shape[1], -1)
    for logits in (expanded, torch.randn(5, 9, 50).to(DEVICE)[:, nodes], expanded[:1].expand(5, -1, -1)):
        assert torch.equal(kernels.mask_logits(logits, words), mask_logits.definition(logits, words))


def test_operator(kernels) -> None:
    with pytest.raises(ValueError, match=r"takes int32 \[2, 2\] for these logits"):
        kernels.mask_logits(torch.zeros(2, 40, device=DEVICE), torch.zeros(2, 2, device=DEVICE))
    arguments = (torch.randn(2, 7), torch.zeros(2, 1, dtype=torch.int32))
    torch.library.opcheck(mask_logits.overload, arguments, test_utils=("test_schema", "test_faketensor"))

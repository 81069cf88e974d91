"""Linear layers of routed experts: the definition against loops, the kernel (interpreter) against fp64.

The interpreter multiplies bf16 tiles wrongly, so these run fp16.
"""

import pytest
import torch
from torch import Tensor

from tests.support.kernels import triton_ops
from tests.support.kernels.triton_ops import DEVICE
from triforce_tree.kernels.linear import experts, reference
from triforce_tree.kernels.linear.experts import expert_linear, quantise_experts

pytestmark = [pytest.mark.usefixtures("poisoned_empty"), triton_ops.runs_kernels]

HALF = torch.float16
# Tokens, experts of each, experts, outputs, inputs.
SIZES = [(1, 2, 5, 64, 128), (7, 3, 4, 100, 520), (40, 2, 3, 33, 333), (3, 1, 6, 65, 200)]


@pytest.fixture(name="kernel")
def _kernel():
    triton_ops.require_triton()
    from triforce_tree.kernels.linear import experts_kernels

    return experts_kernels


def problem(tokens: int, each: int, count: int, outs: int, ins: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, the experts of each token, weights, bias."""
    ids = torch.stack([torch.randperm(count)[:each] for _ in range(tokens)])
    made = torch.randn(tokens, ins), torch.randn(count, outs, ins) / ins**0.5, torch.randn(count, outs)
    x, weight, bias = (tensor.to(DEVICE, HALF) for tensor in made)
    return x, ids.to(DEVICE), weight, bias


def exact(x: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """fp64, pair by pair."""
    each = ids.numel() // x.shape[0]
    rows = [
        torch.nn.functional.linear(x[at // each].double(), weight[e].double())
        + (0 if bias is None else bias[e].double())
        for at, e in enumerate(ids.flatten().tolist())
    ]
    return torch.stack(rows)


def within_error_limit(made: Tensor, expected: Tensor) -> bool:
    """Returns whether the error is at most twice that of rounding the exact result once."""
    allowed = 2 * (expected.to(made.dtype).double() - expected).abs().max() + 1e-6
    return bool((made.double() - expected).abs().max() <= allowed)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_kernel_and_definition(kernel, bits: int, size: tuple[int, ...]) -> None:
    x, ids, weight, bias = problem(*size)
    words, scales = (weight, None) if bits == 16 else quantise_experts(weight, bits)
    if bits < 16:
        each = [reference.dequantise(*reference.quantise(w, bits), bits, size[-1]) for w in weight]
        weight = torch.stack(each)
    expected = exact(x, ids, weight, bias)
    for run in (expert_linear.definition, kernel.expert_linear):
        assert within_error_limit(run(x, ids, words, scales, bias, bits), expected)


def test_a_row_for_each_pair_strides_and_no_bias(kernel) -> None:
    x, ids, weight, _ = problem(6, 2, 4, 48, 96)
    pairs = torch.randn(12, 2 * 96).to(DEVICE, HALF)[:, ::2]
    stored = weight.transpose(1, 2).contiguous().transpose(1, 2)
    for rows in (pairs, x):
        expected = exact(rows, ids, weight, None)
        for run in (expert_linear.definition, kernel.expert_linear):
            assert within_error_limit(run(rows, ids.int(), stored, None, None, 16), expected)


def test_one_expert_for_each_token_by_a_slice_of_ids(kernel) -> None:
    x, ids, weight, bias = problem(6, 1, 4, 48, 96)
    expected = exact(x, ids, weight, bias)
    made = kernel.expert_linear(x, ids.repeat_interleave(2, 1)[:, ::2], weight, None, bias, 16)
    assert within_error_limit(made, expected)


def test_more_pairs_than_one_launch_takes(kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    x, ids, weight, bias = problem(21, 2, 3, 40, 64)
    monkeypatch.setattr(kernel, "MOST_PAIRS", 9)
    expected = exact(x, ids, weight, bias)
    assert within_error_limit(kernel.expert_linear(x, ids, weight, None, bias, 16), expected)
    pairs = x.repeat_interleave(2, 0)
    assert within_error_limit(kernel.expert_linear(pairs, ids, weight, None, bias, 16), expected)


def test_the_definition_takes_many_pairs_and_none() -> None:
    x, ids, weight, bias = (t.cpu() for t in problem(90, 2, 3, 8, 16))
    x, weight, bias = x.float(), weight.float(), bias.float()
    assert ids.numel() > 2 * experts._TOGETHER
    made = expert_linear(x, ids, weight, None, bias, 16)
    torch.testing.assert_close(made, exact(x, ids, weight, bias).float())
    assert expert_linear(x[:0], ids[:0], weight, None, bias, 16).shape == (0, 8)


def test_wrong_arguments_are_refused(kernel) -> None:
    x, ids, weight, bias = problem(3, 2, 4, 16, 32)
    with pytest.raises(ValueError, match=r"do not route 2 rows"):
        kernel.expert_linear(x[:2], ids, weight, None, bias, 16)
    with pytest.raises(ValueError, match=r"weights are torch.float32"):
        kernel.expert_linear(x, ids, weight.float(), None, bias, 16)
    with pytest.raises(ValueError, match=r"do not hold 32 columns"):
        kernel.expert_linear(x, ids, weight, None, bias, 8)


def test_the_fake_agrees_with_the_operator() -> None:
    x, ids, weight, bias = problem(3, 2, 4, 16, 32)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(expert_linear.overload, (x, ids, weight, None, bias, 16), test_utils=checks)

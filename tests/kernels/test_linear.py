"""The few-row linear kernel, in the interpreter, against fp64; `tests/gpu/test_linear.py` runs it on a GPU.

The interpreter multiplies bf16 tiles wrongly, so these run fp16.
"""

import pytest
import torch
from torch import Tensor

from tests.support.kernels import triton_ops
from tests.support.kernels.triton_ops import DEVICE
from triforce_tree.kernels.device import KNOWN
from triforce_tree.kernels.linear import reference
from triforce_tree.kernels.linear.configs import (
    LinearConfig,
    OneRowConfig,
    choose,
    choose_one_row,
    counters_for,
    row_block,
)

pytestmark = triton_ops.runs_kernels

HALF = torch.float16
TMA = LinearConfig(64, 128, 1, 4, 2)
SPLIT = LinearConfig(64, 64, 3, 4, 2)
PLAIN = LinearConfig(32, 128, 2, 4, 2, tma=False)


@pytest.fixture
def kernels():
    """The kernel's module, in the interpreter where there is no GPU."""
    triton_ops.require_triton()
    from triforce_tree.kernels.linear import launch as linear

    return linear


def problem(rows: int, outs: int, ins: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and bias."""
    made = [torch.randn(rows, ins), torch.randn(outs, ins) / ins**0.5, torch.randn(outs)]
    x, weight, bias = (tensor.to(DEVICE, HALF) for tensor in made)
    return x, weight, bias


def within_error_limit(made: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Returns whether the error is at most twice that of rounding the exact result once, or of torch."""
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    others = [exact.to(x.dtype)]
    if weight.dtype == x.dtype:
        others.append(torch.nn.functional.linear(x, weight, bias))
    allowed = 2 * max((other.double() - exact).abs().max().item() for other in others) + 1e-6
    return (made.double() - exact).abs().max().item() <= allowed


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("config", [TMA, SPLIT, PLAIN], ids=["tma", "split", "plain"])
@pytest.mark.parametrize(
    "rows, outs, ins", [(1, 64, 128), (7, 100, 520), (17, 64, 640), (3, 65, 333)], ids=lambda size: str(size)
)
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_results(kernels, bits, rows, outs, ins, config):
    x, weight, bias = problem(rows, outs, ins)
    counters = counters_for(outs, DEVICE)
    if bits == 16:
        made = kernels.linear(x, weight, bias, counters, config)
    else:
        words, scales = reference.quantise(weight, bits)
        weight = reference.dequantise(words, scales, bits, ins)
        made = kernels.low_bit_linear(x, words, scales, bias, bits, counters, config)
    assert within_error_limit(made, x, weight, bias)
    assert not counters.any()


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("ins", [2048, 2100], ids=["even", "uneven"])
@pytest.mark.parametrize("biased", [False, True])
def test_one_row(kernels, ins, biased):
    """Alone and as three layers in one launch, where the last program of each has fewer rows."""
    x, weight, bias = problem(1, 12, ins)
    bias = bias if biased else None
    # Rows of a wider matrix, as slices of a joined weight.
    weight = torch.cat([weight, weight], 1)[:, :ins]
    counters = counters_for(12, DEVICE)
    assert choose_one_row(12, ins, KNOWN["sm_90"]) is not None
    config = OneRowConfig(4, 256, 4, 3)
    assert within_error_limit(multiplied(x, [weight], [bias], config), x, weight, bias)
    parts = [weight[:3], weight[3:10], weight[10:]]
    own = [None] * 3 if bias is None else [bias[:3], bias[3:10], bias[10:]]
    made = multiplied(x, parts, own, config)
    assert within_error_limit(made, x, weight, bias)
    assert torch.equal(made, multiplied(x, [weight], [bias], config))
    single = kernels.linear(x.view(1, 1, ins), weight, bias, counters)
    assert single.shape == (1, 1, 12)
    assert within_error_limit(single.view(1, 12), x, weight, bias)


def multiplied(x, weights, biases, config):
    from triforce_tree.kernels.linear.one_row import multiply_row

    return multiply_row(x[0], weights, biases, config)[None]


def test_layers_that_multiply_one_row_without_tensor_cores():
    assert choose_one_row(4096, 4096, KNOWN["sm_90"]) is not None
    assert choose_one_row(4096, 14336, KNOWN["sm_89"]) is not None
    assert choose_one_row(576, 576, KNOWN["sm_90"]) is None, "few inputs"
    assert choose_one_row(4096, 4096, KNOWN["gfx942"]) is None, "not measured on AMD's cards"


def test_leading_dimensions_strides_and_no_bias(kernels):
    x, weight, _ = problem(6, 64, 256)
    wide = torch.cat([x, x], 1)[:, :256].view(2, 3, 256)
    made = kernels.linear(wide, weight, None, counters_for(64, DEVICE), TMA)
    assert made.shape == (2, 3, 64)
    assert within_error_limit(made.view(6, 64), x, weight, None)


def test_fakes_agree_with_the_operators(kernels):
    x, weight, bias = problem(2, 64, 256)
    words, scales = reference.quantise(weight, 4)
    checks = ("test_schema", "test_faketensor")
    counters = counters_for(64, DEVICE)
    plain = kernels._config_numbers(TMA)
    for args in ((x, weight, None, bias, counters, 16, plain), (x, words, scales, None, counters, 4, plain)):
        torch.library.opcheck(kernels._linear.overload, args, test_utils=checks)


def test_wrong_input_raises(kernels):
    x, weight, _ = problem(2, 64, 256)
    counters = counters_for(64, DEVICE)
    with pytest.raises(ValueError, match="rows=129"):
        kernels.linear(x.new_zeros(129, 256), weight, None, counters)
    with pytest.raises(ValueError, match="takes bf16 and fp16"):
        kernels.linear(x.float(), weight.float(), None, counters)
    with pytest.raises(ValueError, match="weight is"):
        kernels.linear(x[:, :128], weight, None, counters)
    with pytest.raises(ValueError, match="counters_for"):
        kernels.linear(x, weight, None, counters[:1])
    with pytest.raises(ValueError, match="do not hold"):
        kernels.low_bit_linear(x, weight, torch.ones(64, device=DEVICE), None, 8, counters)


@pytest.mark.parametrize("bits, most", [(8, 0.012), (4, 0.11)])
def test_quantisation_error_is_small(bits, most):
    weight = torch.randn(70, 333)
    words, scales = reference.quantise(weight, bits)
    assert words.shape == (70, 128 * reference.blocks_of(333, bits))
    assert words.dtype == torch.int16
    back = reference.dequantise(words, scales, bits, 333)
    assert ((back - weight).norm() / weight.norm()).item() < most


@pytest.mark.parametrize("bits", [8, 4])
def test_quantising_twice_changes_nothing(bits):
    """Weights that are codes times scales come back exactly; zero rows too."""
    weight = torch.randn(5, 256)
    weight[3] = 0
    once = reference.dequantise(*reference.quantise(weight, bits), bits, 256)
    assert torch.equal(once[3], torch.zeros(256))
    if bits == 8:
        twice = reference.dequantise(*reference.quantise(once, bits), bits, 256)
        torch.testing.assert_close(twice, once)


def test_reference_is_the_product_with_the_dequantised_weight():
    x, weight, bias = torch.randn(2, 3, 200), torch.randn(10, 200), torch.randn(10)
    for bits in (8, 4):
        words, scales = reference.quantise(weight, bits)
        made = reference.low_bit_linear(x, words, scales, bias, bits)
        exact = x @ reference.dequantise(words, scales, bits, 200).T + bias
        torch.testing.assert_close(made, exact)
    torch.testing.assert_close(reference.linear(x, weight, bias), x @ weight.T + bias)
    with pytest.raises(ValueError, match="bits=3"):
        reference.quantise(weight, 3)


def test_every_shape_has_a_configuration():
    for bits in (16, 8, 4):
        for rows in (1, 16, 17, 64, 128):
            for outs, ins in [(4096, 4096), (11008, 4096), (4096, 14336), (33, 65), (384, 384)]:
                config = choose(bits, rows, outs, ins, KNOWN["sm_90"])
                assert config.splits >= 1
                assert config.width == 128 or bits == 16 or 128 % config.width == 0
    assert [row_block(rows) for rows in (1, 16, 17, 33, 65, 128)] == [16, 16, 32, 64, 128, 128]

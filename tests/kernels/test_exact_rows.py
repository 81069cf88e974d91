"""Linear layers and norms of bit-exact mode: a row's bits alone and among others; in the interpreter."""

import pytest
import torch

from tests.support.kernels import triton_ops
from tests.support.kernels.triton_ops import DEVICE
from triforce_tree.kernels.linear.configs import counters_for
from triforce_tree.kernels.norm import reference

pytestmark = [triton_ops.runs_kernels, pytest.mark.usefixtures("poisoned_empty")]
HALF = torch.float16


@pytest.mark.parametrize("outs, ins", [(70, 1100), (130, 300), (2048, 4096), (4096, 11008)])
def test_pinned_linears(outs: int, ins: int) -> None:
    """The rows have equal bits in forwards of any number of rows, also where other tiles are chosen."""
    triton_ops.require_triton()
    from triforce_tree.kernels.linear import launch

    if DEVICE == "cpu" and outs > 1000:
        pytest.skip("the interpreter would take long, and has one tile for all rows")
    x, weight = torch.randn(200, ins).to(DEVICE, HALF), (torch.randn(outs, ins) / 30).to(DEVICE, HALF)
    bias, counters = torch.randn(outs).to(DEVICE, HALF), counters_for(outs, DEVICE)
    out = launch.pinned_linear(x, weight, bias, counters)
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    plain = torch.nn.functional.linear(x, weight, bias)
    assert (out - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-3
    for rows in (1, 3, 17, 33, 64, 65, 128, 129):
        assert torch.equal(launch.pinned_linear(x[5 : 5 + rows], weight, bias, counters), out[5 : 5 + rows])


@pytest.mark.parametrize("shift, late", [(0.0, False), (1.0, True), (0.0, True)])
@pytest.mark.parametrize("columns", [8, 72, 640])
def test_norms(columns: int, shift: float, late: bool) -> None:
    triton_ops.require_triton()
    from triforce_tree.kernels.norm import launch

    x, weight = (3 * torch.randn(2, 5, columns)).to(DEVICE, HALF), torch.randn(columns).to(DEVICE, HALF)
    out = launch.row_rms_norm(x, weight, 1e-5, shift, late)
    expected = reference.row_rms_norm.definition(x, weight, 1e-5, shift, late)
    torch.testing.assert_close(out, expected, rtol=2 * torch.finfo(HALF).eps, atol=1e-6)
    assert torch.equal(launch.row_rms_norm(x[1:, 3:4], weight, 1e-5, shift, late), out[1:, 3:4])
    residual = torch.randn(2, 5, columns).to(DEVICE, HALF)
    added = launch.add_rms_norm(x, residual, weight, 1e-5, shift, late)
    total = x + residual
    assert torch.equal(added[0], total)
    assert torch.equal(added[1], launch.row_rms_norm(total, weight, 1e-5, shift, late))
    for found, defined in zip(
        added, reference.add_rms_norm.definition(x, residual, weight, 1e-5, shift, late), strict=True
    ):
        torch.testing.assert_close(found, defined, rtol=2 * torch.finfo(HALF).eps, atol=1e-6)
    with pytest.raises(ValueError, match="they must be alike"):
        launch.add_rms_norm(x, residual[:1], weight, 1e-5, shift, late)
    with pytest.raises(ValueError, match="rows of 40000 elements; the kernel sums up to 32768"):
        launch.row_rms_norm(torch.zeros(1, 40_000), weight, 1e-5, 0.0, False)

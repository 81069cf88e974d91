"""Linear layers of few rows at real sizes: error against fp64, and the same bits in every call."""

import pytest
import torch

from tests.support.kernels.linears import BITS, LAYERS, ODD, Shape, Weights
from triforce_tree.models.few_row import LowBitHead, LowBitLinear

pytestmark = pytest.mark.gpu

SHAPES = list(dict.fromkeys(shape for layer in LAYERS.values() for shape in layer))
PROBLEMS = [
    *((bits, shape, torch.bfloat16) for bits in BITS for shape in [*SHAPES, *ODD]),
    *((bits, shape, torch.float16) for bits in BITS for shape in ODD),
]


@pytest.mark.parametrize("bits, shape, dtype", PROBLEMS, ids=str)
def test_error_and_bits(bits: int, shape: Shape, dtype: torch.dtype) -> None:
    weights, bias = Weights(bits, shape, dtype), None
    if shape.ins % 1000 in (0, 264):
        bias = [torch.randn(outs, dtype=dtype, device="cuda") for outs in shape.outs]
    for rows in (1, 7, 16, 17, 32, 64, 96, 128):
        x = torch.randn(rows, shape.ins, dtype=dtype, device="cuda")
        exact, allowed = weights.exact(x, bias)
        # What the call allocates has held NaN.
        for size in (shape.out * rows, 64 * shape.out * max(16, rows)):
            poison = torch.full((size,), torch.nan, device="cuda")
            del poison
        made = weights.call(x, bias)
        assert (made.double() - exact).abs().max().item() <= allowed, rows
        assert all(torch.equal(made, weights.call(x, bias)) for _ in range(8)), rows
        assert not any(counters.any() for counters in weights.counters), rows


def test_a_head_of_few_bits_multiplies_few_rows() -> None:
    head = torch.nn.Linear(512, 1000, bias=False, device="cuda", dtype=torch.bfloat16)
    made, x = LowBitHead(head), torch.randn(200, 512, dtype=torch.bfloat16, device="cuda")
    assert torch.equal(made(x), head(x))
    assert torch.equal(made(x[:16]), LowBitLinear(head, 8)(x[:16]))
    assert not torch.equal(made(x[:16]), head(x[:16]))

"""Rotary embeddings and gated activations by Triton beside their definitions; off a GPU interpreted."""

import pytest
import torch
from torch import Tensor

from tests.support.kernels import triton_ops
from tests.support.kernels.triton_ops import DEVICE
from triforce_tree.kernels.pointwise import reference

pytestmark = [triton_ops.runs_kernels, pytest.mark.usefixtures("poisoned_empty")]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("heads", "dim", "width"), [((5, 1), 24, 24), ((18, 17), 20, 12), ((4, 4), 16, 2)])
def test_rotary(heads: tuple[int, int], dim: int, width: int, wide: bool, dtype: torch.dtype) -> None:
    triton_ops.require_triton()
    from triforce_tree.kernels.pointwise import launch

    # As projections make them, and as slices of one projection.
    q = drawn(2, 3, heads[0], dim, dtype=dtype).transpose(1, 2)
    k = drawn(2, 3, heads[1], 2 * dim, dtype=dtype)[..., dim:].transpose(1, 2)
    cos, sin = (drawn(1 if wide else 2, 3, width, dtype=torch.float32 if wide else dtype) for _ in range(2))
    expected = reference.rotary.definition(q, k, cos, sin)
    # Two products cancel.
    tolerance = 8 * torch.finfo(dtype).eps
    for found, wanted in zip(launch.rotary(q, k, cos, sin), expected, strict=True):
        assert found.transpose(1, 2).is_contiguous()
        # The interpreter truncates to bf16.
        if wide or (dtype == torch.bfloat16 and DEVICE == "cpu"):
            torch.testing.assert_close(found, wanted, rtol=2 * torch.finfo(dtype).eps, atol=tolerance)
        else:
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_gated(activation: str, dtype: torch.dtype) -> None:
    triton_ops.require_triton()
    from triforce_tree.kernels.pointwise import launch

    both = 4 * drawn(2, 3, 2 * 2050, dtype=dtype)
    both[0, 0, :4] = torch.tensor([-100.0, 0.0, 100.0, float("nan")])
    for gate, up in (both.chunk(2, -1), (both[..., :70].contiguous(), both[..., 70:140].contiguous())):
        found = launch.gated(gate, up, activation)
        expected = reference.gated.definition(gate, up, activation)
        assert found.is_contiguous()
        torch.testing.assert_close(
            found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5, equal_nan=True
        )


def test_operators() -> None:
    q, k, cos = drawn(1, 4, 3, 8), drawn(1, 2, 3, 8), drawn(1, 3, 8)
    for overload, arguments in (
        (reference.rotary.overload, (q, k, cos, cos)),
        (reference.gated.overload, (q, q, "silu")),
    ):
        torch.library.opcheck(overload, arguments, test_utils=("test_schema", "test_faketensor"))


def test_refused() -> None:
    triton_ops.require_triton()
    from triforce_tree.kernels.pointwise import launch

    x, cos = drawn(1, 2, 3, 8), drawn(1, 3, 10)
    with pytest.raises(ValueError, match="even R of at most D"):
        launch.rotary(x, x, cos, cos)
    with pytest.raises(ValueError, match=r"q and k are torch\.float32 and"):
        launch.rotary(x, x.half(), cos[..., :8], cos[..., :8])
    with pytest.raises(ValueError, match="the activation one of silu"):
        launch.gated(x, x, "tanh")

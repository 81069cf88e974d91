"""Slots that are copied in wide elements hold the same bytes."""

import pytest
import torch
from torch import Tensor

from triforce_tree.kv.pool.pages import wide

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int8]


def slots_of(dtype: torch.dtype, *shape: int) -> Tensor:
    """Returns random bytes, NaN of any kind among them."""
    *before, last = shape
    return torch.randint(-128, 128, (*before, last * dtype.itemsize), dtype=torch.int8).view(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    one, other = (x.contiguous().view(torch.int8) for x in (a, b))
    return a.dtype == b.dtype and torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [128, 80, 64, 24, 20, 7, 1])
@pytest.mark.parametrize("chosen", [torch.tensor([4, 9, 0, 29, 7]), slice(3, 8)])
def test_slots_are_read_and_written(dtype: torch.dtype, dim: int, chosen: Tensor | slice) -> None:
    layer = slots_of(dtype, 2, 3, 30, dim)[1]
    # Tokens come before heads in the memory of what a model computes.
    values = slots_of(dtype, 5, 3, dim).transpose(0, 1)
    assert same(wide(layer)[0][:, chosen].view(dtype), layer[:, chosen])
    expected = layer.clone()
    expected[:, chosen] = values
    slots, given = wide(layer, values)
    slots[:, chosen] = given
    assert same(layer, expected)


def test_elements_are_as_wide_as_vectors_and_strides_allow() -> None:
    slots = torch.zeros(2, 10, 24, dtype=torch.bfloat16)
    others = [slots, slots[..., 4:12], slots[..., 8:16], slots[..., 2:10], slots[..., ::2], slots[:, :, :7]]
    widths = [16, 8, 16, 2, 2, 2]
    assert [wide(each)[0].dtype.itemsize for each in others] == widths
    assert [each.dtype.itemsize for each in wide(slots, slots[..., 4:12])] == [8, 8]
    assert [each.dtype for each in wide(slots, slots.half())] == [torch.bfloat16, torch.float16]

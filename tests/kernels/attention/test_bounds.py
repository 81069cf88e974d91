"""The check of what kernels read and write in the interpreter, see ``bounds``."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="runs kernels in Triton's interpreter; install triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def _copy(out_ptr, in_ptr, reads, writes, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(out_ptr + index, tl.load(in_ptr + index, mask=index < reads, other=0.0), mask=index < writes)


@triton.jit
def _first(out_ptr, in_ptr, offset):
    tl.store(out_ptr, tl.load(in_ptr + offset))


def test_whatever_lies_in_the_tensors_is_allowed() -> None:
    out, given = torch.zeros(4), torch.arange(5.0)
    _copy[(1,)](out, given, 5, 4, BLOCK=8)
    assert out.tolist() == [0.0, 1.0, 2.0, 3.0]
    _copy[(1,)](out, given[1:], 4, 4, BLOCK=8)
    assert out.tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(("reads", "writes", "access"), [(6, 4, "masked_load"), (5, 5, "masked_store")])
def test_one_element_outside_is_found(reads: int, writes: int, access: str) -> None:
    out, given = torch.zeros(4), torch.arange(5.0)
    with pytest.raises(Exception, match=f"{access} of 1 of .* elements outside the kernel's tensors"):
        _copy[(1,)](out, given, reads, writes, BLOCK=8)


@pytest.mark.parametrize("offset", [-1, 5, 2**40])
def test_scalars_are_checked(offset: int) -> None:
    with pytest.raises(Exception, match="masked_load of 1 of 1 elements outside"):
        _first[(1,)](torch.zeros(1), torch.arange(5.0), offset)

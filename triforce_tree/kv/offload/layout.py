"""The places of several tensors in one block of memory."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Self

import torch
from torch import Tensor

# Bytes: kernels and copies are fastest with aligned pointers.
_ALIGNMENT = 256


@dataclass(frozen=True)
class BlockLayout:
    """Describes tensors that lie in a block of bytes one after the other.

    Attributes:
        tensors: the shape and the dtype of each.
    """

    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> Self:
        """Returns the layout of tensors like these."""
        return cls(tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors))

    @property
    def sizes(self) -> list[int]:
        """Returns the bytes of each tensor."""
        return [prod(shape) * dtype.itemsize for shape, dtype in self.tensors]

    @property
    def bytes(self) -> int:
        """Returns the bytes of a block."""
        return sum(map(_aligned, self.sizes))

    def cut(self, block: Tensor) -> list[Tensor]:
        """Returns the tensors in a block, uint8 of at least :attr:`bytes` elements."""
        views, start = list[Tensor](), 0
        for (shape, dtype), size in zip(self.tensors, self.sizes, strict=True):
            views.append(block[start : start + size].view(dtype).view(shape))
            start += _aligned(size)
        return views


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT

"""Small tensors that the host writes and that one copy brings to a device."""

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from triforce_tree.runtime.devices import overwrite

ALIGNMENT = 16
"""Triton specialises kernels on pointers of this alignment, in bytes."""


class Packed:
    """Zeroed tensors in one buffer, on the host and on a device. A copy for each would cost a launch each.

    Args:
        device: where kernels read them. Their addresses stay, so captured graphs may hold them.
        parts: shape and dtype of each.

    Attributes:
        tensors: on the device, contiguous.
        arrays: the same on the host, which :meth:`send` copies to the device.
    """

    def __init__(self, device: torch.device, *parts: tuple[Sequence[int], torch.dtype]) -> None:
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in parts]
        starts = [0, *accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
        self._host = torch.zeros(starts[-1], dtype=torch.uint8, device="cpu")
        self._sent = torch.zeros(starts[-1], dtype=torch.uint8, device=device)

        def split(memory: Tensor) -> list[Tensor]:
            found = zip(starts, sizes, parts, strict=False)
            return [memory[at : at + size].view(dtype).view(*shape) for at, size, (shape, dtype) in found]

        self.tensors = split(self._sent)
        self.arrays: list[np.ndarray] = [part.numpy() for part in split(self._host)]

    def send(self) -> None:
        """Copies all of them to the device, without waiting for its work."""
        overwrite(self._sent, self._host)

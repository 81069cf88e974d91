"""Weights in host memory, linear layers and experts, as models see them; ``kv/offload`` implements it."""

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor


class Streamed(Protocol):
    """Weights of decoder layers that are kept in host memory, and copied to the device for each layer's call.

    Attributes:
        bytes: size of these weights.
        capturable: whether a CUDA graph can capture the copies of a forward.
    """

    bytes: int
    capturable: bool

    @property
    def slot_bytes(self) -> int:
        """Returns bytes of the device memory that they are copied into."""

    @property
    def least_slot_bytes(self) -> int:
        """Returns the same without experts that stay on the device."""

    @property
    def arrangement(self) -> int:
        """Changes with the addresses of weights on the device, which captured graphs keep."""

    def keep_experts(self, layers: int) -> None:
        """Let the experts of so many layers stay on the device once they were copied."""

    @property
    def copied(self) -> int:
        """Returns bytes copied so far."""

    def pass_bytes(self, tokens: int) -> int:
        """Returns expected bytes that a forward of ``tokens`` tokens copies."""

    def bring(self, weight: Tensor) -> None:
        """Copy a parameter to the device; called before it is read outside its layer's call."""

    def paused(self) -> AbstractContextManager[None]:
        """Returns a context in which calling a layer copies no weights, as it does not compute."""

    def check(self) -> None:
        """Raise RuntimeError if the weights have been released."""

    def close(self) -> None:
        """Release the weights' memory."""

"""The interface of weights in host memory (linear layers and experts) that models use; ``kv/offload``
implements it.
"""

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor


class Streamed(Protocol):
    """Are weights of decoder layers that are kept in host memory and copied to the device for each call of a
    layer.

    Attributes:
        bytes: size of these weights.
        capturable: whether a CUDA graph can capture the copies of a forward.
    """

    bytes: int
    capturable: bool

    @property
    def slot_bytes(self) -> int:
        """Returns the bytes of the device memory that the weights are copied into."""

    @property
    def least_slot_bytes(self) -> int:
        """Returns :meth:`slot_bytes` without the experts that stay on the device."""

    @property
    def arrangement(self) -> int:
        """Returns a number that changes with the device addresses of the weights, which captured graphs
        contain.
        """

    def keep_experts(self, layers: int) -> None:
        """Keeps the experts of ``layers`` layers on the device after they were first copied."""

    @property
    def copied(self) -> int:
        """Returns the bytes copied so far."""

    def pass_bytes(self, tokens: int) -> int:
        """Returns the expected bytes that a forward of ``tokens`` tokens copies."""

    def bring(self, weight: Tensor) -> None:
        """Copies a parameter to the device. Called before it is read outside its layer's call."""

    def paused(self) -> AbstractContextManager[None]:
        """Returns a context in which calling a layer copies no weights, for calls that do not compute."""

    def check(self) -> None:
        """Raises RuntimeError if the weights have been released."""

    def close(self) -> None:
        """Releases the weights' memory."""

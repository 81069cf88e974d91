"""A link between host and device that is slower than the machine's own, to emulate that of another card.

Before a transfer its time is written down (``begin``), and after it the stream waits until the link would
have carried the bytes (``end``). Transfers of all streams share the link of a direction, one after the other:

    end of a transfer = max(its beginning, end of the last one) + bytes / rate

So a stream never gets its bytes early, and later work of the stream waits as it would for the copy itself. On
a GPU both operators are kernels of one warp, which read the device's clock and which graphs can hold; they
know the bytes of transfers that kernels decide on. Without a limit nothing is launched.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from triforce_tree.kernels.operators import operator

_link: "Link | None" = None


class Link:
    """Carries ``rate`` bytes a second in each direction.

    Args:
        device: the device whose copies it carries.
        rate: bytes a second of a direction; a machine that is slower stays as slow as it is.
        read: bytes a second that the emulated card reads of its own memory, for plans; None for this
            device's.
    """

    def __init__(self, device: torch.device, rate: float, read: float | None = None) -> None:
        if rate < 1e6:
            raise ValueError(f"rate={rate:g} bytes a second is too slow for a link; give at least 1e6")
        self.device, self.rate, self.read = device, rate, read
        # To the device and to the host: the nanosecond at which the direction is free, the bytes carried.
        self.states = torch.zeros((2, 2), dtype=torch.int64, device=device)

    @property
    def carried(self) -> tuple[int, int]:
        """Returns the bytes carried to the device and to the host so far; waits for the device."""
        to_device, to_host = self.states[:, 1].tolist()
        return to_device, to_host


@contextmanager
def limited(link: Link) -> Iterator[Link]:
    """Lets ``link`` carry all keys, values and weights between host and device within its context.

    Graphs that are captured outside of it are not limited.
    """
    global _link
    before, _link = _link, link
    try:
        yield link
    finally:
        _link = before


def current() -> Link | None:
    """Returns the link that limits transfers now, or None."""
    return _link


def begin() -> Tensor | None:
    """Begins a transfer on the current stream; returns what :func:`end` needs, None without a limit."""
    if _link is None:
        return None
    begun = torch.empty(1, dtype=torch.int64, device=_link.device)
    begin_transfer(begun)
    return begun


def end(begun: Tensor | None, size: int, count: Tensor | None = None, to_host: bool = False) -> None:
    """Lets the current stream wait until the transfer would have ended.

    Args:
        begun: result of :func:`begin`.
        size: bytes of the transfer, or of each of its parts.
        count: int32 of any shape, on the device; their sum is the number of parts.
    """
    if begun is not None and _link is not None:
        end_transfer(_link.states[int(to_host)], begun, count, size, int(_link.rate / 1e6))


@operator("begin_transfer", writes=("begun",), triton=".link_kernels")
def begin_transfer(begun: Tensor) -> None:
    """Writes the time.

    Args:
        begun: int64 ``[1]``, receives nanoseconds.
    """
    if not begun.is_cuda:
        begun.fill_(time.perf_counter_ns())


@operator("end_transfer", writes=("state",), triton=".link_kernels")
def end_transfer(state: Tensor, begun: Tensor, count: Tensor | None, size: int, rate: int) -> None:
    """Waits until a transfer has ended.

    Args:
        state: int64 ``[2]``, the time in nanoseconds at which the direction is free, and the bytes that it
            has carried; written.
        begun: int64 ``[1]``, the time at which the transfer began.
        count: int32 of any shape, whose sum is the number of parts; None for one part.
        size: bytes of a part.
        rate: megabytes a second.
    """
    if begun.is_cuda:
        # Launches only compile now: nothing was carried, and the device's clock is another.
        return
    total = size * (1 if count is None else int(count.sum()))
    free = max(int(state[0]), int(begun)) + total * 1000 // rate
    state[0] = free
    state[1] += total
    time.sleep(max(0, free - time.perf_counter_ns()) / 1e9)

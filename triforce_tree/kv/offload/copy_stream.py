"""Copies between host and device that run beside the computation: copy streams, and a ring of device buffers.

Off the GPU there are no streams: every copy is done when it is issued.
"""

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from triforce_tree.kernels.exchange import link


class CopyStream:
    """A CUDA stream for copies.

    Args:
        device: the device whose computation the copies run beside.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, target: Tensor, source: Tensor) -> "CopyEvent":
        """Copies after all work queued on the current stream so far; returns the event of its end."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with self.as_current():
            copy_over_link(target, source)
            if self.stream is not None and source.is_cuda:
                source.record_stream(self.stream)
            return self.record_event()

    def as_current(self) -> AbstractContextManager[Any]:
        """Returns a context in which this is torch's current stream."""
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    def record_event(self) -> "CopyEvent":
        """Returns an event after all copies issued so far."""
        if self.stream is None:
            return CopyEvent(None)
        event = torch.cuda.Event()
        event.record(self.stream)
        return CopyEvent(event)

    def call(self, function: int, argument: int) -> None:
        """Runs a C function on the host after all copies issued so far; later copies wait for it.

        Args:
            function: address of a ``void f(void *)`` that makes no CUDA calls.
            argument: an address, valid until the function has run.
        """
        if self.stream is None:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(argument)
            return
        failed = _driver().cuLaunchHostFunc(self.stream.cuda_stream, function, argument)
        if failed:
            raise RuntimeError(f"cuLaunchHostFunc failed with CUresult {failed}")

    def join(self, other: "CopyStream | None" = None) -> None:
        """Lets the computation, or another copy stream, wait for all copies issued so far."""
        if self.stream is not None:
            waiting = other.stream if other is not None else torch.cuda.current_stream(self.device)
            assert waiting is not None
            waiting.wait_stream(self.stream)

    def synchronize(self) -> None:
        """Waits on the host for all copies issued so far."""
        if self.stream is not None:
            self.stream.synchronize()


def copy_over_link(target: Tensor, source: Tensor) -> None:
    """Copies between host and device on the current stream, without waiting for it."""
    begun = link.begin()
    target.copy_(source, non_blocking=True)
    link.end(begun, source.nbytes, to_host=source.is_cuda)


@cache
def _driver() -> ctypes.CDLL:
    """Returns the CUDA driver, for a call that torch does not offer."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuLaunchHostFunc.argtypes = [ctypes.c_void_p] * 3
    return driver


class CopyEvent:
    """A point in a copy stream; None where copies are done at once."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        """Lets the computation wait for it."""
        if self._event is not None:
            self._event.wait()


class BufferRing:
    """Streams a schedule of pieces in host memory through device buffers, in order.

    As many pieces as there are buffers are prefetched, across layers and, once the next schedule is given,
    across passes. A buffer may be read between ``acquire`` and ``release``; its next piece is copied when the
    device has passed ``release``.

    Args:
        count: buffers.
        shape: of one, slots and elements of a row.

    Attributes:
        bytes: copied to the device so far.
    """

    def __init__(self, count: int, shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> None:
        self.buffers = [torch.empty(tuple(shape), device=device, dtype=dtype) for _ in range(count)]
        self.copy_stream = CopyStream(device)
        self.bytes = 0
        self._ready: list[Any] = []
        self._free: list[Any] = []
        if self.copy_stream.stream is not None:
            self._ready = [torch.cuda.Event() for _ in range(count)]
            self._free = [torch.cuda.Event() for _ in range(count)]
            # The computation may still be using what this memory held before.
            self.copy_stream.stream.wait_stream(torch.cuda.current_stream(device))
        self._schedule: Sequence[Tensor] = ()
        self._issued = self._released = 0

    def start(self, schedule: Sequence[Tensor]) -> None:
        """Begins a schedule of pieces ``[n, row]`` in host memory.

        Prefetched pieces are kept where the new schedule begins with the very same memory.
        """
        ahead = self._issued - self._released
        same = self._released == 0 and all(
            a.data_ptr() == b.data_ptr() and a.shape == b.shape
            for a, b in zip(self._schedule[:ahead], schedule[:ahead], strict=False)
        )
        if not same or len(schedule) < ahead:
            self._issued = 0
            if self.copy_stream.stream is not None:
                # A pass that was interrupted may still be reading the buffers.
                self.copy_stream.stream.wait_stream(torch.cuda.current_stream(self.copy_stream.device))
        self._released = 0
        self._schedule = schedule
        while self._issued < min(len(schedule), len(self.buffers)):
            self._issue()

    def invalidate(self) -> None:
        """Drops what was prefetched: the memory on the host has changed."""
        self._schedule, self._issued, self._released = (), 0, 0

    def _issue(self) -> None:
        piece = self._schedule[self._issued]
        slot = self._issued % len(self.buffers)
        target = self.buffers[slot][: piece.shape[0]]
        stream = self.copy_stream.stream
        if stream is not None:
            stream.wait_event(self._free[slot])
        with self.copy_stream.as_current():
            copy_over_link(target, piece)
        if stream is not None:
            self._ready[slot].record(stream)
        self.bytes += piece.nbytes
        self._issued += 1

    def acquire(self) -> Tensor:
        """Returns the next piece of the schedule, on the device."""
        slot = self._released % len(self.buffers)
        if self._ready:
            self._ready[slot].wait()
        return self.buffers[slot][: self._schedule[self._released].shape[0]]

    def release(self) -> None:
        """Records that all reads of the piece acquired last are queued on the current stream."""
        slot = self._released % len(self.buffers)
        if self._free:
            self._free[slot].record()
        self._released += 1
        if self._issued < len(self._schedule):
            self._issue()

    def close(self) -> None:
        """Drops the references to the buffers and to host memory."""
        self.buffers, self._schedule = [], ()

"""Copies between host and device beside the computation: a ring of buffers coming in, a lane going out.

Off the GPU there are no streams, and every copy is done when it is asked for.
"""

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor


class CopyStream:
    """A stream of copies of its own.

    Args:
        device: whose computation the copies run beside.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, target: Tensor, source: Tensor) -> "CopyEvent":
        """Copy once all that was asked of the device so far has run; the mark is set when it is done."""
        if self.stream is None:
            target.copy_(source)
            return CopyEvent(None)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with self.running():
            target.copy_(source, non_blocking=True)
            if source.is_cuda:
                source.record_stream(self.stream)
            return self.mark()

    def running(self) -> AbstractContextManager[Any]:
        """Inside, what the device is asked for runs in this lane."""
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    def mark(self) -> "CopyEvent":
        """Set when all copies so far are done."""
        if self.stream is None:
            return CopyEvent(None)
        event = torch.cuda.Event()
        event.record(self.stream)
        return CopyEvent(event)

    def call(self, function: int, argument: int) -> None:
        """Run a C function on the host once all copies so far are done; those to come wait for it.

        Args:
            function: address of a ``void f(void *)`` that calls nothing of CUDA.
            argument: address, good until it has run.
        """
        if self.stream is None:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(argument)
            return
        failed = _driver().cuLaunchHostFunc(self.stream.cuda_stream, function, argument)
        if failed:
            raise RuntimeError(f"cuLaunchHostFunc failed with CUresult {failed}")

    def join(self, other: "CopyStream | None" = None) -> None:
        """Let the computation, or another lane, wait for all copies so far."""
        if self.stream is not None:
            waiting = other.stream if other is not None else torch.cuda.current_stream(self.device)
            assert waiting is not None
            waiting.wait_stream(self.stream)

    def synchronize(self) -> None:
        """Wait on the host."""
        if self.stream is not None:
            self.stream.synchronize()


@cache
def _driver() -> ctypes.CDLL:
    """CUDA's driver, for what torch has no call for."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuLaunchHostFunc.argtypes = [ctypes.c_void_p] * 3
    return driver


class CopyEvent:
    """A point in a lane."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        """Let the computation wait for it."""
        if self._event is not None:
            self._event.wait()


class BufferRing:
    """Device buffers that a schedule of host rows passes through, in order.

    As many pieces as there are buffers are under way ahead of the computation, across layers and, once
    the next schedule is given, across passes. What a buffer holds may be read between ``take`` and
    ``give``; the next piece comes in when the device has got past ``give``.

    Args:
        count: buffers.
        shape: of one, ``[rows, 2, H_kv, D]``.
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
        self._issued = self._taken = 0

    def start(self, schedule: Sequence[Tensor]) -> None:
        """Take up a schedule of pieces ``[n, 2, H_kv, D]`` in host memory.

        What came ahead is kept where the new schedule begins with the very same rows.
        """
        ahead = self._issued - self._taken
        same = self._taken == 0 and all(
            a.data_ptr() == b.data_ptr() and a.shape == b.shape
            for a, b in zip(self._schedule[:ahead], schedule[:ahead], strict=False)
        )
        if not same or len(schedule) < ahead:
            self._issued = 0
            if self.copy_stream.stream is not None:
                # A pass that broke off may still be reading what it took.
                self.copy_stream.stream.wait_stream(torch.cuda.current_stream(self.copy_stream.device))
        self._taken = 0
        self._schedule = schedule
        while self._issued < min(len(schedule), len(self.buffers)):
            self._issue()

    def forget(self) -> None:
        """Nothing that came ahead counts any more: the host rows have changed."""
        self._schedule, self._issued, self._taken = (), 0, 0

    def _issue(self) -> None:
        piece = self._schedule[self._issued]
        slot = self._issued % len(self.buffers)
        target = self.buffers[slot][: piece.shape[0]]
        stream = self.copy_stream.stream
        if stream is not None:
            stream.wait_event(self._free[slot])
        with self.copy_stream.running():
            target.copy_(piece, non_blocking=True)
        if stream is not None:
            self._ready[slot].record(stream)
        self.bytes += piece.nbytes
        self._issued += 1

    def take(self) -> Tensor:
        """The next piece of the schedule, on the device."""
        slot = self._taken % len(self.buffers)
        if self._ready:
            self._ready[slot].wait()
        return self.buffers[slot][: self._schedule[self._taken].shape[0]]

    def give(self) -> None:
        """The piece taken last has been read by all that was asked of the device so far."""
        slot = self._taken % len(self.buffers)
        if self._free:
            self._free[slot].record()
        self._taken += 1
        if self._issued < len(self._schedule):
            self._issue()

    def close(self) -> None:
        """Let go of the buffers and of all host rows."""
        self.buffers, self._schedule = [], ()

"""Measures the bandwidths of copies from host memory to the device and of reads of device memory."""

import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from triforce_tree.kernels.exchange import link
from triforce_tree.kv.offload.copy_stream import CopyStream
from triforce_tree.kv.offload.pinned import HostMemory

_PROBE, _PIECE = 256 << 20, 64 << 20
_REPEATS = 3


def bandwidths(device: torch.device) -> tuple[float, float]:
    """Returns the bytes per second of copies from page-locked memory, and of reads of device memory.

    They are measured once per process, or those of a link that emulates another card.
    """
    if (emulated := link.current()) is None:
        return _measured(device)
    return emulated.rate, emulated.read or read_bandwidth(device)


@cache
def _measured(device: torch.device) -> tuple[float, float]:
    return copy_bandwidth(device), read_bandwidth(device)


def copy_bandwidth(device: torch.device) -> float:
    """Returns the bytes per second of copies from page-locked memory, measured now."""
    on_gpu = device.type == "cuda"
    size, piece = (_PROBE, _PIECE) if on_gpu else (_PROBE >> 4, _PIECE >> 4)
    memory = HostMemory(locked=on_gpu)
    try:
        host = memory.take((size // piece, piece), torch.uint8)
        buffer = torch.empty(piece, dtype=torch.uint8, device=device)
        copy_stream = CopyStream(device)

        def stream(pieces: tuple[Tensor, ...] = tuple(host)) -> None:
            for source in pieces:
                copy_stream.copy(buffer, source)
            copy_stream.synchronize()

        host_to_device = size / _shortest(stream, device)
        del host, stream
    finally:
        memory.release()
    return host_to_device


@cache
def read_bandwidth(device: torch.device) -> float:
    """Returns the bytes per second of reads of device memory."""
    size = _PROBE if device.type == "cuda" else _PROBE >> 4
    data = torch.ones(size // 4, dtype=torch.float32, device=device)
    return size / _shortest(lambda: data.sum(), device)


def _shortest(work: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of the fastest of several runs, after one of warm-up."""
    times = []
    for _ in range(_REPEATS + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])

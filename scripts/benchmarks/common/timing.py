"""Clocks of any work and of short calls on a GPU, and what the machine reaches at most."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TypeVar

import torch

T = TypeVar("T")


def synchronize(device: torch.device) -> None:
    """Wait for the device, where it is one that works on its own."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(device: torch.device, work: Callable[[], T]) -> tuple[T, float]:
    """What the work returns, and its seconds, those of the device included."""
    synchronize(device)
    start = time.perf_counter()
    result = work()
    synchronize(device)
    return result, time.perf_counter() - start


def graph_us(
    calls: Sequence[Callable[[], object]], repeats: int, target_ms: float, runs: tuple[int, int]
) -> float:
    """Median microseconds of one call, all of them captured in one CUDA graph, which is replayed.

    Args:
        calls: run one after the other; on tensors that together exceed L2 where it should hold none of them.
            Each is run once before the capture, which compiles what it needs.
        repeats: of all calls in the graph.
        target_ms: how long all replays together should take.
        runs: fewest and most replays.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    each = repeats * len(calls)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / each

    replay()
    first = replay()
    least, most = runs
    return median([replay() for _ in range(int(min(most, max(least, target_ms * 1e3 / (first * each)))))])


def time_calls(calls: Sequence[Callable[[], object]], target_ms: float = 40.0) -> float:
    """Median microseconds of one call; see ``graph_us``."""
    return graph_us(calls, max(1, 16 // len(calls)), target_ms, (7, 60))


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second of a large sum, which reads everything and writes nothing."""
    size = 2**32 if device.type == "cuda" else 2**26
    data = torch.ones(size // 4, dtype=torch.float32, device=device)
    times = [timed(device, data.sum)[1] for _ in range(12 if device.type == "cuda" else 3)]
    del data
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return size / median(times[1:])

"""Clocks of any work and of short calls."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TypeVar

import torch

T = TypeVar("T")
# Milliseconds of the calls in one CUDA graph.
_GRAPH_MS = 5
# Rounds over all calls on a CPU: at least and at most so many, and seconds after which no other begins.
_LEAST_ROUNDS, _MOST_ROUNDS, _SECONDS = 3, 20, 0.5


def synchronize(device: torch.device) -> None:
    """Waits for the device, where it is one that works on its own."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(device: torch.device, work: Callable[[], T]) -> tuple[T, float]:
    """Runs the work; returns its result and its seconds, those of the device included."""
    synchronize(device)
    start = time.perf_counter()
    result = work()
    synchronize(device)
    return result, time.perf_counter() - start


def time_calls(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds of one call on a GPU, the median over replays of a CUDA graph.

    Args:
        calls: run one after the other; on tensors that together exceed L2 where it should hold none of them.
    """
    from triton.testing import do_bench_cudagraph

    def run_all() -> None:
        for call in calls:
            call()

    # The benchmark has a stream of its own, which does not wait for the tensors.
    torch.cuda.synchronize()
    took: float = do_bench_cudagraph(run_all, rep=_GRAPH_MS, return_mode="median")
    return 1e3 * took / len(calls)


def median_us(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Microseconds of one call: on a GPU by :func:`time_calls`, else the median over rounds of all calls."""
    if device.type == "cuda":
        return time_calls(calls)
    rounds: list[float] = []
    calls[0]()
    begun = time.perf_counter()
    while len(rounds) < _LEAST_ROUNDS or (
        len(rounds) < _MOST_ROUNDS and time.perf_counter() - begun < _SECONDS
    ):
        start = time.perf_counter()
        for call in calls:
            call()
        rounds.append(time.perf_counter() - start)
    return 1e6 * median(rounds) / len(calls)

"""The executor of a stage: CUDA graphs over fixed buffers where work can be captured, else direct calls.

Capture happens when a decoder is made, never in the middle of a text. Off the GPU all calls are direct.
"""

import gc
from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import torch

# Before a capture everything must have been compiled, tuned and allocated once.
_WARM_UPS = 2


def free_memory() -> None:
    """Give back what nobody uses: captured graphs and their buffers refer to each other, so they go only when
    they are collected."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures: libraries keep a workspace for every stream they have seen, for good."""
    return torch.cuda.Stream(device)


class Step(NamedTuple):
    """A part of a stage.

    Attributes:
        run: zero-argument callable over fixed buffers.
        capturable: it never waits for the device, allocates nothing that outlives it, and does the same work
            each time.
    """

    run: Callable[[], None]
    capturable: bool = True


def executor(steps: Sequence[Step], device: torch.device) -> Callable[[], None]:
    """A zero-argument callable that runs ``steps`` in order: each run of capturable ones is one CUDA graph.

    A capturable step must find what earlier steps left at the same addresses each time.
    """
    if device.type != "cuda":
        return _sequence([step.run for step in steps])
    parts: list[Callable[[], None]] = []
    for capturable, group in groupby(steps, key=lambda step: step.capturable):
        run = _sequence([step.run for step in group])
        # A pool of its own: what a graph leaves behind stays there until its next run.
        parts.append(Captured(run, device, torch.cuda.graph_pool_handle()) if capturable else run)
    return _sequence(parts)


def _sequence(parts: Sequence[Callable[[], None]]) -> Callable[[], None]:
    if len(parts) == 1:
        return parts[0]

    def run() -> None:
        for part in parts:
            part()

    return run


class Captured:
    """A zero-argument callable, as a CUDA graph where there is a GPU.

    Args:
        run: reads and writes tensors at fixed addresses, and never waits for the device.
        device: where.
        pool: memory pool; graphs that run at different levels get pools of their own, so that what one
            leaves behind stays there until its next run.
    """

    def __init__(self, run: Callable[[], None], device: torch.device, pool: Any = None) -> None:
        self._run = run
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type != "cuda":
            return
        side = _side_stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                run()
        torch.cuda.current_stream(device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # Of this thread alone: where several cards work together, NCCL's watchdog asks after its events from
        # another one, which would break a capture of the whole process.
        captured = torch.cuda.graph(self._graph, pool=pool, stream=side, capture_error_mode="thread_local")
        with torch.no_grad(), captured:
            run()

    def __call__(self) -> None:
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()

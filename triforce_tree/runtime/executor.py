"""The executor of a stage: CUDA graphs over fixed buffers for steps that can be captured, else direct calls.

Capture happens when a decoder is made, never while it decodes. Without a GPU all calls are direct.
"""

import gc
from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import torch

# Everything must be compiled, tuned and allocated before a capture.
_WARM_UPS = 2


def free_memory() -> None:
    """Free unused memory: captured graphs and their buffers form reference cycles, which only the garbage
    collector frees."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all captures: libraries keep a workspace for every stream that was ever used."""
    return torch.cuda.Stream(device)


_workspaces: dict[torch.device, torch.cuda.CUDAGraph] = {}


def _hold_workspace(device: torch.device, stream: torch.cuda.Stream) -> None:
    """Place the workspace of cuBLAS for ``stream`` in memory that nothing else can be given.

    A captured product writes into the workspace of its capture. torch.compile with CUDA graphs frees all
    workspaces: afterwards the memory would be other tensors', or not mapped at all when a graph is replayed.
    In the pool of a graph that is kept it stays mapped, and only captures in this pool can get it.
    """
    operand = torch.zeros(16, 16, device=device)
    # A handle cannot be made in a capture.
    torch.mm(operand, operand)
    kept = _workspaces.get(device)
    graph = torch.cuda.CUDAGraph()
    pool = None if kept is None else kept.pool()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        torch.mm(operand, operand)
    _workspaces.setdefault(device, graph)


class Step(NamedTuple):
    """A part of a stage.

    Attributes:
        run: zero-argument callable over fixed buffers.
        capturable: whether it never waits for the device, allocates nothing that is used after it, and does
            the same work each time.
    """

    run: Callable[[], None]
    capturable: bool = True


def executor(steps: Sequence[Step], device: torch.device) -> Callable[[], None]:
    """A zero-argument callable that runs ``steps`` in order.

    On a GPU consecutive capturable steps are one CUDA graph; all other steps are called directly.
    The inputs that a capturable step reads from earlier steps must be at the same addresses each time.
    """
    if device.type != "cuda":
        return _sequence([step.run for step in steps])
    parts: list[Callable[[], None]] = []
    for capturable, group in groupby(steps, key=lambda step: step.capturable):
        run = _sequence([step.run for step in group])
        # A pool of its own keeps a graph's outputs until its next run.
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
    """A zero-argument callable, on a GPU captured as a CUDA graph.

    Args:
        run: reads and writes tensors at fixed addresses, and never waits for the device.
        device: that it runs on.
        pool: memory pool; a graph with a pool of its own keeps its outputs until its next run.
    """

    def __init__(self, run: Callable[[], None], device: torch.device, pool: Any = None) -> None:
        self._run = run
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type != "cuda":
            return
        side = _side_stream(device)
        _hold_workspace(device, side)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                run()
        torch.cuda.current_stream(device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # thread_local: with several GPUs NCCL's watchdog queries events from its own thread, which would
        # invalidate a capture in the global mode.
        capture = torch.cuda.graph(self._graph, pool=pool, stream=side, capture_error_mode="thread_local")
        with torch.no_grad(), capture:
            run()

    def __call__(self) -> None:
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()

"""CUDA graphs: a stage over fixed buffers, captured once and replayed.

Capture happens when a decoder is made, never in the middle of a text. Off the GPU a stage simply runs.
"""

import gc
from collections.abc import Callable
from functools import cache
from typing import Any

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


class Captured:
    """A function of nothing, as a CUDA graph where there is a GPU.

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

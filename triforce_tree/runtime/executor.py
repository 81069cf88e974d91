"""The executor of a stage: CUDA graphs over fixed buffers for steps that can be captured, else direct calls.

Steps that can be captured but for some work in them, such as attention to streamed keys and values, become
graphs with this work between them (piecewise CUDA graphs).

Capture happens when a decoder is made; in pieces also while it decodes, where what they depend on has
changed. Without a GPU all calls are direct.
"""

import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
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


# By device: the graph whose pool holds the workspace, and the last one that was captured in it.
_workspaces: dict[torch.device, list[torch.cuda.CUDAGraph]] = {}


def _hold_workspace(device: torch.device, stream: torch.cuda.Stream) -> None:
    """Place the workspace of cuBLAS for ``stream`` in memory that nothing else can be given.

    A captured product writes into the workspace of its capture. torch.compile with CUDA graphs frees all
    workspaces; from torch 2.12 on, each graph that is destroyed frees those of the stream it was captured on
    (https://github.com/pytorch/pytorch/issues/193402). Afterwards the memory would be other tensors', or not
    mapped at all when a graph is replayed. In the pool of a graph that is kept it stays mapped, and only
    captures in this pool can get it. Until the capture that follows has ended no graph may be destroyed.
    """
    operand = torch.zeros(16, 16, dtype=torch.float32, device=device)
    # A handle cannot be made in a capture.
    torch.mm(operand, operand)
    held = _workspaces.setdefault(device, [])
    del held[1:]
    graph = torch.cuda.CUDAGraph()
    pool = held[0].pool() if held else None
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        torch.mm(operand, operand)
    held.append(graph)


@contextmanager
def _captures(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """The stream of captures, with cuBLAS's workspace held for it; inside, no graph may be destroyed.

    The garbage collector, which could destroy one or free memory of the device, is off from before the
    workspace is held.
    """
    side, collects = _side_stream(device), gc.isenabled()
    gc.disable()
    try:
        _hold_workspace(device, side)
        with torch.no_grad():
            yield side
    finally:
        if collects:
            gc.enable()


class Cuts:
    """Where a step does work that a CUDA graph cannot hold, and what its graphs depend on.

    Args:
        key: of what varies from call to call and is built into the graphs, which are recorded anew for each.
    """

    def __init__(self, key: Callable[[], Hashable]) -> None:
        self.key = key
        self._recording: _Recording | None = None

    def outside(self, work: Callable[[], None]) -> None:
        """Do such work: now, and in later calls of a recorded step between two graphs.

        Args:
            work: reads and writes tensors of the step at fixed addresses.
        """
        if self._recording is None:
            work()
        else:
            self._recording.cut(work)

    @contextmanager
    def recorded(self, recording: "_Recording") -> Iterator[None]:
        """Inside, work is recorded too."""
        self._recording = recording
        try:
            yield
        finally:
            self._recording = None


class Step(NamedTuple):
    """A part of a stage.

    Attributes:
        run: zero-argument callable over fixed buffers.
        capturable: whether it never waits for the device, allocates nothing that is used after it, and does
            the same work each time; or where not.
    """

    run: Callable[[], None]
    capturable: bool | Cuts = True


def executor(steps: Sequence[Step], device: torch.device) -> Callable[[], None]:
    """A zero-argument callable that runs ``steps`` in order.

    On a GPU consecutive capturable steps are one CUDA graph, those with the same cuts one sequence of graphs,
    and all other steps are called directly.
    The inputs that a capturable step reads from earlier steps must be at the same addresses each time.
    """
    if device.type != "cuda":
        return _sequence([step.run for step in steps])
    parts: list[Callable[[], None]] = []
    for capturable, group in groupby(steps, key=lambda step: step.capturable):
        run = _sequence([step.run for step in group])
        if isinstance(capturable, Cuts):
            run = CapturedInPieces(run, capturable, device)
        elif capturable:
            # A pool of its own keeps a graph's outputs until its next run.
            run = Captured(run, device, torch.cuda.graph_pool_handle())
        parts.append(run)
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
        self._graph = torch.cuda.CUDAGraph()
        with _captures(device) as side:
            self._capture(self._graph, side, pool)

    def _capture(self, graph: torch.cuda.CUDAGraph, side: torch.cuda.Stream, pool: Any) -> None:
        current = torch.cuda.current_stream(side.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._run()
        current.wait_stream(side)
        # thread_local: with several GPUs NCCL's watchdog queries events from its own thread, which would
        # invalidate a capture in the global mode.
        with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
            self._run()

    def __call__(self) -> None:
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()


class CapturedInPieces:
    """A zero-argument callable as CUDA graphs, with the work of its cuts between them.

    The first call with a key is direct: it compiles kernels and allocates what stays. The second is recorded:
    each piece is captured and replayed before the work that follows, so that it does what any call does. From
    then on pieces are replayed.

    Args:
        run: as for :class:`Captured`, except in the work of its cuts.
        cuts: of all its steps.
        device: a GPU.
    """

    def __init__(self, run: Callable[[], None], cuts: Cuts, device: torch.device) -> None:
        self._run, self._cuts, self._device = run, cuts, device
        self._key: Hashable = None
        self._parts: list[Callable[[], None]] = []

    def __call__(self) -> None:
        key = self._cuts.key()
        if key != self._key:
            # Pieces of another key must not be replayed; before this call is done all may not be compiled.
            self._key, self._parts = None, []
            self._run()
            self._key = key
        elif not self._parts:
            self._parts = self._record()
        else:
            for part in self._parts:
                part()

    def _record(self) -> list[Callable[[], None]]:
        # A pool of its own: one whose graphs were all dropped cannot be captured into again.
        recording = _Recording(torch.cuda.graph_pool_handle())
        current = torch.cuda.current_stream(self._device)
        with _captures(self._device) as side:
            side.wait_stream(current)
            try:
                with torch.cuda.stream(side), self._cuts.recorded(recording):
                    recording.run(self._run)
            finally:
                # Also after an error: what is freed there may still be read on the side stream.
                current.wait_stream(side)
        return recording.parts


class _Recording:
    """Graphs and the work between them, in order, as one call makes them.

    Args:
        pool: of memory, for all graphs: they run one after the other.
    """

    def __init__(self, pool: Any) -> None:
        self.parts: list[Callable[[], None]] = []
        self._pool = pool
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, call: Callable[[], None]) -> None:
        """Record a call; where it fails, nothing stays in capture."""
        self._begin()
        try:
            call()
            self._end()
        except BaseException:
            if self._graph is not None:
                with suppress(RuntimeError):
                    self._graph.capture_end()
            raise

    def cut(self, work: Callable[[], None]) -> None:
        """End a piece, do the work that follows, and begin the next piece."""
        self._end()
        self.parts.append(work)
        work()
        self._begin()

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def _end(self) -> None:
        graph, self._graph = self._graph, None
        assert graph is not None, "no piece was begun"
        graph.capture_end()
        graph.replay()
        self.parts.append(graph.replay)

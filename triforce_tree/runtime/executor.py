"""Runs the steps of a stage: as CUDA graphs over fixed buffers if they can be captured, else by direct calls.

If part of a step cannot be captured, such as attention to keys and values streamed from host memory, the step
becomes several graphs with this part called between them (piecewise CUDA graphs).

Graphs are captured when a decoder is prepared. Piecewise graphs are captured again during decoding when their
key changes. Without a GPU all calls are direct.
"""

import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import torch

# Free bytes of a device below which memory that torch keeps for later tensors is freed before a capture:
# during a capture torch cannot free it.
_ROOM = 2 << 30
_warms_up = ContextVar("warms_up", default=False)


def free_memory() -> None:
    """Frees unused memory, including captured graphs, whose reference cycles need the garbage collector."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def warms_up() -> bool:
    """Returns whether this thread runs a step for what only its first call does, such as loading kernels.

    The results are not used, so one of several equal parts is enough.
    """
    return _warms_up.get()


def _make_room(device: torch.device) -> None:
    """Frees memory that torch keeps for later tensors, if a capture might need it."""
    free, total = torch.cuda.mem_get_info(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    allowed = int(torch.cuda.get_per_process_memory_fraction(index) * total)
    if min(free, allowed - torch.cuda.memory_reserved(device)) < _ROOM:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


@contextmanager
def _recorded(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any) -> Iterator[None]:
    """Captures the work inside the context.

    ``torch.cuda.graph`` also waits for the device and frees all unused memory, which takes longer.
    """
    with torch.cuda.stream(stream):
        # With several GPUs NCCL's watchdog thread queries events, which would invalidate a capture in the
        # mode "global".
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the one stream for all captures, since libraries keep a workspace for each stream ever used."""
    return torch.cuda.Stream(device)


# For each device the graph whose memory pool has the workspace, and the last graph captured in this pool.
_workspaces: dict[torch.device, list[torch.cuda.CUDAGraph]] = {}


def _hold_workspace(device: torch.device, stream: torch.cuda.Stream) -> None:
    """Allocates the workspace of cuBLAS for ``stream`` in the memory pool of a graph that is never destroyed.

    A captured matrix product writes into the workspace of its capture. torch.compile with CUDA graphs frees
    all workspaces; from torch 2.12 on, each graph that is destroyed frees the workspaces of the stream it was
    captured on (https://github.com/pytorch/pytorch/issues/193402). A replayed graph would then write into
    other tensors or unmapped memory. In the pool of a graph that is kept the memory stays mapped and is never
    given to tensors. No graph may be destroyed between this call and the end of the next capture.
    """
    operand = torch.zeros(16, 16, dtype=torch.float32, device=device)
    # A cuBLAS handle cannot be created during a capture.
    torch.mm(operand, operand)
    held = _workspaces.setdefault(device, [])
    del held[1:]
    graph = torch.cuda.CUDAGraph()
    with _recorded(graph, stream, held[0].pool() if held else None):
        torch.mm(operand, operand)
    held.append(graph)


@contextmanager
def _captures(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """Yields the stream for captures, after its cuBLAS workspace was allocated by ``_hold_workspace``.

    No graph may be destroyed inside the context. The garbage collector, which could do so, is off.
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
    """Marks the work in a step that a CUDA graph cannot capture.

    Args:
        key: returns a key of everything that is fixed in the graphs but may differ in a later call. The
            graphs are captured again when the key changes.
    """

    def __init__(self, key: Callable[[], Hashable]) -> None:
        self.key = key
        self._recording: _Recording | None = None

    def outside(self, work: Callable[[], None]) -> None:
        """Calls ``work``; during a recording it is also stored, to be called between two graphs in replays.

        Args:
            work: reads and writes tensors of the step at fixed addresses.
        """
        if self._recording is None:
            work()
        else:
            self._recording.cut(work)

    @contextmanager
    def recorded(self, recording: "_Recording") -> Iterator[None]:
        """Adds work passed to :meth:`outside` to ``recording`` inside the context."""
        self._recording = recording
        try:
            yield
        finally:
            self._recording = None


class Step(NamedTuple):
    """A part of a stage.

    Attributes:
        run: a function without arguments that works on fixed buffers.
        capturable: True if ``run`` never waits for the device, allocates nothing that is used after it, and
            does the same work in each call; :class:`Cuts` if this holds except for marked work; else False.
    """

    run: Callable[[], None]
    capturable: bool | Cuts = True


def executor(steps: Sequence[Step], device: torch.device) -> Callable[[], None]:
    """Returns a function without arguments that runs ``steps`` in order, see :func:`executed_parts`."""
    return _sequence(executed_parts(steps, device))


def graph_pool(device: torch.device) -> "torch.cuda.MemPool | None":
    """Returns memory for the tensors that graphs make; None without a GPU.

    Graphs that share it must never run at the same time. A tensor that a graph has made, and that is still
    referenced, keeps its values until a graph runs that was captured before it.
    """
    return torch.cuda.MemPool() if device.type == "cuda" else None


def executed_parts(
    steps: Sequence[Step], device: torch.device, pool: "torch.cuda.MemPool | None" = None
) -> list[Callable[[], None]]:
    """Returns functions without arguments whose calls in order run ``steps``.

    On a GPU consecutive capturable steps become one CUDA graph, consecutive steps with the same cuts become
    one sequence of graphs, and all other steps are called directly. Inputs that a capturable step reads from
    earlier steps must have the same addresses in each call.

    Args:
        pool: memory of the graphs, see :func:`graph_pool`; by default each has its own.
    """
    if device.type != "cuda":
        return [step.run for step in steps]
    parts: list[Callable[[], None]] = []
    for capturable, group in groupby(steps, key=lambda step: step.capturable):
        run = _sequence([step.run for step in group])
        if isinstance(capturable, Cuts):
            run = CapturedInPieces(run, capturable, device)
        elif capturable:
            run = Captured(run, device, pool.id if pool is not None else None)
        parts.append(run)
    return parts


def _sequence(parts: Sequence[Callable[[], None]]) -> Callable[[], None]:
    if len(parts) == 1:
        return parts[0]

    def run() -> None:
        for part in parts:
            part()

    return run


class Captured:
    """Captures ``run`` as a CUDA graph and replays it in each call; without a GPU it calls ``run``.

    Args:
        run: reads and writes tensors at fixed addresses, and never waits for the device. It is first called
            directly, where it may leave out work (:func:`warms_up`).
        device: the device that it runs on.
        pool: id of the memory pool of the graph; by default it has its own.
    """

    def __init__(self, run: Callable[[], None], device: torch.device, pool: Any = None) -> None:
        self._run = run
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type != "cuda":
            return
        self._graph = torch.cuda.CUDAGraph()
        _make_room(device)
        with _captures(device) as side:
            self._capture(self._graph, side, pool)

    def _capture(self, graph: torch.cuda.CUDAGraph, side: torch.cuda.Stream, pool: Any) -> None:
        current = torch.cuda.current_stream(side.device)
        side.wait_stream(current)
        token = _warms_up.set(True)
        try:
            with torch.cuda.stream(side):
                # In the direct call everything is compiled, tuned and allocated.
                self._run()
        finally:
            _warms_up.reset(token)
        current.wait_stream(side)
        with _recorded(graph, side, pool):
            self._run()

    def __call__(self) -> None:
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()


class CapturedInPieces:
    """Captures ``run`` as several CUDA graphs with the work of its cuts between them.

    The first call with a key is direct: it compiles kernels and allocates lasting buffers. The second call is
    recorded: each piece is captured and replayed before the work that follows it, so that the call has its
    normal effect. All further calls replay the pieces.

    Args:
        run: as for :class:`Captured`, except for work passed to ``cuts.outside``.
        cuts: the cuts of all steps in ``run``.
        device: a GPU.
        pool: the memory pool of the graphs, of which others may never be destroyed before; by default a new
            one for each recording.
    """

    def __init__(self, run: Callable[[], None], cuts: Cuts, device: torch.device, pool: Any = None) -> None:
        self._run, self._cuts, self._device, self._pool = run, cuts, device, pool
        self._key: Hashable = None
        self._parts: list[Callable[[], None]] = []

    def __call__(self) -> None:
        key = self._cuts.key()
        if key != self._key:
            # The key is set only after the direct call, so that a call that failed is not recorded next.
            self._key, self._parts = None, []
            self._run()
            self._key = key
        elif not self._parts:
            self._parts = self._record()
        else:
            for part in self._parts:
                part()

    def _record(self) -> list[Callable[[], None]]:
        # A new pool is needed, since a pool whose graphs were all destroyed cannot be used for a capture.
        recording = _Recording(self._pool or torch.cuda.graph_pool_handle())
        current = torch.cuda.current_stream(self._device)
        with _captures(self._device) as side:
            side.wait_stream(current)
            try:
                with torch.cuda.stream(side), self._cuts.recorded(recording):
                    recording.run(self._run)
            finally:
                # Needed after an error too: the side stream may still read memory that is freed now.
                current.wait_stream(side)
        return recording.parts


class _Recording:
    """Records one call as a list of graphs and the work between them.

    Args:
        pool: memory pool that all graphs share, which is possible because they run in order.
    """

    def __init__(self, pool: Any) -> None:
        self.parts: list[Callable[[], None]] = []
        self._pool = pool
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, call: Callable[[], None]) -> None:
        """Records a call. If the call fails, the capture is ended."""
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
        """Ends a piece, calls the work that follows, and begins the next piece."""
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

"""A data-race detector for CUDA streams, off the GPU, by vector clocks.

Inside :func:`watched` copy streams have simulated streams. They run nothing in parallel, but record every
access of every operation with the vector clock of its stream. Two accesses to the same bytes from two
streams, one of them a write, are a race unless an event, a wait, or a synchronization of the host orders
them. Not detected: memory that is freed while a copy stream still uses it, accesses inside captured graphs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from triforce_tree.kernels.attention import prefill
from triforce_tree.kv.offload import copy_stream
from triforce_tree.kv.offload.host_attention import HostAttention
from triforce_tree.models import attention
from triforce_tree.runtime.sequence_state import SequenceState


class Access(NamedTuple):
    """Bytes ``[start, stop)`` that an operation of a stream, its ``time``-th, read or wrote."""

    start: int
    stop: int
    stream: int
    time: int
    write: bool
    what: str

    def overlaps(self, other: "Access") -> bool:
        return self.start < other.stop and other.start < self.stop

    def inside(self, other: "Access") -> bool:
        return other.start <= self.start and self.stop <= other.stop


class Stream:
    """Implements what this package uses of torch.cuda.Stream; number 0 is the computation's."""

    def __init__(self, watch: "Watch") -> None:
        self.watch, self.number = watch, len(watch.clocks)
        watch.clocks.append({})

    def wait_stream(self, other: "Stream") -> None:
        self.watch.order_after(self.number, self.watch.clocks[other.number])

    def wait_event(self, event: "Event") -> None:
        self.watch.order_after(self.number, event.clock)

    def synchronize(self) -> None:
        self.watch.host_waits(self)


class Event:
    """Implements what this package uses of torch.cuda.Event."""

    def __init__(self, watch: "Watch") -> None:
        self.watch, self.clock = watch, {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict(self.watch.clocks[(stream or self.watch.current[-1]).number])

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.watch.current[-1]).wait_event(self)


class Watch(TorchDispatchMode):
    """Records what operations read and write.

    Attributes:
        races: pairs of accesses that nothing orders.
        seen: the number of accesses of every stream.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clocks: list[dict[int, int]] = []
        self.current = [Stream(self)]
        self.races: list[tuple[Access, Access]] = []
        self.seen: dict[int, int] = {}
        self._host: dict[int, int] = {}
        self._accesses: dict[int, list[Access]] = {}
        # Keeps freed memory from being reused for other tensors.
        self._kept: list[Any] = []

    def order_after(self, stream: int, clock: dict[int, int]) -> None:
        """Later operations of the stream come after those that the clock counts."""
        own = self.clocks[stream]
        for other, time in clock.items():
            own[other] = max(own.get(other, 0), time)

    def host_waits(self, stream: Stream) -> None:
        """Everything that the host issues from now on comes after all that the stream has run."""
        for other, time in self.clocks[stream.number].items():
            self._host[other] = max(self._host.get(other, 0), time)

    @contextmanager
    def inside(self, stream: Stream) -> Iterator[None]:
        self.current.append(stream)
        try:
            yield
        finally:
            self.current.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.triforce_tree.planned_attend.default:
            # Dispatch modes do not see inside custom operators, and this one does all the work of a pass.
            with self:
                return attention._attend.definition(*args, **kwargs)
        if not func.is_view:
            self._record(func, args, kwargs)
        return func(*args, **kwargs)

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        stream = self.current[-1].number
        clock = self.clocks[stream]
        self.order_after(stream, self._host)
        clock[stream] = clock.get(stream, 0) + 1
        for number, argument in enumerate(func._schema.arguments):
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            write = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in value if isinstance(value, list | tuple) else [value]:
                if isinstance(tensor, Tensor) and tensor.numel():
                    self._access(tensor, stream, write, str(func))

    def _access(self, tensor: Tensor, stream: int, write: bool, what: str) -> None:
        clock, storage = self.clocks[stream], tensor.untyped_storage()
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.data_ptr()
        new = Access(start, start + (last + 1) * tensor.itemsize, stream, clock[stream], write, what)
        self.seen[stream] = self.seen.get(stream, 0) + 1
        if storage.data_ptr() not in self._accesses:
            self._kept.append(storage)
        earlier = self._accesses.setdefault(storage.data_ptr(), [])
        # What is ordered after this access is ordered after those as well that it covers.
        left = []
        for old in earlier:
            if clock.get(old.stream, 0) < old.time:
                if (old.write or write) and old.overlaps(new):
                    self.races.append((old, new))
                left.append(old)
            elif not (old.inside(new) and (write or not old.write)):
                left.append(old)
        earlier[:] = [*left, new]


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Inside, copy streams have simulated streams whose accesses are recorded."""
    watch = Watch()

    def with_stream(copies: copy_stream.CopyStream, device: torch.device) -> None:
        copies.device, copies.stream = device, Stream(watch)

    attend, report = HostAttention._attend, SequenceState.pass_results

    def in_its_copy_stream(attention: HostAttention, *args: Any) -> None:
        with attention._copy_stream.as_current():
            attend(attention, *args)

    def synchronized(state: SequenceState) -> Tensor:
        result = report(state)
        watch.host_waits(watch.current[0])
        return result

    with monkeypatch.context() as patch, watch:
        patch.setattr(copy_stream.CopyStream, "__init__", with_stream)
        patch.setattr(HostAttention, "_attend", in_its_copy_stream)
        patch.setattr(SequenceState, "pass_results", synchronized)
        patch.setattr(torch.cuda, "Event", lambda: Event(watch))
        patch.setattr(torch.cuda, "stream", watch.inside)
        patch.setattr(torch.cuda, "current_stream", lambda _: watch.current[-1])
        patch.setattr(Tensor, "record_stream", lambda *_: None)
        # Makes a tensor subclass, whose construction dispatch modes do not see.
        patch.setattr(
            prefill, "causal_lower_right", lambda t, s: torch.ones(t, s, dtype=torch.bool).tril(s - t)
        )
        yield watch

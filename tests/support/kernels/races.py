"""A data-race detector for CUDA streams that needs no GPU: memory accesses ordered by vector clocks.

Inside :func:`watched` copy streams execute sequentially, but every access of every operation is recorded with
the vector clock of its stream. Two accesses to the same bytes from two streams, one of them a write, are a
race unless an event, a stream wait, or a wait of the host orders them. Not detected: memory that is freed
while a copy stream still uses it, and accesses inside captured graphs.
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
from triforce_tree.models import step_model
from triforce_tree.runtime.sequence_state import SequenceState


class Access(NamedTuple):
    """Bytes ``[start, stop)`` that the ``time``-th operation of a stream read or wrote."""

    start: int
    stop: int
    stream: int
    time: int
    write: bool
    what: str

    def meets(self, other: "Access") -> bool:
        return self.start < other.stop and other.start < self.stop

    def inside(self, other: "Access") -> bool:
        return other.start <= self.start and self.stop <= other.stop


class Stream:
    """The methods of torch.cuda.Stream that the package uses; number 0 is the compute stream."""

    def __init__(self, watch: "Watch") -> None:
        self.watch, self.number = watch, len(watch.clocks)
        watch.clocks.append({})

    def wait_stream(self, other: "Stream") -> None:
        self.watch.learn(self.number, self.watch.clocks[other.number])

    def wait_event(self, event: "Event") -> None:
        self.watch.learn(self.number, event.clock)

    def synchronize(self) -> None:
        self.watch.host_waits(self)


class Event:
    """The methods of torch.cuda.Event that the package uses."""

    def __init__(self, watch: "Watch") -> None:
        self.watch, self.clock = watch, {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict(self.watch.clocks[(stream or self.watch.current[-1]).number])

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.watch.current[-1]).wait_event(self)


class Watch(TorchDispatchMode):
    """Records what operations read and write.

    Attributes:
        races: pairs of unordered accesses.
        seen: number of accesses of every stream.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clocks: list[dict[int, int]] = []
        self.current = [Stream(self)]
        self.races: list[tuple[Access, Access]] = []
        self.seen: dict[int, int] = {}
        self._host: dict[int, int] = {}
        self._accesses: dict[int, list[Access]] = {}
        # Kept alive, since freed memory could be reused by another tensor.
        self._kept: list[Any] = []

    def learn(self, stream: int, clock: dict[int, int]) -> None:
        own = self.clocks[stream]
        for other, time in clock.items():
            own[other] = max(own.get(other, 0), time)

    def host_waits(self, stream: Stream) -> None:
        """Order all later operations after everything that the stream has run."""
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
            # Dispatch modes do not see inside custom operators, and this one runs a whole forward.
            with self:
                return step_model._attend._init_fn(*args, **kwargs)
        if not func.is_view:
            self._note(func, args, kwargs)
        return func(*args, **kwargs)

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        stream = self.current[-1].number
        clock = self.clocks[stream]
        self.learn(stream, self._host)
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
        before = [clock.get(old.stream, 0) >= old.time for old in earlier]
        self.races += [
            (old, new)
            for old, known in zip(earlier, before, strict=True)
            if not known and (old.write or write) and old.meets(new)
        ]
        # What is ordered after this access is also ordered after the ones dropped here.
        earlier[:] = [
            old
            for old, known in zip(earlier, before, strict=True)
            if not (known and old.inside(new) and (write or not old.write))
        ] + [new]


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """A context in which copy streams are simulated and all accesses are recorded."""
    watch = Watch()

    def with_stream(stream: copy_stream.CopyStream, device: torch.device) -> None:
        stream.device, stream.stream = device, Stream(watch)

    answer, report = HostAttention._answer, SequenceState.report

    def in_its_copy_stream(attention: HostAttention, *args: Any) -> None:
        with attention._copy_stream.running():
            answer(attention, *args)

    def waited_for(state: SequenceState) -> Tensor:
        made = report(state)
        watch.host_waits(watch.current[0])
        return made

    with monkeypatch.context() as patch, watch:
        patch.setattr(copy_stream.CopyStream, "__init__", with_stream)
        patch.setattr(HostAttention, "_answer", in_its_copy_stream)
        patch.setattr(SequenceState, "report", waited_for)
        patch.setattr(torch.cuda, "Event", lambda: Event(watch))
        patch.setattr(torch.cuda, "stream", watch.inside)
        patch.setattr(torch.cuda, "current_stream", lambda _: watch.current[-1])
        patch.setattr(Tensor, "record_stream", lambda *_: None)
        # A tensor subclass, which dispatch modes cannot see being made.
        patch.setattr(
            prefill, "causal_lower_right", lambda t, s: torch.ones(t, s, dtype=torch.bool).tril(s - t)
        )
        yield watch

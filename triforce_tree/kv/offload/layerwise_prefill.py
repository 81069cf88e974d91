"""Prefill layer by layer: all of a prompt through one decoder layer, then through the next.

Chunk by chunk through all layers, as prompts are usually fed, every chunk would read all earlier rows of
every layer, and far from the device each of these readings crosses the bus. Layer by layer a layer's rows
are read while they are all on the device, and cross the bus once, on their way out. It takes one layer's
rows and one hidden state a token as memory, the latter on the host where the device has no room for it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from triforce_tree.kernels.attention.prefill import causal_attention
from triforce_tree.kv.offload.copy_stream import CopyEvent, CopyStream
from triforce_tree.kv.offload.pinned import HostMemory
from triforce_tree.kv.prefill import SequenceRows
from triforce_tree.models.attention import AttentionParams
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.step_model import decoder_layers
from triforce_tree.runtime.stats import Progress


class Sink(Protocol):
    """What keeps the rows of a prefill.

    Attributes:
        places: of each layer of the model, the number that it goes by here; None for one with a window.
    """

    @property
    def places(self) -> Sequence[int | None]: ...

    def windowed(self) -> SequenceRows:
        """What keeps the rows of layers with a window."""

    def buffer(self, rows: int) -> Tensor:
        """Room for one layer's rows ``[rows, 2, H_kv, D]``, which every layer without a window overwrites."""

    def part(self, layer: int, start: int, rows: Tensor) -> Callable[[], None]:
        """The buffer's rows from ``start`` on hold ``layer``'s.

        Returns:
            lets the computation wait until these rows may be overwritten.
        """

    def whole(self, layer: int, rows: Tensor) -> None:
        """All rows of ``layer`` are in the buffer; read at once what is wanted of them."""


class States(Protocol):
    """The hidden states between two layers, ``[1, n, hidden]`` of each chunk."""

    def put(self, chunk: int, hidden: Tensor) -> None: ...

    def take(self, chunk: int) -> Tensor: ...


class DeviceStates:
    """On the device."""

    def __init__(self) -> None:
        self._hidden: dict[int, Tensor] = {}

    def put(self, chunk: int, hidden: Tensor) -> None:
        self._hidden[chunk] = hidden

    def take(self, chunk: int) -> Tensor:
        return self._hidden.pop(chunk)


class ReservedStates:
    """On the device, in memory that has another use later.

    Args:
        memory: contiguous, of the hidden states' dtype.
        chunk: tokens of each chunk but the last.
    """

    def __init__(self, memory: Tensor, chunk: int) -> None:
        self._memory, self._chunk = memory.view(-1), chunk
        self._shapes: dict[int, torch.Size] = {}

    def put(self, chunk: int, hidden: Tensor) -> None:
        self._shapes[chunk] = hidden.shape
        self._place(chunk).copy_(hidden)

    def take(self, chunk: int) -> Tensor:
        return self._place(chunk)

    def _place(self, chunk: int) -> Tensor:
        shape = self._shapes[chunk]
        start = chunk * self._chunk * shape[-1]
        return self._memory[start : start + shape.numel()].view(shape)


class HostStates:
    """In host memory: while one chunk is at work the next one's come, and the last one's leave.

    Args:
        tokens: of the whole prompt.
        chunk: tokens of each chunk but the last.
    """

    def __init__(self, tokens: int, chunk: int, device: torch.device) -> None:
        self._tokens, self._chunk = tokens, chunk
        self._copy_stream, self._memory = CopyStream(device), HostMemory(locked=device.type == "cuda")
        self._host: Tensor | None = None
        self._coming: tuple[int, Tensor, CopyEvent] | None = None

    def put(self, chunk: int, hidden: Tensor) -> None:
        if self._host is None:
            width = hidden.shape[-1]
            self._memory.check(self._tokens * width * hidden.element_size())
            self._host = self._memory.take((self._tokens, width), hidden.dtype)
        # One lane for both ways: nothing comes back before it has left.
        self._copy_stream.copy(self._rows(chunk), hidden[0])

    def take(self, chunk: int) -> Tensor:
        number, hidden, mark = self._coming or self._fetch(chunk)
        assert number == chunk, "chunks follow each other"
        mark.wait()
        following = (chunk + 1) % -(-self._tokens // self._chunk)
        self._coming = self._fetch(following) if following != chunk else None
        return hidden[None]

    def _rows(self, chunk: int) -> Tensor:
        assert self._host is not None
        return self._host[chunk * self._chunk : (chunk + 1) * self._chunk]

    def _fetch(self, chunk: int) -> tuple[int, Tensor, CopyEvent]:
        rows = self._rows(chunk)
        near = torch.empty(rows.shape, dtype=rows.dtype, device=self._copy_stream.device)
        return chunk, near, self._copy_stream.copy(near, rows)

    def close(self) -> None:
        """Give the host memory back."""
        self._copy_stream.synchronize()
        self._coming = self._host = None
        self._memory.release()


class _LayerRows:
    """One layer's rows at a time, as a cache for the attention of a chunk.

    Args:
        buffer: of all rows, for layers without a window.
        windowed: of the others.
    """

    def __init__(self, buffer: Tensor | None, windowed: SequenceRows) -> None:
        self.buffer, self.windowed, self.length = buffer, windowed, 0

    def positions(self, count: int) -> Tensor:
        return torch.arange(self.length, self.length + count)

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, how: AttentionParams) -> Tensor:
        if how.window is not None:
            self.windowed.length = self.length
            return self.windowed.attend(layer, q, k, v, how)
        assert self.buffer is not None
        stop = self.length + k.shape[2]
        seen = self.buffer[:stop].permute(1, 2, 0, 3)[:, None]  # [2, 1, H_kv, S, D]
        for mine, new in zip(seen, (k, v), strict=True):
            mine[:, :, self.length :] = new
        return causal_attention(q, seen[0], seen[1], scale=how.scale, softcap=how.softcap, sinks=how.sinks)

    def advance(self, count: int) -> None: ...


class _Calls:
    """How the model calls its decoder layers for each chunk, and what it gives the first of them."""

    def __init__(self, layers: nn.ModuleList, states: States) -> None:
        self.layers, self.states = layers, states
        self._calls: list[list[tuple[tuple[Any, ...], dict[str, Any]]]] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Inside, layers compute nothing: they hand their input on, and their calls are noted."""
        own = [layer.__dict__.get("forward") for layer in self.layers]
        try:
            for index, layer in enumerate(self.layers):
                layer.forward = self._note(index)
            yield
        finally:
            for layer, forward in zip(self.layers, own, strict=True):
                if forward is None:
                    layer.__dict__.pop("forward", None)
                else:
                    layer.forward = forward

    def _note(self, index: int) -> Callable[..., Tensor]:
        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if index == 0:
                self.states.put(len(self._calls), hidden_states)
                self._calls.append([])
            self._calls[-1].append((args, kwargs))
            return hidden_states

        return forward

    def run(self, index: int, chunk: int) -> None:
        """Layer ``index`` on one chunk; its output takes the place of its input."""
        args, kwargs = self._calls[chunk][index]
        out = self.layers[index](self.states.take(chunk), *args, **kwargs)
        self.states.put(chunk, out if isinstance(out, Tensor) else out[0])


@torch.no_grad()
def fill_by_layers(
    model: HFModel,
    tokens: list[int],
    chunk: int,
    sink: Sink,
    progress: Progress | None = None,
    states: States | None = None,
) -> None:
    """Compute the rows of ``tokens`` in all layers, into ``sink``.

    Args:
        model: inside its ``active()``.
        chunk: tokens at once.
        progress: hears of tokens as if they were fed one after the other, layers counting alike.
        states: where hidden states wait; by default on the device.
    """
    if not tokens:
        return
    whole = any(place is not None for place in sink.places)
    buffer = sink.buffer(len(tokens)) if whole else None
    rows = _LayerRows(buffer, sink.windowed())
    calls = _Calls(decoder_layers(model.running), states or DeviceStates())
    starts = range(0, len(tokens), chunk)
    with calls.noted(), model.streamed.paused() if model.streamed is not None else nullcontext():
        for start in starts:
            rows.length = start
            part = tokens[start : start + chunk]
            model.forward(part, rows, last_only=True, whole=False)
    free: list[Callable[[], None]] = []
    told = done = 0
    for layer, place in enumerate(sink.places):
        # A layer with a window leaves the buffer alone: the next one that writes into it waits.
        waiting, free = (free, []) if place is not None else ([], free)
        for number, start in enumerate(starts):
            if waiting:
                waiting[number]()
            rows.length = start
            calls.run(layer, number)
            stop = min(start + chunk, len(tokens))
            if place is not None and buffer is not None:
                free.append(sink.part(place, start, buffer[start:stop]))
            done += stop - start
            if progress and done // model.layers > told:
                progress(done // model.layers - told)
                told = done // model.layers
        if place is not None and buffer is not None:
            sink.whole(place, buffer)

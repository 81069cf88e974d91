"""Prefills layer by layer: all of a prompt passes through one decoder layer, then through the next.

Chunk by chunk through all layers, the usual order, every chunk would read all earlier keys and values of
every layer, and with an offloaded cache each of these reads is a copy from the host. Layer by layer, keys and
values are read while all of a layer's are on the device, and are copied once, to the host. This takes memory
for one layer's keys and values and for one hidden state a token, the latter on the host where the device
lacks it.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from triforce_tree.kernels.attention.plan import AttentionParams, Heads
from triforce_tree.kernels.attention.prefill import causal_attention
from triforce_tree.kv.offload.copy_stream import CopyEvent, CopyStream
from triforce_tree.kv.offload.offloaded_cache import OffloadedCache
from triforce_tree.kv.offload.pinned import HostMemory
from triforce_tree.kv.prefill import PromptCache
from triforce_tree.kv.recurrent_states import RecurrentStates
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.hidden_states import hidden_states
from triforce_tree.models.model_copy import decoder_layers
from triforce_tree.models.running_forward import ChunkPass, running_forward
from triforce_tree.runtime.features import Features
from triforce_tree.runtime.stats import Progress


class OffloadedPrefill:
    """Stores the keys and values of one sequence's prefill layer by layer.

    Each layer's are computed in the memory of gathered chunks and window, so the newest tokens are kept apart
    until the end; where the last layer is resident, in that layer's memory, so that its own need no copy.

    Args:
        cache: the cache whose sequence ``b`` is prefilled.
        start: the number of its tokens that are in the cache already.
        with_means: tokens of whole chunks before this one have their chunk means already.
        states: the states of recurrent layers, if there are any.

    Attributes:
        host_layers: see :class:`OffloadedCache`.
    """

    def __init__(
        self,
        cache: OffloadedCache,
        b: int,
        start: int,
        with_means: int,
        states: RecurrentStates | None,
    ) -> None:
        self.cache, self.b, self.start, self._states = cache, b, start, states
        self.host_layers = cache.host_layers
        self._first_mean = with_means // cache.chunk * cache.chunk if cache.chunk else 0
        self._last: Tensor | None = None
        if start and cache.host.last_resident:
            # Every layer is computed in the last one's memory.
            self._last = cache.host.on_device[-1][b][:start].to("cpu", copy=True)
        newest = cache.lengths[b] - cache.host.base[b]
        shape = (cache.host.layers, newest, cache.host.heads.row)
        self._newest = torch.empty(shape, device=cache.host.device, dtype=cache.model.dtype)

    def rings(self) -> PromptCache:
        """Returns the cache of layers with a window, which has the states of recurrent layers."""
        return PromptCache(self.cache.rings, self.b, self._states, self.start)

    def buffer(self, tokens: int) -> Tensor:
        """Returns memory ``[tokens, row]`` (``Heads.split``) that each layer without a window writes."""
        if self.cache.host.last_resident:
            return self.cache.host.on_device[-1][self.b][:tokens]
        shape = (tokens, self.cache.host.heads.row)
        return self.cache.store.memory[: prod(shape)].view(shape)

    def restore(self, layer: int, kv: Tensor) -> None:
        """Fills the buffer's beginning ``kv`` with what the cache holds of a layer."""
        if self._last is not None and layer == self.cache.host.layers - 1:
            kv.copy_(self._last)
        else:
            self.cache.host.copy_first(layer, self.b, kv)

    def chunk_done(self, layer: int, start: int, kv: Tensor) -> Callable[[], None]:
        """Stores a chunk from token ``start`` on. The result must be called before ``kv`` is overwritten."""
        count = max(0, min(self.cache.host.base[self.b] - start, kv.shape[0]))
        return self.cache.host.write(layer, self.b, start, kv[:count]).wait

    def layer_done(self, layer: int, kv: Tensor) -> None:
        """Keeps the chunk means and the newest tokens of a layer."""
        base, first = self.cache.host.base[self.b], self._first_mean
        if first < base:
            self.cache.store_means(layer, self.b, first, kv[first:base])
        self._newest[layer] = kv[base:]

    def commit(self) -> None:
        """Copies the newest tokens into the window."""
        if self.cache.host.layers:
            parts = self.cache.host.heads.split(self._newest)
            for slots, part in zip(self.cache.window.kv, parts, strict=True):
                slots[:, self.b, :, : part.shape[1]] = part.transpose(1, 2)


class States(Protocol):
    """Holds the hidden states between two layers: ``[1, n, hidden]`` of each chunk of the prompt."""

    def put(self, chunk: int, hidden: Tensor) -> None: ...

    def take(self, chunk: int) -> Tensor: ...


class DeviceStates:
    """Keeps the hidden states on the device."""

    def __init__(self) -> None:
        self._hidden: dict[int, Tensor] = {}

    def put(self, chunk: int, hidden: Tensor) -> None:
        self._hidden[chunk] = hidden

    def take(self, chunk: int) -> Tensor:
        return self._hidden.pop(chunk)


class ReservedStates:
    """Keeps the hidden states on the device, in memory that has another use after the prefill.

    Args:
        memory: contiguous, of the hidden states' dtype.
        chunk: tokens of each chunk but the last.
    """

    def __init__(self, memory: Tensor, chunk: int) -> None:
        self._memory, self._chunk = memory.view(-1), chunk
        self._shapes: dict[int, torch.Size] = {}

    def put(self, chunk: int, hidden: Tensor) -> None:
        self._shapes[chunk] = hidden.shape
        self._slice(chunk).copy_(hidden)

    def take(self, chunk: int) -> Tensor:
        return self._slice(chunk)

    def _slice(self, chunk: int) -> Tensor:
        shape = self._shapes[chunk]
        start = chunk * self._chunk * shape[-1]
        return self._memory[start : start + shape.numel()].view(shape)


class HostStates:
    """Keeps the hidden states in host memory, and copies chunks in and out during computation.

    Args:
        tokens: the number of tokens of the whole prompt.
        chunk: tokens of each chunk but the last.
    """

    def __init__(self, tokens: int, chunk: int, device: torch.device) -> None:
        self._tokens, self._chunk = tokens, chunk
        self._copy_stream, self._memory = CopyStream(device), HostMemory(locked=device.type == "cuda")
        self._host: Tensor | None = None
        self._prefetched: tuple[int, Tensor, CopyEvent] | None = None

    def put(self, chunk: int, hidden: Tensor) -> None:
        if self._host is None:
            width = hidden.shape[-1]
            self._memory.check(self._tokens * width * hidden.element_size())
            self._host = self._memory.take((self._tokens, width), hidden.dtype)
        # One copy stream for both directions: no chunk is read back before it was written.
        self._copy_stream.copy(self._slice(chunk), hidden[0])

    def take(self, chunk: int) -> Tensor:
        number, hidden, event = self._prefetched or self._fetch(chunk)
        assert number == chunk, "chunks are taken in order"
        event.wait()
        following = (chunk + 1) % -(-self._tokens // self._chunk)
        self._prefetched = self._fetch(following) if following != chunk else None
        return hidden[None]

    def _slice(self, chunk: int) -> Tensor:
        assert self._host is not None
        return self._host[chunk * self._chunk : (chunk + 1) * self._chunk]

    def _fetch(self, chunk: int) -> tuple[int, Tensor, CopyEvent]:
        on_host = self._slice(chunk)
        hidden = torch.empty(on_host.shape, dtype=on_host.dtype, device=self._copy_stream.device)
        return chunk, hidden, self._copy_stream.copy(hidden, on_host)

    def close(self) -> None:
        """Frees the host memory."""
        self._copy_stream.synchronize()
        self._prefetched = self._host = None
        self._memory.release()


class _LayerKV:
    """Is the KV cache of one layer at a time, for the attention of a chunk.

    Args:
        buffer: the memory of layers without a window; empty if there are none.
        rings: the cache of the other layers and of recurrent layers.
    """

    def __init__(self, buffer: Tensor, rings: PromptCache) -> None:
        self.buffer, self.rings, self.length = buffer, rings, 0
        self.recurrent: ChunkPass | None = rings.recurrent
        self.indexed = None

    def positions(self, count: int) -> Tensor:
        return torch.arange(self.length, self.length + count, device="cpu")

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        if params.window is not None:
            self.rings.length = self.length
            return self.rings.attend(layer, q, k, v, params)
        stop = self.length + k.shape[2]
        heads = Heads(q.shape[1], k.shape[1], k.shape[3], v.shape[3])
        seen = [part.transpose(0, 1)[None] for part in heads.split(self.buffer[:stop])]  # [1, H_kv, S, D]
        for cached, new in zip(seen, (k, v), strict=True):
            cached[:, :, self.length :] = new
        out = causal_attention(
            q, seen[0], seen[1], scale=params.scale, softcap=params.softcap, sinks=params.sinks
        )
        return out.transpose(1, 2)

    def advance(self, count: int) -> None: ...


class _Calls:
    """Holds the arguments with which the model calls its layers for each chunk, and the first layer's input.

    Args:
        outputs: length of the tuples that layers return; 0 for the hidden state alone.
    """

    def __init__(self, layers: nn.ModuleList, states: States, outputs: int) -> None:
        self.layers, self.states, self._outputs = layers, states, outputs
        self._calls: list[list[tuple[tuple[Any, ...], dict[str, Any]]]] = []

    def recorded(self) -> AbstractContextManager[None]:
        """Returns a context in which layers return their input, and their calls are recorded."""
        return self._replaced(self._recorder)

    def returning(self, hidden: Tensor) -> AbstractContextManager[None]:
        """Returns a context in which layers compute nothing and the model continues with ``hidden``."""
        return self._replaced(lambda index: lambda *args, **kwargs: self._output(hidden))

    @contextmanager
    def _replaced(self, instead: Callable[[int], Callable[..., Any]]) -> Iterator[None]:
        forwards = [layer.__dict__.get("forward") for layer in self.layers]
        try:
            for index, layer in enumerate(self.layers):
                layer.forward = instead(index)
            yield
        finally:
            for layer, forward in zip(self.layers, forwards, strict=True):
                if forward is None:
                    layer.__dict__.pop("forward", None)
                else:
                    layer.forward = forward

    def _output(self, hidden: Tensor) -> Any:
        return (hidden, *[None] * (self._outputs - 1)) if self._outputs else hidden

    def _recorder(self, index: int) -> Callable[..., Any]:
        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if index == 0:
                self.states.put(len(self._calls), hidden_states)
                self._calls.append([])
            self._calls[-1].append((args, kwargs))
            return self._output(hidden_states)

        return forward

    def run(self, index: int, chunk: int) -> Tensor:
        """Runs layer ``index`` on one chunk; its output replaces its input in ``states``."""
        args, kwargs = self._calls[chunk][index]
        out = self.layers[index](self.states.take(chunk), *args, **kwargs)
        hidden: Tensor = out if isinstance(out, Tensor) else out[0]
        self.states.put(chunk, hidden)
        return hidden


def _normed(model: HFModel, calls: _Calls, tokens: list[int], cache: _LayerKV, hidden: Tensor) -> Tensor:
    """Returns the state after the final norm, by the model's own forward from the last layer's output on."""
    paused = model.streamed.paused() if model.streamed is not None else nullcontext()
    with (
        hidden_states(model.running, calls.layers, (model.layers,)) as found,
        calls.returning(hidden),
        paused,
    ):
        model.forward(tokens, cache, last_only=True, whole=False)
    return found[model.layers]


@torch.no_grad()
def prefill_by_layers(
    model: HFModel,
    tokens: list[int],
    chunk: int,
    sink: OffloadedPrefill,
    progress: Progress | None,
    features: Features | None,
    states: States,
) -> None:
    """Computes keys and values of ``tokens`` in all layers, into ``sink``, which has the first ones already.

    Args:
        model: inside its ``active()``.
        chunk: tokens at once.
        progress: called with numbers of tokens that add up to all; every layer counts alike.
        features: where hidden states are kept for the drafter, if it reads any.
        states: where hidden states are kept between two layers.
    """
    rings = sink.rings()  # clears the states of an earlier text, of a prompt of one token as well
    if not tokens:
        return
    first = sink.start
    whole = any(index is not None for index in sink.host_layers)
    buffer = sink.buffer(len(tokens)) if whole else torch.empty(0, device="cpu")
    cache = _LayerKV(buffer, rings)
    calls = _Calls(decoder_layers(model.running), states, model.layer_outputs)
    starts = range(first, len(tokens), chunk)
    with calls.recorded(), model.streamed.paused() if model.streamed is not None else nullcontext():
        for start in starts:
            cache.length = start
            part = tokens[start : start + chunk]
            model.forward(part, cache, last_only=True, whole=False, every_state=features is not None)
    free: list[Callable[[], None]] = []
    reported = done = 0
    numbers = after = 0, 0
    for layer, index in enumerate(sink.host_layers):
        # A layer with a window does not write to the buffer: the next one that does waits for the copies.
        waiting, free = (free, []) if index is not None else ([], free)
        if first and index is not None:
            sink.restore(index, buffer[:first])
        for number, start in enumerate(starts):
            if waiting:
                waiting[number]()
            cache.length = start
            # Every chunk of a layer uses the same states.
            with running_forward(cache.attend, states=cache.recurrent, first=numbers) as forward:
                hidden = calls.run(layer, number)
                after = forward.convolutions, forward.recurrences
            stop = min(start + chunk, len(tokens))
            if features is not None and layer in features.layers:
                features.feed(sink.b, start, {layer: hidden})
            if features is not None and layer == model.layers - 1 and model.layers in features.layers:
                normed = _normed(model, calls, tokens[start:stop], cache, hidden)
                features.feed(sink.b, start, {model.layers: normed})
            if index is not None:
                free.append(sink.chunk_done(index, start, buffer[start:stop]))
            done += stop - start
            if progress and done // model.layers > reported:
                progress(done // model.layers - reported)
                reported = done // model.layers
        numbers = after
        if index is not None:
            sink.layer_done(index, buffer)

"""Writes the keys and values of prompts into an offloaded cache, layer by layer."""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor

from triforce_tree.kv.backend import PromptRun
from triforce_tree.kv.offload.layerwise_prefill import HostStates, ReservedStates, prefill_by_layers
from triforce_tree.kv.offload.offloaded_cache import OffloadedCache
from triforce_tree.kv.prefill import PromptCache
from triforce_tree.kv.recurrent_states import RecurrentStates


def prefill_offloaded(
    cache: OffloadedCache,
    prompts: Sequence[Sequence[int]],
    chunk: int,
    starts: Sequence[int],
    run: PromptRun,
) -> None:
    """Stores keys and values of all but the last token of each prompt, and their hidden states.

    Args:
        cache: its sequences get the prompts.
        chunk: tokens that are computed at once.
        starts: tokens of each prompt that are in the cache already, and stay.
        run: the states of recurrent layers, if there are any, hold the first ``starts`` tokens.
    """
    host = cache.host
    # The chunk means before the smaller of the two positions are known and stay valid.
    with_means = [min(pair) for pair in zip(host.base, starts, strict=True)]
    host.ring.invalidate()
    for b, start in enumerate(starts):
        # The windows' memory is needed for the prefill.
        for layer in range(host.layers if start > host.base[b] else 0):
            cache.write_window(layer, b, start - host.base[b])
    sinks = []
    for b, (prompt, start) in enumerate(zip(prompts, starts, strict=True)):
        tokens = list(prompt[:-1])
        cache.rings.fed(b, len(tokens), start)
        cache.lengths[b] = len(tokens)
        host.base[b] = cache.base_after(len(tokens))
        sinks.append(OffloadedPrefill(cache, b, start, with_means[b], run.states))
        _prefill_one(sinks[-1], tokens, chunk, run)
        if run.states is not None:
            run.states.lengths[b] = len(tokens)
        # The last layer's keys and values are copied out of memory that the next prefill overwrites.
        host.to_host.join()
    for sink in sinks:
        sink.commit()
    cache.publish()


def _prefill_one(sink: "OffloadedPrefill", tokens: list[int], chunk: int, run: PromptRun) -> None:
    cache, b, first, features = sink.cache, sink.b, sink.start, run.features
    compute = partial(prefill_by_layers, cache.model, tokens, chunk, sink, run.progress, first=first)
    if features is not None:
        features.begin(b, first)
        compute = partial(
            compute, features=features.layers, keep=lambda i, start, h: features.feed(b, start, {i: h})
        )
    count = len(tokens) - first
    hidden = count * cache.model.model.config.get_text_config(decoder=True).hidden_size
    if cache.host.last_resident and hidden <= cache.store.memory.numel():
        compute(states=ReservedStates(cache.store.memory, chunk))
    elif cache.settings.states_on_host:
        states = HostStates(count, chunk, cache.host.device)
        try:
            compute(states=states)
        finally:
            states.close()
    else:
        compute()


class OffloadedPrefill:
    """Stores the keys and values of one sequence's prefill layer by layer; see ``layerwise_prefill.Sink``.

    Each layer's are computed in the memory of gathered chunks and window, so the newest tokens are kept apart
    until the end; where the last layer is resident, in that layer's memory, so that its own need no copy.

    Args:
        cache: the cache whose sequence ``b`` is prefilled.
        start: the number of its tokens that are in the cache already.
        with_means: tokens of whole chunks before this one have their chunk means already.
        states: the states of recurrent layers, if there are any.
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
        self._first_mean = with_means // cache.chunk * cache.chunk if cache.chunk else 0
        self._last: Tensor | None = None
        if start and cache.host.last_resident:
            # Every layer is computed in the last one's memory.
            self._last = cache.host.on_device[-1][b][:start].to("cpu", copy=True)
        newest = cache.lengths[b] - cache.host.base[b]
        shape = (cache.host.layers, newest, cache.host.heads.row)
        self._newest = torch.empty(shape, device=cache.host.device, dtype=cache.model.dtype)

    @property
    def host_layers(self) -> list[int | None]:
        """See ``OffloadedCache``."""
        return self.cache.host_layers

    def rings(self) -> PromptCache:
        """Returns the cache of layers with a window, which has the states of recurrent layers."""
        return PromptCache(self.cache.rings, self.b, self._states, self.start)

    def buffer(self, tokens: int) -> Tensor:
        """Returns memory for one layer, ``[tokens, row]``."""
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

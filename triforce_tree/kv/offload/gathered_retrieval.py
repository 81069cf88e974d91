"""The retrieval view of an offloaded cache: selected chunks are gathered on the device, before the window.

    memory of the retrieval model:   [ gathered chunks, one a slot | window: base ... root | chain and tree ]

A refresh selects fewer chunks than there are slots. Those that are missing are copied from the host, into
slots of chunks that were not selected, in clock order; chunks that stay are attended to as well. Layers with
a window see all of it, in their rings.
"""

import copy
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from triforce_tree.config import RetrievalConfig
from triforce_tree.kernels import exchange, step
from triforce_tree.kernels.attention.plan import AttentionParams
from triforce_tree.kv.chunk_policy import BoundPolicy
from triforce_tree.kv.offload.offloaded_cache import OffloadedCache
from triforce_tree.kv.offload.offloaded_view import OffloadedView
from triforce_tree.kv.tree_attention_view import TreeAttentionView

_SELECTED_SHARE = 0.25
"""Chunks that one refresh selects, as a share of the slots: with half, a refresh takes 1.4 times as long, and
as much is accepted."""


class GatheredRetrievalView(OffloadedView):
    """Is the ``RetrievalView`` of an offloaded cache: new tokens see gathered chunks and the window.

    Args:
        cache: with slots for chunks; its chunk is ``config.chunk``.
        queries: T.
        config: the budget (tokens).
        depths: as for ``TreeAttentionView``.
    """

    def __init__(
        self,
        cache: OffloadedCache,
        queries: int,
        config: RetrievalConfig,
        depths: Sequence[int] | None = None,
    ) -> None:
        super().__init__(cache, cache.store, cache.slots, queries, depths=depths)
        self.chunk, self.config = config.chunk, config
        policy = BoundPolicy(config)
        if policy.needs_context:
            raise ValueError(
                "this select_chunks needs all keys, which an offloaded cache has in host memory; give one "
                "that works on mean keys, or offload=False"
            )
        self.capturable = policy.capturable
        self.slots = cache.slots // config.chunk
        self.refreshing = False
        assert cache.means is not None
        self.means = cache.means
        layers, batch, heads, chunks = self.means.shape[:4]
        selected = max(1, int(self.slots * _SELECTED_SHARE))

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=self.means.device)

        self._selected = zeros(batch, heads, selected)
        self._copies, self._copied = zeros(batch, heads, 2, selected), zeros(layers, batch, heads)
        self._clock_hand = zeros(layers, batch, heads)
        self._slot_chunks = torch.arange(self.slots, dtype=torch.int32, device=self.means.device).repeat(
            layers, batch, heads, 1
        )
        self._chunk_slots = exchange.place_of(self._slot_chunks, chunks)
        self._boundary = torch.zeros_like(cache.base)

    def refresh(self, root: Tensor, committed: Tensor) -> None:
        """Let the next forward select chunks by its root's queries, among those that have left the window."""
        self._boundary.copy_(self.cache.base // self.chunk)

    def _attend_without_window(
        self, layer: int, host_layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams
    ) -> Tensor:
        if self.refreshing:
            self._select(host_layer, q[:, :, 0], *self.store.layers[layer].kv, params.scale)
        return TreeAttentionView.__call__(self, layer, q, k, v, params)

    def _select(self, layer: int, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> None:
        host, copied = self.cache.host, self._copied[layer]
        count = self._selected.shape[2]
        select = self.config.select_chunks or step.select_chunks
        select(q, self.means[layer], self._boundary, self._selected, count, scale)
        exchange.exchange_chunks(
            self._slot_chunks[layer], self._chunk_slots[layer], self._selected,
            self._clock_hand[layer], self._copies, copied,
        )  # fmt: skip
        for b in range(host.batch):
            exchange.fetch_chunks(
                keys[b], values[b], host.on_device[layer][b], host.on_host[layer][b],
                self._copies[b], copied[b], self.chunk,
            )  # fmt: skip

    def beside(self, queries: int, depths: Sequence[int]) -> Self:
        """See :class:`RetrievalView`."""
        other = copy.copy(self)
        OffloadedView.__init__(other, self.cache, self.cache.store, self.cache.slots, queries, depths=depths)
        other.capturable = self.capturable
        return other

    def update_chunk_means(self, first: Tensor, count: int) -> None:
        """See :class:`RetrievalView`; means are computed when chunks leave the window."""

    def fill(self) -> None:
        """Gather the newest chunks before the window, after a prefill or a rewind."""
        host, count = self.cache.host, self.slots * self.chunk
        for b in range(host.batch):
            start = host.base[b] - count
            assert start >= 0, f"{host.base[b]} tokens before the window do not fill {count} slots"
            for layer in range(host.layers):
                parts = host.heads.split(host.read(layer, b, start, start + count))
                for slots, part in zip(self.store.kv, parts, strict=True):
                    slots[layer, b, :, :count] = part.transpose(0, 1)
            first = start // self.chunk
            newest = torch.arange(
                first, first + self.slots, dtype=torch.int32, device=self._slot_chunks.device
            )
            self._slot_chunks[:, b] = newest
        self._chunk_slots.copy_(exchange.place_of(self._slot_chunks, self._chunk_slots.shape[-1]))
        self._clock_hand.zero_()

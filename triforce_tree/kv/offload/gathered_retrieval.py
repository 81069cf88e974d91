"""Level 1 far from its rows: copies of the chosen chunks on the device, in front of the window.

    level 1's memory:   [ slots of one chunk each | window: base ... root | chain and tree ]

A choice asks for fewer chunks than there are slots, and only those that are not here cross the bus; who
was not asked for lately makes room. What stays is attended to as well. Layers with a window see all of it, in
their rings.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from triforce_tree.config import RetrievalConfig
from triforce_tree.kernels import exchange, step
from triforce_tree.kv.offload.offloaded_cache import OffloadedCache
from triforce_tree.kv.offload.offloaded_view import OffloadedView
from triforce_tree.models.attention import AttentionParams

_ASKED = 0.5
"""Share of the slots that one choice asks for."""


class GatheredRetrievalView(OffloadedView):
    """New rows that see copies of chosen chunks, and the window: ``RetrievalView`` of an offloaded cache.

    Args:
        cache: with slots; its chunk is ``config.chunk``.
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
        self.slots = cache.slots // config.chunk
        self.choosing = False
        assert cache.means is not None
        self.means = cache.means
        layers, batch, heads, chunks = self.means.shape[:4]
        asked = max(1, int(self.slots * _ASKED))

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=self.means.device)

        self._wanted = zeros(batch, heads, asked)
        self._moves, self._counts = zeros(batch, heads, 2, asked), zeros(layers, batch, heads)
        self._hand = zeros(layers, batch, heads)
        self._held = torch.arange(self.slots, dtype=torch.int32, device=self.means.device).repeat(
            layers, batch, heads, 1
        )
        self._place = exchange.place_of(self._held, chunks)
        self._boundary = torch.zeros_like(cache.base)

    @property
    def exchanged(self) -> Tensor:
        """int32 ``[layers, B, H_kv]``: chunks that the last choice brought."""
        return self._counts

    def choose(self, end: Tensor, committed: Tensor) -> None:
        """Let the next forward choose by its root, among the chunks that have left the window."""
        self._boundary.copy_(self.cache.base // self.chunk)

    def _without_window(
        self, layer: int, place: int, q: Tensor, k: Tensor, v: Tensor, how: AttentionParams
    ) -> Tensor:
        keys, values = self.store.layer(layer)
        if self.choosing:
            self._choose(place, q[:, :, 0], keys, values, how.scale)
        self._write(layer, k, v, how)
        [plan] = self._plans
        return self._attend(q, keys, values, plan, how)

    def _choose(self, layer: int, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> None:
        host, counts = self.cache.host, self._counts[layer]
        asked = self._wanted.shape[2]
        select = self.config.select_chunks or step.select_chunks
        select(q, self.means[layer], self._boundary, self._wanted, asked, scale)
        exchange.exchange_chunks(
            self._held[layer], self._place[layer], self._wanted, self._hand[layer], self._moves, counts
        )
        for b in range(host.batch):
            near, far = host.near[layer][b], host.far[layer][b]
            exchange.fetch_chunks(keys[b], values[b], near, far, self._moves[b], counts[b], self.chunk)

    def fill(self) -> None:
        """Hold the newest chunks before the window: texts have been fed or rewound."""
        host, count = self.cache.host, self.slots * self.chunk
        for b in range(host.batch):
            start = host.base[b] - count
            assert start >= 0, f"{host.base[b]} settled rows are fewer than the {count} of the slots"
            for layer in range(host.layers):
                rows = host.read(layer, b, start, start + count).permute(1, 2, 0, 3)
                self.store.kv[layer, :, b, :, :count] = rows
            first = start // self.chunk
            newest = torch.arange(first, first + self.slots, dtype=torch.int32, device=self._held.device)
            self._held[:, b] = newest
        self._place.copy_(exchange.place_of(self._held, self._place.shape[-1]))
        self._hand.zero_()

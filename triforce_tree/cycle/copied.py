"""Level 1 far from its rows: copies of the chosen chunks on the device, in front of the window.

    level 1's memory:   [ slots of one chunk each | window: base ... root | chain and tree ]

A choice asks for fewer chunks than there are slots, and only those that are not here cross the bus; who
was not asked for lately makes room. What stays is attended to as well.
"""

import torch
from torch import Tensor

from triforce_tree.config import RetrievalConfig
from triforce_tree.cycle.offloaded import OffloadedCache
from triforce_tree.cycle.rows import TreeRows
from triforce_tree.kernels import exchange, step

_ASKED = 0.5
"""Share of the slots that one choice asks for."""


class CopiedRows(TreeRows):
    """New rows that see copies of chosen chunks, and the window: ``RetrievalRows`` of an offloaded cache.

    Args:
        cache: with slots; its chunk is ``config.chunk``.
        queries: T.
        config: the budget (tokens).
    """

    def __init__(self, cache: OffloadedCache, queries: int, config: RetrievalConfig) -> None:
        super().__init__(cache.store, queries)
        self.cache, self.chunk = cache, config.chunk
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

    def choose(self, end: Tensor, settled: Tensor) -> None:
        """Let the next forward choose by its root, among the chunks that have left the window."""
        self._boundary.copy_(self.cache.base // self.chunk)

    def begin(self, before: Tensor, words: Tensor | None = None) -> None:
        super().begin(before - self.cache.base + self.cache.slots, words)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, sinks: Tensor | None
    ) -> Tensor:
        keys, values = self.store.layer(layer)
        if self.choosing:
            self._choose(layer, q[:, :, 0], keys, values, scale)
        step.append_rows(keys, values, k, v, self.at)
        return self._attend(q, keys, values, scale, softcap, sinks, None)

    def _choose(self, layer: int, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> None:
        host, counts = self.cache.host, self._counts[layer]
        asked = self._wanted.shape[2]
        step.select_chunks(q, self.means[layer], self._boundary, self._wanted, asked, scale)
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

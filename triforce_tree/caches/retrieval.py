"""The middle level's cache: a few chunks of the full cache, chosen by what the target looks at.

TriForce (arXiv 2404.11912, section 4.1) scores chunks by the mean of their keys. Here the queries are
those of the last full verification, so the selection follows the text as it is written; the first chunk,
a recent window and everything generated since the last selection are always there. Committed rows come
from the full cache: they are the target's own, never an approximation.
"""

from typing import Any

import torch
from torch import Tensor

from triforce_tree.caches.base import RowBuffer, Rows, Variant, attend_rows
from triforce_tree.caches.full import FullCache
from triforce_tree.config import RetrievalConfig

# Queries that choose: the newest ones of the last forward (after prefill that is a whole chunk of them).
QUERIES = 32


class RetrievalCache:
    """A selection of a full cache's rows, per layer and KV head, and a tail of its own.

    Rows in the buffer: ``[selected chunks | recent and newer | tail]``. Layers with a sliding window
    hold the recent rows of that window instead, which is exact where the budget covers it.

    Args:
        source: the full cache of the same weights; ``commit`` it first.
        layers: number of layers.
        config: budget, chunk, recent window (tokens) and refresh stride (commits).
    """

    def __init__(self, source: FullCache, layers: int, config: RetrievalConfig) -> None:
        self.source = source
        self.config = config
        self.rows = RowBuffer(layers, config.budget + 4 * config.chunk + 256)
        self.means = ChunkMeans(config.chunk)
        self._base: dict[int, int] = {}  # committed rows in the buffer, per layer
        self._copied = 0  # rows of the source that the buffers know of
        self._tail = 0
        self._commits = 0

    @property
    def length(self) -> int:
        return self.source.length

    def positions(self, rows: Rows) -> Tensor:
        return rows.depths + self.length

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, rows: Rows, how: Variant) -> Tensor:
        index = layer.layer_idx
        base = self._base.get(index, 0)
        self.rows.write(index, base + self._tail, k, v)
        k, v = self.rows.view(index, 0, base + self._tail + q.shape[2])
        return attend_rows(q, k, v, rows, self.length - base, how)

    def advance(self, count: int) -> None:
        self._tail += count

    def keep(self, rows: list[int]) -> None:
        for index in self.rows.filled:
            self.rows.compact(index, self._base.get(index, 0), rows)
        self._tail = len(rows)

    def commit(self, count: int) -> None:
        """Take over what the source committed; ``count`` rows of our own tail are replaced by its rows."""
        self._tail = 0
        if self.source.length == self._copied:
            return
        due = self._commits % self.config.refresh == 0
        self._commits += 1
        for index in self.source.rows.filled:
            if due and index in self.source.queries:
                self._select(index)
            else:
                self._append(index)
        self._copied = self.source.length

    def prefill_step(self, coming: int) -> tuple[int, int]:
        raise RuntimeError("a retrieval cache is filled from its source: prefill and commit that first")

    def _append(self, index: int) -> None:
        base = self._base.get(index, 0)
        k, v = self.source.rows.view(index, self._copied, self.source.length)
        self.rows.write(index, base, k, v)
        self._base[index] = base + k.shape[2]

    def _select(self, index: int) -> None:
        length, chunk = self.source.length, self.config.chunk
        window = self.source.windows[index]
        held = length if window is None else min(window, length)
        if window is not None or length <= self.config.budget:
            start = length - min(held, self.config.budget)
            self.rows.write(index, 0, *self.source.rows.view(index, start, length))
            self._base[index] = length - start
            return
        recent = -(-(length - self.config.recent) // chunk) * chunk  # a chunk boundary
        slots = (self.config.budget - (length - recent)) // chunk
        k, v = self.source.rows.view(index, 0, length)
        means = self.means.of(index, k, recent // chunk)
        chosen = select_chunks(self.source.queries[index][:, :, -QUERIES:], means, slots)
        places = (chosen[..., None] * chunk + torch.arange(chunk, device=k.device)).flatten(2)
        places = places[..., None].expand(-1, -1, -1, k.shape[3])
        held = places.shape[2]
        self.rows.write(index, 0, k.gather(2, places), v.gather(2, places))
        self.rows.write(index, held, k[:, :, recent:], v[:, :, recent:])
        self._base[index] = held + length - recent


class ChunkMeans:
    """Mean key of every whole chunk, brought up to date as rows are committed."""

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk
        self._means: dict[int, Tensor] = {}

    def of(self, layer: int, k: Tensor, count: int) -> Tensor:
        """Means of the first ``count`` chunks of ``k`` ``[B, H_kv, S, D]``: ``[B, H_kv, count, D]``."""
        have = self._means.get(layer)
        known = 0 if have is None else have.shape[2]
        if known < count:
            new = k[:, :, known * self.chunk : count * self.chunk]
            new = new.unflatten(2, (count - known, self.chunk)).mean(3)
            have = new if have is None else torch.cat([have, new], 2)
            self._means[layer] = have
        assert have is not None
        return have[:, :, :count]


def select_chunks(q: Tensor, means: Tensor, slots: int) -> Tensor:
    """The chunks to hold, per KV head; chunk 0 (the sinks) is always among them.

    A query head's interest in a chunk is its softmax share over the chunk means; the KV head takes the
    largest interest over its query group and the given queries.

    Args:
        q: ``[B, H_q, T, D]`` rotated queries.
        means: ``[B, H_kv, C, D]`` mean rotated key of every candidate chunk.
        slots: chunks to choose.

    Returns:
        int64 ``[B, H_kv, min(slots, C)]``, in no particular order.
    """
    batch, q_heads, queries, dim = q.shape
    kv_heads = means.shape[1]
    packed = q.reshape(batch, kv_heads, q_heads // kv_heads * queries, dim)
    scores = (packed @ means.transpose(-1, -2)).float() * dim**-0.5
    interest = scores.softmax(-1).amax(2)
    interest[..., 0] = torch.inf
    return interest.topk(min(slots, means.shape[2]), dim=-1, sorted=False).indices

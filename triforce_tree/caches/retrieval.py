"""The middle level's cache: a few chunks of the full cache, chosen by what is being looked for.

TriForce (arXiv 2404.11912, section 4.1) scores chunks by the mean of their keys, once, with the last
prompt token's query. Here the root of a forward chooses anew, by its own query, what that forward sees
(as each token does in Quest's lossy decoding): earlier queries only dilute the choice. Proposed tokens
never choose: a law that depended on the tokens it judges would not be the law they are accepted by. The
first chunk, a recent window and everything generated since are always there. Committed rows come from
the full cache: they are the target's own, never an approximation.
"""

from typing import Any

import torch
from torch import Tensor

from triforce_tree.caches.base import RowBuffer, Rows, Variant, attend_rows
from triforce_tree.caches.full import FullCache
from triforce_tree.config import RetrievalConfig
from triforce_tree.kernels import dispatch

# Without a choice in every forward, the newest accepted tokens of a level-2 pass choose together.
_VERIFIED_QUERIES = 32

# A chunk that is here stays until another is this many times as interesting: most of the exchange would
# be among chunks of hardly any interest, and copying them costs more than they bring.
_LOYALTY = 2.0


class RetrievalCache:
    """A selection of a full cache's rows, per layer and KV head, and a tail of its own.

    Rows in a layer's buffer: ``[slots of one chunk each | recent and newer | tail]``. A new selection
    overwrites only the slots whose chunk is no longer wanted. A layer with a sliding window holds the
    recent rows of that window instead, which is exact where the budget covers it.

    Args:
        source: the full cache of the same weights; ``commit`` it first.
        layers: number of layers.
        config: budget, chunk and recent window (tokens), and whose queries choose.
    """

    def __init__(self, source: FullCache, layers: int, config: RetrievalConfig) -> None:
        self.source = source
        self.config = config
        self.rows = RowBuffer(layers, config.budget + config.recent + 256)
        self.means = ChunkMeans(config.chunk)
        self._slots: dict[int, Tensor] = {}  # [B, H_kv, n] chunk held by each slot
        self._base: dict[int, int] = {}  # committed rows in the buffer
        self._boundary = 0  # rows of the source before it are candidates, those after it are held
        self._copied = 0  # rows of the source that the buffers know of
        self._tail = 0
        self._forwards = 0  # since the last commit

    @property
    def length(self) -> int:
        return self.source.length

    def positions(self, rows: Rows) -> Tensor:
        return rows.depths + self.length

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, rows: Rows, how: Variant) -> Tensor:
        index = layer.layer_idx
        if self._due and rows.context and index in self._slots:
            self._select(index, q[:, :, rows.context - 1 : rows.context])
        base = self._base.get(index, 0)
        self.rows.write(index, base + self._tail, k, v)
        k, v = self.rows.view(index, 0, base + self._tail + q.shape[2])
        return attend_rows(q, k, v, rows, self.length - base, how)

    @property
    def _due(self) -> bool:
        """Whether this forward chooses: the first one after each commit does, and every n-th."""
        return self.config.refresh > 0 and self._forwards % self.config.refresh == 0

    def advance(self, count: int) -> None:
        self._tail += count
        self._forwards += 1

    def keep(self, rows: list[int]) -> None:
        for index in self.rows.filled:
            self.rows.compact(index, self._base.get(index, 0), rows)
        self._tail = len(rows)

    def commit(self, count: int) -> None:
        """Take over what the source committed; its rows replace the ``count`` leading ones of our tail."""
        self._tail = self._forwards = 0
        length = self.source.length
        if length == self._copied:
            return
        moved = self._move_boundary(length)
        for index in self.source.rows.filled:
            if moved or index not in self._base:
                self._rebase(index)
            else:
                fresh = self.source.rows.view(index, self._copied, length)
                self.rows.write(index, self._base[index], *fresh)
                self._base[index] += length - self._copied
            if self.config.refresh == 0 and index in self._slots and index in self.source.queries:
                self._select(index, self.source.queries[index][:, :, -_VERIFIED_QUERIES:])
        self._copied = length

    def prefill_step(self, coming: int) -> tuple[int, int]:
        raise RuntimeError("a retrieval cache is filled from its source: prefill and commit that first")

    def _move_boundary(self, length: int) -> bool:
        """Let the recent rows grow to one and a half windows before the boundary follows them."""
        recent, chunk = self.config.recent, self.config.chunk
        if length <= self.config.budget or length - self._boundary <= recent + recent // 2 + chunk:
            return False
        self._boundary = (length - recent) // chunk * chunk
        return True

    def _rebase(self, index: int) -> None:
        """Lay out a layer's committed rows anew."""
        length, window = self.source.length, self.source.windows[index]
        slots = (self.config.budget - self.config.recent) // self.config.chunk
        if window is not None:
            start, held = length - min(length, window, self.config.budget), 0
        elif self._boundary:
            start, held = self._boundary, slots * self.config.chunk
        else:
            start, held = 0, 0
        self.rows.write(index, held, *self.source.rows.view(index, start, length))
        self._base[index] = held + length - start
        if held and index not in self._slots:
            self._fill(index, slots)

    def _fill(self, index: int, slots: int) -> None:
        """The newest candidates, before any query has chosen."""
        chunk = self.config.chunk
        start = self._boundary - slots * chunk
        k, v = self.source.rows.view(index, start, self._boundary)
        self.rows.write(index, 0, k, v)
        newest = torch.arange(start // chunk, self._boundary // chunk, device=k.device)
        self._slots[index] = newest.expand(k.shape[0], k.shape[1], slots).contiguous()

    def _select(self, index: int, q: Tensor) -> None:
        """Bring the slots to the chunks that these queries ``[B, H_q, T, D]`` ask for."""
        chunk = self.config.chunk
        k, v = self.source.rows.view(index, 0, self._boundary)
        means = self.means.of(index, k, self._boundary // chunk)
        held = self._slots[index]
        wanted = torch.zeros(means.shape[:3], dtype=torch.bool, device=k.device)
        interest = dispatch.chunk_scores(q, means, q.shape[-1] ** -0.5)
        interest.scatter_(2, held, interest.gather(2, held) * _LOYALTY)
        interest[..., 0] = torch.inf
        wanted.scatter_(2, interest.topk(held.shape[2], sorted=False).indices, True)
        idle = ~wanted.gather(2, held)
        # As many chunks come as slots are idle, head by head, and both lists run in head order.
        b, h, slot = idle.nonzero(as_tuple=True)
        missing = wanted.scatter(2, held, False)
        chunks = missing.nonzero(as_tuple=True)[2]
        held[b, h, slot] = chunks
        inside = torch.arange(chunk, device=k.device)
        b, h = b[:, None], h[:, None]
        places = chunks[:, None] * chunk + inside
        targets = slot[:, None] * chunk + inside
        own_k, own_v = self.rows[index]
        own_k[b, h, targets] = k[b, h, places]
        own_v[b, h, targets] = v[b, h, places]


class ChunkMeans:
    """Mean key of every whole chunk, brought up to date as rows are committed."""

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk
        self._means: dict[int, Tensor] = {}

    def of(self, layer: int, k: Tensor, count: int) -> Tensor:
        """Means of the first ``count`` chunks of ``k`` ``[B, H_kv, S, D]``: ``[B, H_kv, count, D]``."""
        have = self._means.get(layer)
        known = 0 if have is None else have.shape[2]
        if have is None or known < count:
            new = k[:, :, known * self.chunk : count * self.chunk]
            new = new.unflatten(2, (count - known, self.chunk)).mean(3)
            have = new if have is None else torch.cat([have, new], 2)
            self._means[layer] = have
        return have[:, :, :count]

"""Key and value rows on the device, and what the attention layers of a forward do with them.

Rows are never moved between forwards but by :meth:`KVStore.move`: a forward writes its rows behind those
that count, and whatever nobody keeps is overwritten by the next one.
"""

import copy
import math
from dataclasses import replace

import torch
from torch import Tensor

from triforce_tree.config import RetrievalConfig
from triforce_tree.kernels import planned, step
from triforce_tree.kernels.plan import Heads, Plan, plan_trees


class KVStore:
    """K and V of every layer of B sequences: one tensor ``[layers, 2, B, H_kv, S, D]``.

    Args:
        layers, batch: how many.
        heads: of the attention.
        rows: S, rounded up to whole pages.
        page: rows of the unit that tables refer to.
        least: elements that ``memory``, which the tensor lies at the front of, has at least.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        heads: Heads,
        rows: int,
        device: torch.device,
        dtype: torch.dtype,
        page: int = 64,
        least: int = 0,
    ) -> None:
        self.heads, self.batch, self.page = heads, batch, page
        self.rows = -(-rows // page) * page
        shape = (layers, 2, batch, heads.kv, self.rows, heads.dim)
        self.memory = torch.empty(max(least, math.prod(shape)), device=device, dtype=dtype)
        self.kv = self.memory[: math.prod(shape)].view(shape)

    def in_pages(self, page: int) -> "KVStore":
        """The same memory for tables of another unit.

        Raises:
            ValueError: its rows are no whole number of such pages.
        """
        if self.rows % page:
            raise ValueError(f"a store of {self.rows} rows has no whole number of pages of {page}")
        other = copy.copy(self)
        other.page = page
        return other

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V ``[B, H_kv, S, D]``."""
        return self.kv[index, 0], self.kv[index, 1]

    def paged(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V as pages ``[pages, H_kv, page, D]``; page p of sequence b is ``b * pages_apart + p``."""
        count = (self.batch - 1) * self.pages_apart + self.rows // self.page
        shape = (count, self.heads.kv, self.page, self.heads.dim)
        strides = (self.page * self.heads.dim, self.rows * self.heads.dim, self.heads.dim, 1)
        k, v = self.layer(index)
        return k.as_strided(shape, strides, k.storage_offset()), v.as_strided(
            shape, strides, v.storage_offset()
        )

    @property
    def pages_apart(self) -> int:
        return self.heads.kv * (self.rows // self.page)

    def move(self, index: Tensor, start: Tensor) -> None:
        """In all layers, row ``start[b] + index[b, i]`` becomes row ``start[b] + i``; -1 moves nothing."""
        step.move_rows(self.kv.flatten(0, 1), index, start)


class TreeRows:
    """T new rows a sequence, of which each sees the rows before the tail and its ancestors in it.

    Args:
        store: where rows live.
        queries: T.
        tail: N >= T, rows that the mask covers; the T new ones are the last of them.
        mask: bool ``[T, N]`` where it never changes.

    Attributes:
        capturable: whether a CUDA graph can hold a forward over them.
        resizable: whether a forward may bring fewer new rows than T, the first ones of the plan.
    """

    capturable = True

    def __init__(self, store: KVStore, queries: int, tail: int | None = None, mask: Tensor | None = None):
        self.store = store
        tail = queries if tail is None else tail
        if mask is None:
            mask = torch.ones(queries, tail, dtype=torch.bool)
        device = store.kv.device
        self.resizable = device.type != "cuda"
        self.at = torch.zeros(store.batch, dtype=torch.int64, device=device)
        self.ahead = tail - queries
        self.plan: Plan = plan_trees(
            store.heads, [mask] * store.batch, [0] * store.batch, device=device, dtype=store.kv.dtype
        )

    def begin(self, before: Tensor, words: Tensor | None = None) -> None:
        """Say where this forward stands.

        Args:
            before: int64 ``[B]`` rows before the tail.
            words: int64 ``[B, T]``, bit j of word t: row t sees tail row j (tails of at most 64 rows). Fewer
                columns where the forward brings fewer rows.
        """
        torch.add(before, self.ahead, out=self.at)
        self.plan.lengths.copy_(before)
        if words is not None:
            self.plan.mask.view(self.store.batch, -1)[:, : words.shape[1]] = words

    def follow(self, at: Tensor, lengths: Tensor) -> None:
        """Stand where these buffers say, instead of ``begin``; the mask is ``plan.mask``.

        Args:
            at: int64 ``[B]``, the first of the new rows.
            lengths: int32 ``[B]``, rows before the tail.
        """
        self.at, self.plan = at, replace(self.plan, lengths=lengths)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, sinks: Tensor | None
    ) -> Tensor:
        keys, values = self.store.layer(layer)
        step.append_rows(keys, values, k, v, self.at)
        return self._attend(q, keys, values, scale, softcap, sinks, None)

    def _attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        softcap: float,
        sinks: Tensor | None,
        table: Tensor | None,
    ) -> Tensor:
        batch, heads, queries, dim = q.shape
        packed = q.transpose(1, 2).reshape(batch * queries, heads, dim)
        out = planned.run(
            packed, keys, values, self.plan, scale=scale, table=table, softcap=softcap or None, sinks=sinks
        )
        return out.view(batch, queries, heads, dim)


class RetrievalRows(TreeRows):
    """New rows that see a selection of the rows before them: chosen chunks and the recent ones.

    A view: a table of chunks for each layer and KV head names rows of the full cache, and nothing is
    copied. The new rows stand where the full cache's next rows will, which overwrites them.

    Args:
        store: the full cache; its page is the chunk.
        queries: T.
        config: budget, recent window (tokens).
        growth: rows by which the context may grow from one choice to the next.
    """

    def __init__(self, store: KVStore, queries: int, config: RetrievalConfig, growth: int) -> None:
        super().__init__(store, queries)
        chunk, device = config.chunk, store.kv.device
        layers, _, batch = store.kv.shape[:3]
        self.config = config
        self.slots = (config.budget - config.recent) // chunk
        self.choosing = False
        recent = -(-(config.recent + growth + queries) // chunk) + 2
        self._recent = torch.arange(recent, device=device)
        self._first_page = torch.arange(batch, device=device)[:, None] * store.pages_apart
        shape = (layers, batch, store.heads.kv, self.slots + recent)
        self.table = torch.zeros(shape, dtype=torch.int32, device=device)
        self.means = torch.zeros(
            layers, batch, store.heads.kv, store.rows // chunk, store.heads.dim, device=device,
            dtype=store.kv.dtype,
        )  # fmt: skip
        self.boundary = torch.zeros(batch, dtype=torch.int64, device=device)

    def choose(self, end: Tensor, settled: Tensor) -> None:
        """Let the next forward choose by its root.

        Candidates are the chunks before the recent window of ``end``, as far as their rows are ``settled``.
        """
        boundary = (end - self.config.recent).minimum(settled) // self.config.chunk
        # Where there are no more chunks than slots, all of them are chosen and the table is the identity.
        self.boundary.copy_(boundary.clamp_min(self.slots))
        last = self.store.rows // self.config.chunk - 1
        recent = (self.boundary[:, None] + self._recent).clamp_max(last) + self._first_page
        self.table[..., self.slots :] = recent[:, None].int()

    def begin(self, before: Tensor, words: Tensor | None = None) -> None:
        super().begin(before, words)
        held = self.slots - self.boundary
        self.plan.lengths.copy_(before + held * self.config.chunk)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, sinks: Tensor | None
    ) -> Tensor:
        table = self.table[layer]
        if self.choosing:
            step.select_chunks(q[:, :, 0], self.means[layer], self.boundary, table, self.slots, scale)
            if self.store.batch > 1:
                table[:, :, : self.slots] += self._first_page[:, :, None].int()
        keys, values = self.store.layer(layer)
        step.append_rows(keys, values, k, v, self.at)
        return self._attend(q, *self.store.paged(layer), scale, softcap, sinks, table)

    def renew_means(self, first: Tensor, count: int) -> None:
        """Means of the ``count`` chunks from chunk ``first[b]`` on, after rows in them were settled."""
        step.chunk_means(self.means, self.store.kv[:, 0], first, count, self.config.chunk)

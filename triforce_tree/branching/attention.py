"""Attention of a forward over a tree of texts: by blocks of queries, by nodes, or by paths."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from triforce_tree.branching.layout import Layout
from triforce_tree.branching.node import Node
from triforce_tree.branching.pool import KVPool
from triforce_tree.kernels.attention.blocks.plan import BlockPlan
from triforce_tree.kernels.attention.plan import KV, AttentionParams, Heads, plan_trees
from triforce_tree.kernels.attention.segments import NodePlan
from triforce_tree.kernels.cpu.fp32.library import library
from triforce_tree.runtime.devices import pinned

MOST_READ = 100_000
"""Positions that all queries of a forward see together, up to which each reads its path for itself on a CPU:
the C kernel then takes less time than the calls for each node. Measured on two cores, 3 heads of 128."""


class BlockAttention:
    """Attention by blocks of queries, with the Triton kernels.

    Args:
        heads: kinds of attention of the layers.
        pool: keys and values.
        queries, segments, owners, tail: capacities, as for ``BlockPlan``.
    """

    def __init__(
        self, heads: Iterable[Heads], pool: KVPool, queries: int, segments: int, owners: int, tail: int
    ) -> None:
        device, dtype = pool.store.device, pool.store.dtype
        sizes = queries, segments, owners, tail, pool.pages, pool.page
        self._plans = {kind: BlockPlan(kind, *sizes, device=device, dtype=dtype) for kind in heads}

    def set(self, layout: Layout) -> None:
        """Describe the next forward."""
        pages = [node.pages for node in layout.nodes]
        for plan in self._plans.values():
            plan.set(layout.segments, pages)

    def prepare(self, layout: Layout) -> None:
        """Plan a forward that may come next, without touching what the device reads."""
        pages = [node.pages for node in layout.nodes]
        for plan in self._plans.values():
            plan.prepare(layout.segments, pages)

    def __call__(self, heads: Heads, q: Tensor, kv: KV, params: AttentionParams) -> Tensor:
        """Returns the output ``[T, H_q, D_v]`` of queries ``[T, H_q, D]`` over pages ``[pages, H_kv, page,
        D]``.
        """
        from triforce_tree.kernels.attention.blocks import launch

        return launch.run(
            q, kv.k, kv.v, self._plans[heads], scale=params.scale, softcap=params.softcap, sinks=params.sinks
        )[0]


class NodeAttention:
    """Attention by nodes, or by paths in short trees; arguments and methods are those of
    :class:`BlockAttention`.
    """

    def __init__(
        self, heads: Iterable[Heads], pool: KVPool, queries: int, segments: int, owners: int, tail: int
    ) -> None:
        device, dtype = pool.store.device, pool.store.dtype
        kinds, sizes = list(heads), (queries, segments, owners, tail)
        self._plans = {kind: NodePlan(kind, *sizes, device=device, dtype=dtype) for kind in kinds}
        backend = pool.store.attention
        self._attentions = {kind: backend.segments(own.plan, dtype) for kind, own in self._plans.items()}
        self._table = torch.zeros(segments, max(1, pool.pages), dtype=torch.int32, device=device)
        # The source from which each row of the table was written.
        self._written: list[tuple[Node, tuple[int, ...]] | None] = [None] * segments
        self._paths = PathSlots(kinds, pool, queries)
        self._short = False
        # Without the C kernel paths are gathered one by one.
        self._compiled = dtype == torch.float32 and library() is not None

    def set(self, layout: Layout) -> None:
        read = sum(segment.queries * (segment.length + segment.tail) for segment in layout.segments)
        self._short = self._compiled and read <= MOST_READ
        if self._short:
            self._paths.set(layout)
            return
        for plan in self._plans.values():
            plan.set(layout.segments)
        for row, node in enumerate(layout.nodes if self._plans else ()):
            pages = tuple(node.pages)
            if self._written[row] != (node, pages):
                self._table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
                self._written[row] = node, pages

    def __call__(self, heads: Heads, q: Tensor, kv: KV, params: AttentionParams) -> Tensor:
        if self._short:
            return self._paths(heads, q, kv, params)
        return self._attentions[heads].run(q, kv._replace(table=self._table), params)


class PathSlots:
    """Attention in which each query reads the positions of its own path alone, from a table of single slots.

    It is used for layers with a sliding window, which see few positions, for short trees on a CPU, and for
    backends without another attention to trees of texts.

    Args:
        heads: kinds of attention of the layers.
        pool: keys and values.
        queries: capacity.
        window: positions that a query sees, its own included; None for all.
        chunked: whether windows begin at multiples of ``window``.
    """

    def __init__(
        self,
        heads: Iterable[Heads],
        pool: KVPool,
        queries: int,
        window: int | None = None,
        chunked: bool = False,
    ) -> None:
        self._window, self._chunked, self._page = window, chunked, pool.page
        device, dtype = pool.store.device, pool.store.dtype
        # With a window the table's address stays: captured graphs hold it.
        self._table = torch.zeros(queries, window or 0, dtype=torch.int32, device=device)
        nothing = [torch.ones(1, 0, dtype=torch.bool)] * queries
        plans = {kind: plan_trees(kind, nothing, [0] * queries, device=device) for kind in heads}
        self._attentions = {kind: pool.store.attention.trees(own, dtype) for kind, own in plans.items()}

    def set(self, layout: Layout) -> None:
        """Describe the next forward."""
        paths = [
            node.path_slots(row + 1, self._seen(node.start + row), self._page)
            for node, start, count in layout.feeds
            for row in range(start, start + count)
        ]
        queries = len(self._table)
        table = np.zeros((queries, self._window or max(map(len, paths))), dtype=np.int32)
        for own, slots in zip(table, paths, strict=False):
            own[: len(slots)] = slots
        if self._window is None:
            self._table = torch.from_numpy(table).to(self._table.device)
        else:
            self._table.copy_(pinned(torch.from_numpy(table), self._table.device), non_blocking=True)
        lengths = torch.zeros(queries, dtype=torch.int32, device="cpu")
        lengths[: len(paths)] = torch.tensor([len(slots) for slots in paths])
        lengths = pinned(lengths, self._table.device)
        for attention in self._attentions.values():
            attention.plan.lengths.copy_(lengths, non_blocking=True)
            attention.begin()

    def _seen(self, position: int) -> int:
        """Returns how many positions a query at this position sees."""
        if self._window is None:
            return position + 1
        return 1 + (position % self._window if self._chunked else min(position, self._window - 1))

    def __call__(self, heads: Heads, q: Tensor, kv: KV, params: AttentionParams) -> Tensor:
        """Returns the output as described in :class:`BlockAttention`."""
        keys, values = (pages.transpose(1, 2).flatten(0, 1)[:, :, None] for pages in (kv.k, kv.v))
        # The table has what a window shows alone.
        return self._attentions[heads].run(q, KV(keys, values, self._table), params)


def attention_of(
    heads: Iterable[Heads], pool: KVPool, queries: int, segments: int, owners: int, tail: int
) -> BlockAttention | NodeAttention | PathSlots:
    """Returns the attention to texts that the backend of the pool's store provides; arguments as of
    :class:`BlockAttention`.
    """
    match pool.store.attention.can.texts:
        case "blocks":
            return BlockAttention(heads, pool, queries, segments, owners, tail)
        case "nodes":
            return NodeAttention(heads, pool, queries, segments, owners, tail)
    return PathSlots(heads, pool, queries)

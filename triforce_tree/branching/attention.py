"""Attention of a forward over a tree of texts: by blocks of queries, by nodes, or by paths."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from triforce_tree.branching.layout import Layout, Sizes
from triforce_tree.branching.node import Node
from triforce_tree.branching.pages import KVPages
from triforce_tree.kernels.attention.blocks.plan import BlockPlan
from triforce_tree.kernels.attention.plan import KV, AttentionParams, Heads, plan_trees
from triforce_tree.kernels.attention.segments import NodePlan
from triforce_tree.kernels.cpu.fp32.library import library
from triforce_tree.runtime.devices import pinned

MOST_READ = 100_000
"""Most positions that the queries of a forward see together with which each query reads its own path on a
CPU. The C kernel then takes less time than a call for each node (measured on two cores, 3 heads of 128)."""


class BlockAttention:
    """Attention by blocks of queries, with the Triton kernels.

    Args:
        heads: kinds of attention of the layers.
        pages: keys and values.
        sizes: capacities.
    """

    def __init__(self, heads: Iterable[Heads], pages: KVPages, sizes: Sizes) -> None:
        store = pages.store
        capacities = sizes.queries, sizes.segments, sizes.owners, sizes.tail, pages.count, pages.page
        self._plans = {
            kind: BlockPlan(kind, *capacities, device=store.device, dtype=store.dtype) for kind in heads
        }

    def set(self, layout: Layout) -> None:
        """Describes the next forward."""
        for plan in self._plans.values():
            plan.set(layout.segments, [node.pages for node in layout.nodes])

    def prepare(self, layout: Layout) -> None:
        """Plans a forward that may come next, without writing to buffers that the device reads."""
        for plan in self._plans.values():
            plan.prepare(layout.segments, [node.pages for node in layout.nodes])

    def __call__(self, heads: Heads, q: Tensor, kv: KV, params: AttentionParams) -> Tensor:
        """Returns the output ``[T, H_q, D_v]`` of queries ``[T, H_q, D]`` over pages ``[pages, H_kv, page,
        D]``.
        """
        from triforce_tree.kernels.attention.blocks import launch

        return launch.run(
            q, kv.k, kv.v, self._plans[heads], scale=params.scale, softcap=params.softcap, sinks=params.sinks
        )[0]


class PathAttention:
    """Attention in which each query reads the positions of its own text, from a table of single KV slots.

    It serves layers with a sliding window, which see few positions, short trees on a CPU, and backends
    without another attention to trees of texts.

    Args:
        heads, pages, sizes: as for :class:`BlockAttention`.
        window: the positions that a query sees, its own included; None for all.
        chunked: whether windows begin at multiples of ``window``.
    """

    def __init__(
        self,
        heads: Iterable[Heads],
        pages: KVPages,
        sizes: Sizes,
        window: int | None = None,
        chunked: bool = False,
    ) -> None:
        self._window, self._chunked, self._page = window, chunked, pages.page
        store, queries = pages.store, sizes.queries
        # A captured graph holds the address of a table with a window.
        self._table = torch.zeros(queries, window or 0, dtype=torch.int32, device=store.device)
        nothing = [torch.ones(1, 0, dtype=torch.bool)] * queries
        plans = {kind: plan_trees(kind, nothing, [0] * queries, device=store.device) for kind in heads}
        self._attentions = {kind: store.attention.trees(own, store.dtype) for kind, own in plans.items()}

    def set(self, layout: Layout) -> None:
        """See :class:`BlockAttention`."""
        paths = [
            node.path_slots(index + 1, self._seen(node.start + index), self._page)
            for node, start, count in layout.feeds
            for index in range(start, start + count)
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

    def prepare(self, layout: Layout) -> None:
        """See :class:`BlockAttention`. The table is not made in advance."""

    def _seen(self, position: int) -> int:
        """Returns how many positions a query at this position sees."""
        if self._window is None:
            return position + 1
        return 1 + (position % self._window if self._chunked else min(position, self._window - 1))

    def __call__(self, heads: Heads, q: Tensor, kv: KV, params: AttentionParams) -> Tensor:
        """See :class:`BlockAttention`."""
        keys, values = (pages.transpose(1, 2).flatten(0, 1)[:, :, None] for pages in (kv.k, kv.v))
        return self._attentions[heads].run(q, KV(keys, values, self._table), params)


class NodeAttention:
    """Attention by nodes, or by paths in short trees.

    Args:
        heads, pages, sizes: as for :class:`BlockAttention`.
    """

    def __init__(self, heads: Iterable[Heads], pages: KVPages, sizes: Sizes) -> None:
        device, dtype = pages.store.device, pages.store.dtype
        kinds, capacities = list(heads), (sizes.queries, sizes.segments, sizes.owners, sizes.tail)
        self._plans = {kind: NodePlan(kind, *capacities, device=device, dtype=dtype) for kind in kinds}
        backend = pages.store.attention
        self._attentions = {kind: backend.segments(own.plan, dtype) for kind, own in self._plans.items()}
        self._table = torch.zeros(sizes.segments, max(1, pages.count), dtype=torch.int32, device=device)
        # The node and its pages that each line of the table was written for.
        self._written: list[tuple[Node, tuple[int, ...]] | None] = [None] * sizes.segments
        self._paths = PathAttention(kinds, pages, sizes)
        self._short = False
        # Without the C kernel the keys of each path would be gathered one by one.
        self._compiled = dtype == torch.float32 and library() is not None

    def set(self, layout: Layout) -> None:
        """See :class:`BlockAttention`."""
        read = sum(segment.queries * (segment.length + segment.tail) for segment in layout.segments)
        self._short = self._compiled and read <= MOST_READ
        if self._short:
            self._paths.set(layout)
            return
        for plan in self._plans.values():
            plan.set(layout.segments)
        for line, node in enumerate(layout.nodes):
            pages = tuple(node.pages)
            if self._written[line] != (node, pages):
                self._table[line, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
                self._written[line] = node, pages

    def prepare(self, layout: Layout) -> None:
        """See :class:`BlockAttention`. A CPU plans no forward in advance."""

    def __call__(self, heads: Heads, q: Tensor, kv: KV, params: AttentionParams) -> Tensor:
        """See :class:`BlockAttention`."""
        if self._short:
            return self._paths(heads, q, kv, params)
        return self._attentions[heads].run(q, kv._replace(table=self._table), params)


TextAttention = BlockAttention | NodeAttention | PathAttention


def attention_of(heads: Iterable[Heads], pages: KVPages, sizes: Sizes) -> TextAttention:
    """Returns the attention to trees of texts that the backend of the pages provides."""
    match pages.store.attention.can.texts:
        case "blocks":
            return BlockAttention(heads, pages, sizes)
        case "nodes":
            return NodeAttention(heads, pages, sizes)
    return PathAttention(heads, pages, sizes)

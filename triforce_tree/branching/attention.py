"""Attention of a forward over a tree of texts: by blocks of queries, by nodes, or by paths."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from triforce_tree.branching.layout import Layout, Sizes
from triforce_tree.branching.node import Node
from triforce_tree.branching.pages import KVPages
from triforce_tree.kernels.attention.backend import Attention
from triforce_tree.kernels.attention.blocks.plan import BlockPlan
from triforce_tree.kernels.attention.plan import KV, AttentionParams, Heads, plan_trees
from triforce_tree.kernels.cpu.tree_attention import merged_parts
from triforce_tree.runtime.devices import pinned

LEAST_SPARED = 8192
"""Fewest reads of a position that a call for all queries of a node spares on a CPU. The call and the merging
of its results take about as long as so many reads (3 heads of 128)."""


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

    It serves layers with a sliding window, which see few positions, and backends without another attention to
    trees of texts.

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
        self.show(
            [
                node.path_slots(index + 1, self._seen(node.start + index), self._page)
                for node, start, count in layout.feeds
                for index in range(start, start + count)
            ]
        )

    def show(self, paths: Sequence[np.ndarray]) -> None:
        """Sets the KV slots that each query of the next forward sees."""
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
        return self._attentions[heads].run(q, self._in_slots(kv), params)

    def states(self, heads: Heads, q: Tensor, kv: KV, params: AttentionParams) -> tuple[Tensor, Tensor]:
        """Returns the output ``[T, H_q, D_v]`` and its log-sum-exp, fp32 ``[T, H_q]``."""
        return self._attentions[heads].states(q, self._in_slots(kv), params)

    def _in_slots(self, kv: KV) -> KV:
        """Returns every slot as a page, with the table of the queries."""
        keys, values = (pages.transpose(1, 2).flatten(0, 1)[:, :, None] for pages in (kv.k, kv.v))
        return KV(keys, values, self._table)


class NodeAttention:
    """Attention on a CPU: to nodes that many queries see by one call for all of them, else by paths.

    Args:
        heads, pages, sizes: as for :class:`BlockAttention`.
    """

    def __init__(self, heads: Iterable[Heads], pages: KVPages, sizes: Sizes) -> None:
        self._kinds, self._page, self._store = list(heads), pages.page, pages.store
        self._paths = PathAttention(self._kinds, pages, sizes)
        # The queries that see a node, its pages, and the attention for each kind of heads.
        self._shared: list[tuple[slice, Tensor, dict[Heads, Attention]]] = []

    def set(self, layout: Layout) -> None:
        """See :class:`BlockAttention`."""
        paths: list[list[np.ndarray]] = [[] for feed in layout.feeds for _ in range(feed.size)]
        self._shared = []
        for number, length, tail, first, queries in layout.segments:
            node = layout.nodes[number]
            slots = node.slots(0, length + tail, self._page)
            shared = 0
            if (queries - 1) * length >= LEAST_SPARED:
                # The last position stays in the paths, so that no path is empty.
                shared = length - 1
                self._shared.append(self._attention_to(node, shared, first, queries))
            for query in range(queries):
                paths[first + query].append(slots[shared : length + min(tail, query + 1)])
        self._paths.show([np.concatenate(own) for own in paths])

    def _attention_to(
        self, node: Node, length: int, first: int, queries: int
    ) -> tuple[slice, Tensor, dict[Heads, Attention]]:
        pages = torch.tensor([node.pages[: -(-length // self._page)]], dtype=torch.int32)
        seen, store = torch.ones(queries, 0, dtype=torch.bool), self._store
        plans = {kind: plan_trees(kind, [seen], [length], device=store.device) for kind in self._kinds}
        attentions = {kind: store.attention.trees(plan, store.dtype) for kind, plan in plans.items()}
        return slice(first, first + queries), pages, attentions

    def prepare(self, layout: Layout) -> None:
        """See :class:`BlockAttention`. A CPU plans no forward in advance."""

    def __call__(self, heads: Heads, q: Tensor, kv: KV, params: AttentionParams) -> Tensor:
        """See :class:`BlockAttention`."""
        if not self._shared:
            return self._paths(heads, q, kv, params)
        parts = [(torch.arange(len(q)), *self._paths.states(heads, q, kv, params))]
        without_sinks = replace(params, sinks=None)
        for queries, pages, attentions in self._shared:
            part = attentions[heads].states(q[queries], kv._replace(table=pages), without_sinks)
            parts.append((torch.arange(queries.start, queries.stop), *part))
        return merged_parts(parts, len(q)).to(q.dtype)


TextAttention = BlockAttention | NodeAttention | PathAttention


def attention_of(heads: Iterable[Heads], pages: KVPages, sizes: Sizes) -> TextAttention:
    """Returns the attention to trees of texts that the backend of the pages provides."""
    match pages.store.attention.can.texts:
        case "blocks":
            return BlockAttention(heads, pages, sizes)
        case "nodes":
            return NodeAttention(heads, pages, sizes)
    return PathAttention(heads, pages, sizes)

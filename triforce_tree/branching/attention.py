"""Attention of a forward over a tree of texts, in layers that see all positions."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from triforce_tree.branching.layout import Layout
from triforce_tree.branching.node import Node
from triforce_tree.branching.pool import KVPool
from triforce_tree.kernels.attention import nodes
from triforce_tree.kernels.attention.blocks.plan import BlockPlan
from triforce_tree.kernels.attention.nodes import NodePlan
from triforce_tree.kernels.attention.plan import Heads


class BlockAttention:
    """On a GPU: by blocks of queries.

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
        """Describe the coming forward."""
        pages = [node.pages for node in layout.nodes]
        for plan in self._plans.values():
            plan.set(layout.segments, pages)

    def prepare(self, layout: Layout) -> None:
        """Plan a forward that may come next, without touching what the device reads."""
        pages = [node.pages for node in layout.nodes]
        for plan in self._plans.values():
            plan.prepare(layout.segments, pages)

    def __call__(self, heads: Heads, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        """The output ``[T, H_q, D_v]`` of queries ``[T, H_q, D]`` over pages ``[pages, H_kv, page, D]``."""
        from triforce_tree.kernels.attention.blocks import launch

        return launch.run(q, k, v, self._plans[heads], **how)[0]


class NodeAttention:
    """On a CPU: by nodes. Arguments and methods are those of :class:`BlockAttention`."""

    def __init__(
        self, heads: Iterable[Heads], pool: KVPool, queries: int, segments: int, owners: int, tail: int
    ) -> None:
        device, dtype = pool.store.device, pool.store.dtype
        self._plans = {
            kind: NodePlan(kind, queries, segments, owners, tail, device=device, dtype=dtype)
            for kind in heads
        }
        self._table = torch.zeros(segments, max(1, pool.pages), dtype=torch.int32, device=device)
        # What each row of the table was written from.
        self._written: list[tuple[Node, tuple[int, ...]] | None] = [None] * segments

    def set(self, layout: Layout) -> None:
        for plan in self._plans.values():
            plan.set(layout.segments)
        for row, node in enumerate(layout.nodes if self._plans else ()):
            pages = tuple(node.pages)
            if self._written[row] != (node, pages):
                self._table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
                self._written[row] = node, pages

    def __call__(self, heads: Heads, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        return nodes.states(q, k, v, self._plans[heads], table=self._table, **how)[0]

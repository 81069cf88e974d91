"""Attention of a forward over a tree of texts: by blocks of queries, or by paths."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from triforce_tree.branching.layout import Layout, Sizes
from triforce_tree.branching.pages import KVPages
from triforce_tree.kernels.attention.backend import Attention
from triforce_tree.kernels.attention.blocks.plan import BlockPlan
from triforce_tree.kernels.attention.plan import KV, AttentionParams, Heads, pack_mask, plan_trees
from triforce_tree.kernels.attention.prefixes import PrefixPlan, PrefixSegment
from triforce_tree.runtime.devices import pinned

LEAST_SPARED = 8192
"""Fewest reads of a position that are spared where the positions of a node are read once. On a CPU one more
call of the kernel, and the merging of its results, take about as long as so many reads (3 heads of 128)."""


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

    It serves all layers where the backend has no attention by blocks, and layers with a sliding window, which
    see few positions. Without a window, positions that many queries see are read once for all of them, if the
    backend can do so.

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
        self._store, queries = pages.store, sizes.queries
        self._backend = backend = self._store.attention
        # A captured graph holds the address of a table with a window.
        self._table = torch.zeros(queries, window or 0, dtype=torch.int32, device=self._store.device)
        nothing = [torch.ones(1, 0, dtype=torch.bool, device="cpu")] * queries
        plans = {kind: plan_trees(kind, nothing, [0] * queries, device=self._store.device) for kind in heads}
        self._alone = {kind: backend.trees(plan, self._store.dtype, page=1) for kind, plan in plans.items()}
        self._attentions: dict[Heads, Attention] = self._alone
        self._sharing: dict[Heads, tuple[PrefixPlan, Attention]] = {}
        self._depth = 0

    def set(self, layout: Layout) -> None:
        """See :class:`BlockAttention`."""
        if self._window is not None:
            self._show(
                [
                    node.path_slots(index + 1, self._seen(node.start + index), self._page)
                    for node, start, count in layout.feeds
                    for index in range(start, start + count)
                ]
            )
            return
        # The slots of each query that others see, too, then its other slots: their order is of no importance.
        count = sum(feed.size for feed in layout.feeds)
        shared: list[list[np.ndarray]] = [[] for _ in range(count)]
        rest: list[list[np.ndarray]] = [[] for _ in range(count)]
        ends, segments, shares = [0] * count, list[PrefixSegment](), self._backend.can.prefixes
        for number, length, tail, first, queries in layout.segments:
            slots, once = layout.nodes[number].slots(0, length + tail, self._page), 0
            if shares and length > 1 and (queries - 1) * length >= LEAST_SPARED:
                # The last position stays with each query, so that none of them has nothing of its own.
                once = length - 1
                segments.append(PrefixSegment(ends[first], once, first, queries))
            for query in range(first, first + queries):
                if once:
                    ends[query] += once
                    shared[query].append(slots[:once])
                rest[query].append(slots[once : length + min(tail, query - first + 1)])
        self._show([np.concatenate([*a, *b]) for a, b in zip(shared, rest, strict=True)])
        if segments:
            self._share(segments, ends, max(map(len, shared)))

    def _show(self, paths: Sequence[np.ndarray]) -> None:
        """Sets the KV slots that each query of the next forward sees."""
        queries, device = self._table.shape[0], self._table.device
        table = np.zeros((queries, self._window or max(map(len, paths))), dtype=np.int32)
        for own, slots in zip(table, paths, strict=False):
            own[: len(slots)] = slots
        if self._window is None:
            self._table = torch.from_numpy(table).to(device)
        else:
            self._table.copy_(pinned(torch.from_numpy(table), device), non_blocking=True)
        lengths = torch.zeros(queries, dtype=torch.int32, device="cpu")
        lengths[: len(paths)] = torch.tensor([len(slots) for slots in paths], device="cpu")
        lengths = pinned(lengths, device)
        self._attentions = self._alone
        for attention in self._attentions.values():
            attention.plan.lengths.copy_(lengths, non_blocking=True)
            attention.begin()

    def _share(self, segments: Sequence[PrefixSegment], ends: Sequence[int], depth: int) -> None:
        """Lets these (at most ``depth`` of a query) be read once; queries have ``ends`` positions there."""
        queries, device = self._table.shape[0], self._table.device
        if depth > self._depth:
            self._depth, mask = depth, torch.ones(1, 0, dtype=torch.bool, device="cpu")
            words = pack_mask(mask).repeat(queries, 1).to(device)
            zeros = torch.zeros(queries, dtype=torch.int32, device=device)
            plans = {kind: PrefixPlan(kind, mask, queries, depth, zeros, words) for kind in self._alone}
            backend, dtype = self._backend, self._store.dtype
            self._sharing = {
                kind: (plan, backend.prefixes(plan, dtype, page=1)) for kind, plan in plans.items()
            }
        self._attentions = {}
        shared = torch.tensor(ends, dtype=torch.int32, device=device)
        for kind, (plan, attention) in self._sharing.items():
            plan.set(segments, ends)
            torch.sub(self._alone[kind].plan.lengths, shared, out=plan.own.lengths)
            attention.begin()
            self._attentions[kind] = attention

    def prepare(self, layout: Layout) -> None:
        """See :class:`BlockAttention`. The table is not made in advance."""

    def _seen(self, position: int) -> int:
        """Returns how many positions a query at this position sees."""
        assert self._window is not None
        return 1 + (position % self._window if self._chunked else min(position, self._window - 1))

    def __call__(self, heads: Heads, q: Tensor, kv: KV, params: AttentionParams) -> Tensor:
        """See :class:`BlockAttention`."""
        keys, values = (pages.transpose(1, 2).flatten(0, 1)[:, :, None] for pages in (kv.k, kv.v))
        return self._attentions[heads].run(q, KV(keys, values, self._table), params)


TextAttention = BlockAttention | PathAttention


def attention_of(heads: Iterable[Heads], pages: KVPages, sizes: Sizes) -> TextAttention:
    """Returns the attention to trees of texts that the backend of the pages provides."""
    made = BlockAttention if pages.store.attention.can.blocks else PathAttention
    return made(heads, pages, sizes)

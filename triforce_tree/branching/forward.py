"""Forwards of the target over a tree of texts, in buffers that CUDA graphs may hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from triforce_tree.branching.attention import BlockAttention, PathSlots, attention_of
from triforce_tree.branching.layout import Feed, Layout, arranged
from triforce_tree.branching.pool import KVPool
from triforce_tree.kernels.attention.plan import KV, AttentionParams
from triforce_tree.models.attention import KVShape
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.step_model import StepModel, step_model
from triforce_tree.runtime.devices import pinned, sent
from triforce_tree.runtime.executor import Step, executor

MOST_QUERIES = 256
"""Most tokens of one forward."""
# Least capacities on a GPU: a tree changes a little with every token, and its forward's size should not.
_LEAST_SEGMENTS, _LEAST_DEPTH = 16, 4


@dataclass(frozen=True)
class Sizes:
    """Capacities of a forward's buffers: on a GPU powers of two, so that few of them are captured.

    Attributes:
        queries, segments, owners, tail: as for ``BlockAttention``.
    """

    queries: int
    segments: int
    owners: int
    tail: int

    @classmethod
    def of(cls, layout: Layout, on_gpu: bool) -> "Sizes":
        queries = sum(feed.size for feed in layout.feeds)
        tail = max((segment.tail for segment in layout.segments), default=0)
        sizes = queries, max(len(layout.segments), 1), max(layout.owners, 1), tail
        if not on_gpu:
            return cls(*sizes)
        queries = _power(queries, 8)
        segments = _power(sizes[1], _LEAST_SEGMENTS)
        owners = _power(sizes[2], _LEAST_DEPTH * queries)
        return cls(queries, segments, owners, tail and (64 if tail <= 64 else MOST_QUERIES))


def _power(number: int, least: int) -> int:
    return max(least, 1 << (number - 1).bit_length())


class _Buffers:
    """The inputs, plans and logits of one forward. On a GPU, a forward with one token per node is captured if
    the model allows it.

    Args:
        model: the target's forwards.
        pool: keys and values.
        shapes: of the target's layers, with their windows.
        sizes: capacities.
    """

    def __init__(self, model: StepModel, pool: KVPool, shapes: Sequence[KVShape], sizes: Sizes) -> None:
        device = pool.store.device
        self._model, self._pool, self.sizes = model, pool, sizes
        self._ids = torch.zeros(3, sizes.queries, dtype=torch.int64, device=device)
        whole = sorted({shape.heads for shape in shapes if shape.window is None}, key=repr)
        capacities = sizes.queries, sizes.segments, sizes.owners, sizes.tail
        self._attention = attention_of(whole, pool, *capacities)
        self._windows: dict[tuple[int, bool], PathSlots] = {}
        for shape in shapes:
            if shape.window is not None and (key := (shape.window, shape.chunked)) not in self._windows:
                alike = {s.heads for s in shapes if (s.window, s.chunked) == key}
                self._windows[key] = PathSlots(alike, pool, sizes.queries, *key)
        self.logits = torch.empty(0)
        # Runs of several tokens come once, and are not worth a capture. Buffers are zero at first, so that
        # the trial runs of a capture write to slot 0, which nobody reads.
        capturable = model.capturable and not sizes.tail and pool.store.attention.can.captures
        self._run = executor([Step(self._forward, capturable)], device)

    def __call__(self, layout: Layout, tokens: Tensor | None = None) -> Tensor:
        """Returns logits ``[T, V]`` of the layout's queries, until the next forward.

        Args:
            tokens: int64 ``[T]`` on the device, of the queries; by default those that the nodes have.
        """
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for node, start, count in layout.feeds:
            stop = start + count
            ids += node.tokens[start:stop] if tokens is None else [0] * count
            positions += range(node.start + start, node.start + stop)
            fresh = max(start, node.stored)
            slots += [row % self._pool.page for row in range(start, min(fresh, stop))]
            slots += node.slots(fresh, stop, self._pool.page).tolist()
        self._ids.zero_()
        given = pinned(torch.tensor([ids, positions, slots], device="cpu"), self._ids.device)
        self._ids[:, : len(ids)].copy_(given, non_blocking=True)
        if tokens is not None:
            self._ids[0, : len(ids)] = tokens
        self._attention.set(layout)
        for window in self._windows.values():
            window.set(layout)
        self._run()
        return self.logits[0, : len(ids)]

    def prepare(self, layout: Layout) -> None:
        """Plan a forward that may come next, while the last one runs, if its tokens have pages already."""
        fits = Sizes.of(layout, on_gpu=True) == self.sizes
        there = all(feed.stop <= len(feed.node.pages) * self._pool.page for feed in layout.feeds)
        if isinstance(self._attention, BlockAttention) and fits and there:
            self._attention.prepare(layout)

    def _forward(self) -> None:
        tokens, positions, _ = self._ids
        self.logits = self._model(tokens[None], positions[None], self._attend)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        store = self._pool.store
        for cached, new in zip(store.layer(layer), (k, v), strict=True):
            cached[0].index_copy_(1, self._ids[2], new[0].to(cached.dtype))
        number, place = store.place(layer)
        group = store.groups[number]
        queries = q[0].transpose(0, 1)
        attend = self._attention if params.window is None else self._windows[params.window, params.chunked]
        return attend(group.shape.heads, queries, KV(*group.paged(place)), params)[None]


class Ahead:
    """The expected next forward of a series: the same nodes with one more token each.

    On a GPU it is laid out while the present forward runs. Between the forwards of a series, only the nodes'
    tokens and pages may change in the tree.
    """

    def __init__(self) -> None:
        self._feeds: list[Feed] = []
        self._layout: Layout | None = None

    def layout(self, feeds: Sequence[Feed]) -> Layout:
        """Returns the layout of these feeds; it may have been made in advance."""
        if self._layout is not None and self._feeds == list(feeds):
            return self._layout
        return arranged(feeds)

    def prepare(self, feeds: Sequence[Feed], buffers: _Buffers) -> None:
        """Lay out the forward that is expected after these feeds."""
        self._feeds = [Feed(node, start + 1, 1) for node, start, _ in feeds]
        self._layout = arranged(self._feeds)
        buffers.prepare(self._layout)


class TreeForward:
    """The target's logits after tokens of many nodes at once, one attention call a layer over all of them.

    Args:
        target: the model, inside ``active()`` for every call.
    """

    def __init__(self, target: HFModel) -> None:
        self._target = target
        self.model = step_model(target, compiled=target.device.type == "cuda")
        self._pool: KVPool | None = None
        self._buffers: dict[Sizes, _Buffers] = {}

    def __call__(
        self,
        pool: KVPool,
        feeds: Sequence[Feed],
        ahead: Ahead | None = None,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """Returns logits ``[T, V]`` of all tokens of the feeds, in the feeds' order. They are valid until the
        next call.

        Tokens that are not stored yet are stored in the nodes' pages, which must have been allocated.

        Args:
            pool: keys and values.
            feeds: the tokens to process.
            ahead: shared by a series of forwards of one token per node, on a GPU.
            tokens: int64 ``[T]`` on the device, if the nodes do not have these tokens yet. The caller adds
                them to the nodes, and counts them as stored. By default the nodes' own tokens are used.
        """
        layout = arranged(feeds) if ahead is None else ahead.layout(feeds)
        on_gpu = pool.store.device.type == "cuda"
        sizes = Sizes.of(layout, on_gpu)
        if pool is not self._pool:
            self._buffers, self._pool = {}, pool
        if sizes not in self._buffers:
            if not on_gpu:
                self._buffers.clear()
            make = partial(_Buffers, self.model, pool, self._target.kv_shapes)
            self._buffers[sizes] = make(sizes)
        order = _order(layout.feeds, feeds)
        if tokens is not None and order is not None:
            tokens = tokens[sent(torch.from_numpy(order), tokens.device)]
        logits = self._buffers[sizes](layout, tokens)
        if tokens is None:
            for node, start, count in layout.feeds:
                node.stored = max(node.stored, start + count)
        if order is not None:
            logits = logits[sent(torch.from_numpy(np.argsort(order)), logits.device)]
        if ahead is not None and on_gpu:
            ahead.prepare(feeds, self._buffers[sizes])
        return logits


def _order(arranged: Sequence[Feed], feeds: Sequence[Feed]) -> np.ndarray | None:
    """Returns for each query of the arranged feeds its index in the given feeds, or None if both orders are
    equal.
    """
    begins = np.cumsum([0, *(feed.size for feed in feeds)])
    begin = {feed.node: begins[number] for number, feed in enumerate(feeds)}
    order = np.concatenate([begin[feed.node] + np.arange(feed.size) for feed in arranged])
    return None if (order[1:] > order[:-1]).all() else order

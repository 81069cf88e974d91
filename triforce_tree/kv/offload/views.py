"""Views of an offloaded cache: the target's, and level 1's.

Layers without a window attend to the host store and to the newest tokens on the device; layers with a window
have all slots that they see in rings on the device.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Self

import torch
from torch import Tensor

from triforce_tree.config import RetrievalConfig
from triforce_tree.kernels import exchange, step
from triforce_tree.kernels.attention.backend import Attention
from triforce_tree.kernels.attention.plan import KV, AttentionParams
from triforce_tree.kernels.attention.reference import merge_states
from triforce_tree.kernels.cpu.offload_attention import State
from triforce_tree.kernels.exchange import link
from triforce_tree.kv.chunk_policy import BoundPolicy
from triforce_tree.kv.offload.offloaded_cache import OffloadedCache
from triforce_tree.kv.store import KVStore
from triforce_tree.kv.tree_attention_view import TreeAttentionView
from triforce_tree.runtime import distributed
from triforce_tree.runtime.executor import Cuts

TOGETHER = 8
"""Most resident pieces of one attention call."""

_SELECTED_SHARE = 0.25
"""Chunks that one refresh selects, as a share of the slots: with half, a refresh takes 1.4 times as long, and
as much is accepted."""


class OffloadedView(TreeAttentionView):
    """Is a view of an offloaded cache: layers with a window use its rings, subclasses define the others.

    Args:
        cache: the cache of the sequences.
        store: of the layers without a window; the first slot of the cache's device window is slot ``first``
            of it.
        queries, mask, depths: as for ``TreeAttentionView``.
    """

    _repeats = False

    def __init__(
        self,
        cache: OffloadedCache,
        store: KVStore,
        first: int,
        queries: int,
        mask: Tensor | None = None,
        depths: Sequence[int] | None = None,
    ) -> None:
        super().__init__(store, queries, mask=mask, depths=depths)
        # The plans of pieces are made for this number of queries.
        self.resizable = False
        self.cache, self._first = cache, first
        self._ring_view: TreeAttentionView | None = None
        if cache.rings.groups:
            self._ring_view = TreeAttentionView(cache.rings, queries, mask=mask, depths=depths)

    def begin(self, start: Tensor, mask_words: Tensor | None = None) -> None:
        super().begin(start - self.cache.base + self._first, mask_words)
        if self._ring_view is not None:
            self._ring_view.begin(start, mask_words)

    def move(self, index: Tensor) -> None:
        super().move(index)
        if self._ring_view is not None:
            self._ring_view.move(index)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        host_layer = self.cache.host_layers[layer]
        if host_layer is not None:
            return self._attend_without_window(layer, host_layer, q, k, v, params)
        assert self._ring_view is not None
        return self._ring_view(layer, q, k, v, params)

    def _attend_without_window(
        self, layer: int, host_layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams
    ) -> Tensor:
        """Attends in a layer without a window, which is layer ``host_layer`` of the host store."""
        raise NotImplementedError


class StreamedView(OffloadedView):
    """Is the target's view: each of T new tokens per sequence sees all committed tokens and its ancestors.

    A forward is captured in pieces on a GPU: graphs hold the layers with attention to the window and to the
    leading resident pieces, and what depends on the lengths in the host store is done between them. With
    several ranks all of it is called directly.
    """

    def __init__(
        self,
        cache: OffloadedCache,
        queries: int,
        mask: Tensor | None = None,
        depths: Sequence[int] | None = None,
    ) -> None:
        super().__init__(cache, cache.window, 0, queries, mask, depths)
        host = cache.host
        self.queries, self._share = queries, 0.0
        self._cuts = Cuts(self._resident_pieces)
        self.capturable = self._cuts if distributed.world_size() == 1 else False
        self._kept: dict[tuple[object, ...], Tensor] = {}
        most = max(1, min(TOGETHER, max(host.resident_slots, default=0) // host.piece))
        self._pieces = self.store.attention.pieces(
            host.heads, queries, host.piece, most, host.device, cache.window.dtype
        )
        # Lengths of a piece, four numbers apart: kernels are specialised on the alignment of pointers.
        steps = torch.arange(host.piece // host.unit + 1, dtype=torch.int32, device="cpu") * host.unit
        self._piece_lengths = steps[:, None].expand(-1, 4).contiguous().to(host.device)

    def begin(self, start: Tensor, mask_words: Tensor | None = None) -> None:
        super().begin(start, mask_words)
        self._cuts.outside(self._prefetch)

    def _prefetch(self) -> None:
        self._share = self.cache.share(self.queries)
        self.cache.host.prefetch(self._share)

    def _resident_pieces(self) -> tuple[int, ...]:
        """Returns how many leading pieces are on the device in the next pass, per layer and sequence."""
        host, share = self.cache.host, self.cache.share(self.queries)
        places = product(range(host.layers), range(host.batch))
        return tuple(len(host.resident(layer, b, share)) for layer, b in places)

    def _attend_without_window(
        self, layer: int, host_layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams
    ) -> Tensor:
        batch = q.shape[0]
        packed = self._keep("q", q.transpose(1, 2))
        if self.cache.attention is not None:
            self._cuts.outside(partial(self._submit, host_layer, packed, params.scale))
        # The window alone is written by the forward.
        own = self._layers.get(layer) or self._bound(layer)
        params = self._append(own.slots, k, v, params)
        out, lse = own.attention.states(packed.flatten(0, 1), own.kv, params)
        window = self._keep("out", out), self._keep("lse", lse)
        resident = [
            [
                (self._keep(("out", b, i), out), self._keep(("lse", b, i), lse))
                for i, (out, lse) in enumerate(self._attend_to_resident(host_layer, b, packed[b], params))
            ]
            for b in range(batch)
        ]
        merged = self._buffer("merged", (batch, self.queries, *out.shape[1:]), out.dtype)
        self._cuts.outside(partial(self._merge, host_layer, packed, resident, window, merged, params))
        # Compiled layers may write their own results into what an operator returned.
        return merged.clone()

    def _keep(self, name: object, tensor: Tensor) -> Tensor:
        """Returns a copy at an address that stays, and that all layers use one after the other."""
        return self._buffer(name, tensor.shape, tensor.dtype).copy_(tensor)

    def _buffer(self, name: object, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        key = name, tuple(shape)
        if key not in self._kept:
            self._kept[key] = torch.empty(tuple(shape), dtype=dtype, device=self.cache.host.device)
        return self._kept[key]

    def _submit(self, host_layer: int, q: Tensor, scale: float) -> None:
        """Lets the CPU begin to attend to its share of a layer's slots for queries ``[B, T, H_q, D]``."""
        if self._share:
            host, attention = self.cache.host, self.cache.attention
            assert attention is not None
            attention.submit(q, [host.cpu_part(host_layer, b, self._share) for b in range(host.batch)], scale)

    def _merge(
        self,
        host_layer: int,
        q: Tensor,
        resident: Sequence[Sequence[State]],
        window: State,
        merged: Tensor,
        params: AttentionParams,
    ) -> None:
        """Attends to the pieces that are left, and writes the attention to all slots to ``merged``.

        Args:
            q: ``[B, T, H_q, D]``.
            resident: states of each sequence's leading resident pieces.
            window: states of all sequences' windows, ``[B * T, H_q, D_v]`` and ``[B * T, H_q]``.
            merged: ``[B, T, H_q, D_v]``.
        """
        streamed = [self._attend_to_rest(host_layer, b, q[b], params) for b in range(len(q))]
        cpu = None
        # The CPU's part at the end. By now all of the device's own work in this layer is queued, and so are
        # copies of as many pieces of the next layers as the ring holds.
        if self._share and self.cache.attention is not None:
            cpu = self.cache.attention.states()
        for b in range(len(q)):
            own = slice(b * self.queries, (b + 1) * self.queries)
            parts = [*resident[b], *streamed[b]]
            if cpu is not None:
                parts.append((cpu[0][b : b + 1], cpu[1][b : b + 1]))
            parts.append((window[0][None, own], window[1][None, own]))
            outs, lses = zip(*parts, strict=True)
            merged[b] = merge_states(torch.cat(outs), torch.cat(lses))[0]

    def _attend_to_resident(self, host_layer: int, b: int, q: Tensor, params: AttentionParams) -> list[State]:
        """Returns the attention of ``q`` ``[T, H_q, D]`` to the leading resident pieces of the host store.

        Returns:
            states of one or several pieces, ``[n, T, H_q, D_v]`` and ``[n, T, H_q]``, in the pieces' order.
        """
        resident = self.cache.host.resident(host_layer, b, self.cache.share(self.queries))
        runs = resident.split(len(self._pieces))
        return [self._states(q, run, self._pieces[len(run) - 1], params) for run in runs if len(run)]

    def _attend_to_rest(self, host_layer: int, b: int, q: Tensor, params: AttentionParams) -> list[State]:
        """Attends to the pieces that :meth:`_attend_to_resident` leaves out: those streamed or not whole."""
        host = self.cache.host
        states = []
        for piece in host.pieces(host_layer, b, self._share, len(host.resident(host_layer, b, self._share))):
            kv = piece.kv if piece.resident else host.ring.acquire()
            step = (piece.stop - piece.start) // host.unit
            one = self._pieces[0]
            one = one.over(replace(one.plan, lengths=self._piece_lengths[step, :1]))
            states.append(self._states(q, kv[None], one, params))
            if not piece.resident:
                host.ring.release()
        return states

    def _states(self, q: Tensor, kv: Tensor, attention: Attention, params: AttentionParams) -> State:
        """Returns the attention to pieces ``[n, slots, row]``."""
        queries = q if len(kv) == 1 else q.repeat(len(kv), 1, 1)
        k, v = (part.transpose(1, 2) for part in self.cache.host.heads.split(kv))
        out, lse = attention.states(queries, KV(k, v), replace(params, sinks=None))
        return out.unflatten(0, (len(kv), -1)), lse.unflatten(0, (len(kv), -1))


class GatheredRetrievalView(OffloadedView):
    """Is the ``RetrievalView`` of an offloaded cache: new tokens see gathered chunks and the window.

        level 1's memory:   [ gathered chunks, one a slot | window: base ... root | chain and tree ]

    A refresh selects fewer chunks than there are slots. Those that are missing are copied from the host, into
    slots of chunks that were not selected, in clock order; chunks that stay are attended to as well. Layers
    with a window see all of it, in their rings.

    Args:
        cache: with slots for chunks; its chunk is ``config.chunk``.
        queries: T.
        config: the budget (tokens).
        depths: as for ``TreeAttentionView``.
    """

    def __init__(
        self,
        cache: OffloadedCache,
        queries: int,
        config: RetrievalConfig,
        depths: Sequence[int] | None,
    ) -> None:
        super().__init__(cache, cache.store, cache.slots, queries, depths=depths)
        self.chunk, self.config = config.chunk, config
        policy = BoundPolicy(config)
        if policy.needs_context:
            raise ValueError(
                "this select_chunks needs all keys, which an offloaded cache has in host memory; give one "
                "that works on mean keys, or offload=False"
            )
        self.capturable = policy.capturable
        self.slots = cache.slots // config.chunk
        self.refreshing = False
        assert cache.means is not None
        self.means = cache.means
        layers, batch, heads, chunks = self.means.shape[:4]
        selected = max(1, int(self.slots * _SELECTED_SHARE))

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=self.means.device)

        self._selected = zeros(batch, heads, selected)
        self._copies, self._copied = zeros(batch, heads, 2, selected), zeros(layers, batch, heads)
        self._clock_hand = zeros(layers, batch, heads)
        self._slot_chunks = torch.arange(self.slots, dtype=torch.int32, device=self.means.device).repeat(
            layers, batch, heads, 1
        )
        self._chunk_slots = exchange.place_of(self._slot_chunks, chunks)
        self._boundary = torch.zeros_like(cache.base)

    def refresh(self, root: Tensor, committed: Tensor) -> None:
        """Lets the next forward select chunks by its root's queries, of those that have left the window."""
        self._boundary.copy_(self.cache.base // self.chunk)

    def _attend_without_window(
        self, layer: int, host_layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams
    ) -> Tensor:
        if self.refreshing:
            self._select(host_layer, q[:, :, 0], *self.store.layers[layer].kv, params.scale)
        return TreeAttentionView.__call__(self, layer, q, k, v, params)

    def _select(self, layer: int, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> None:
        host, copied = self.cache.host, self._copied[layer]
        count = self._selected.shape[2]
        select = self.config.select_chunks or step.select_chunks
        select(q, self.means[layer], self._boundary, self._selected, count, scale)
        exchange.exchange_chunks(
            self._slot_chunks[layer], self._chunk_slots[layer], self._selected,
            self._clock_hand[layer], self._copies, copied,
        )  # fmt: skip
        for b in range(host.batch):
            on_device, begun = host.on_device[layer][b], link.begin()
            exchange.fetch_chunks(
                keys[b], values[b], on_device, host.on_host[layer][b], self._copies[b], copied[b], self.chunk
            )
            if begun is not None:
                there = torch.arange(count, device=q.device) < copied[b][:, None]
                crossing = there & (self._copies[b, :, 1] * self.chunk >= len(on_device))
                size = self.chunk * host.slot_bytes // host.heads.kv
                link.end(begun, size, crossing.sum(dtype=torch.int32))

    def resized(self, queries: int, depths: Sequence[int]) -> Self:
        """See :class:`RetrievalView`."""
        other = copy.copy(self)
        OffloadedView.__init__(other, self.cache, self.cache.store, self.cache.slots, queries, depths=depths)
        other.capturable = self.capturable
        return other

    def update_chunk_means(self, first: Tensor, count: int) -> None:
        """See :class:`RetrievalView`; means are computed when chunks leave the window."""

    def fill(self) -> None:
        """Gathers the newest chunks before the window, after a prefill or a rewind."""
        host, count = self.cache.host, self.slots * self.chunk
        for b in range(host.batch):
            start = host.base[b] - count
            assert start >= 0, f"{host.base[b]} tokens before the window do not fill {count} slots"
            for layer in range(host.layers):
                parts = host.heads.split(host.read(layer, b, start, start + count))
                for slots, part in zip(self.store.kv, parts, strict=True):
                    slots[layer, b, :, :count] = part.transpose(0, 1)
            first = start // self.chunk
            newest = torch.arange(
                first, first + self.slots, dtype=torch.int32, device=self._slot_chunks.device
            )
            self._slot_chunks[:, b] = newest
        self._chunk_slots.copy_(exchange.place_of(self._slot_chunks, self._chunk_slots.shape[-1]))
        self._clock_hand.zero_()

"""What the attention layers of a forward do where the full cache is offloaded.

Layers without a window attend to what is in the host store and to the newest rows on the device; layers with
one find all that they may see in rings on the device.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from triforce_tree.kernels.attention import planned
from triforce_tree.kernels.attention.plan import Plan, plan_pieces
from triforce_tree.kernels.attention.reference import merge_states
from triforce_tree.kv.offload.offloaded_cache import OffloadedCache
from triforce_tree.kv.store import KVStore
from triforce_tree.kv.tree_attention_view import TreeAttentionView
from triforce_tree.models.attention import AttentionParams

TOGETHER = 8
"""Pieces on the device that one call attends to, at most."""


class OffloadedView(TreeAttentionView):
    """New rows of an offloaded cache: in its rings for layers with a window, else where a subclass says.

    Args:
        cache: of the texts.
        store: of the layers without a window; the first row of the cache's window is row ``first`` of it.
        queries, mask, depths: as for ``TreeAttentionView``.
    """

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
        # Plans of pieces hold the number of queries.
        self.resizable = False
        self.cache, self._first = cache, first
        self._in_rings: TreeAttentionView | None = None
        if cache.rings.groups:
            self._in_rings = TreeAttentionView(cache.rings, queries, mask=mask, depths=depths)

    def begin(self, before: Tensor, words: Tensor | None = None) -> None:
        super().begin(before - self.cache.base + self._first, words)
        if self._in_rings is not None:
            self._in_rings.begin(before, words)

    def move(self, index: Tensor) -> None:
        super().move(index)
        if self._in_rings is not None:
            self._in_rings.move(index)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: AttentionParams) -> Tensor:
        place = self.cache.places[layer]
        if place is not None:
            return self._without_window(layer, place, q, k, v, how)
        assert self._in_rings is not None
        return self._in_rings(layer, q, k, v, how)

    def _without_window(
        self, layer: int, place: int, q: Tensor, k: Tensor, v: Tensor, how: AttentionParams
    ) -> Tensor:
        """A layer without a window, which is layer ``place`` of the host store."""
        raise NotImplementedError


class StreamedView(OffloadedView):
    """T new rows a text, of which each sees all settled rows and its ancestors: a pass of level 2."""

    # It follows the lengths of the host's rows, and waits for the bus anyway.
    capturable = False

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
        most = max(1, min(TOGETHER, max(host.resident_rows, default=0) // host.piece))
        self._pieces_plans = plan_pieces(
            host.heads, queries, host.piece, most, device=host.device, dtype=cache.window.dtype
        )
        # Lengths of a piece, four numbers apart: kernels are specialised on the alignment of pointers.
        steps = torch.arange(host.piece // host.unit + 1, dtype=torch.int32) * host.unit
        self._piece_lengths = steps[:, None].expand(-1, 4).contiguous().to(host.device)

    def begin(self, before: Tensor, words: Tensor | None = None) -> None:
        super().begin(before, words)
        self._share = self.cache.share(self.queries)
        self.cache.host.prefetch(self._share)

    def _without_window(
        self, layer: int, place: int, q: Tensor, k: Tensor, v: Tensor, how: AttentionParams
    ) -> Tensor:
        batch, heads, queries, dim = q.shape
        packed = q.transpose(1, 2).reshape(batch, queries, heads, dim)
        attention = self.cache.attention if self._share else None
        if attention is not None:
            rows = [self.cache.host.attended(place, b, self._share) for b in range(batch)]
            attention.ask(packed, rows, how.scale)
        parts = [self._pieces(place, b, packed[b], how) for b in range(batch)]
        # The window last: its rows are the only ones that this forward writes.
        self._write(layer, k, v, how)
        keys, values = self.store.layer(layer)
        [plan] = self._plans
        out, lse = planned.states(
            packed.flatten(0, 1), keys, values, plan, scale=how.scale, softcap=how.softcap, sinks=how.sinks
        )
        # Last of all the CPU's part. By now the device has been asked for all of its own work in this layer,
        # and the bus for as many pieces of the next ones as the ring holds.
        if attention is not None:
            far_out, far_lse = attention.states()
            for b, pieces in enumerate(parts):
                pieces.append((far_out[b : b + 1], far_lse[b : b + 1]))
        merged = []
        for b, pieces in enumerate(parts):
            own = slice(b * queries, (b + 1) * queries)
            outs, lses = zip(*pieces, (out[None, own], lse[None, own]), strict=True)
            merged.append(merge_states(torch.cat(outs), torch.cat(lses))[0])
        return torch.stack(merged)

    def _pieces(self, place: int, b: int, q: Tensor, how: AttentionParams) -> list[tuple[Tensor, Tensor]]:
        """Attention of ``q`` ``[T, H_q, D]`` to each piece of the host store that is, or comes, here.

        Returns:
            states of one or several pieces, ``[n, T, H_q, D]`` and ``[n, T, H_q]``, in the pieces' order.
        """
        host, found = self.cache.host, []
        whole = host.resident(place, b, self._share)

        def attend(rows: Tensor, plan: Plan) -> None:
            queries = q if len(rows) == 1 else q.repeat(len(rows), 1, 1)
            k, v = (part.transpose(1, 2) for part in rows.unbind(2))
            state = planned.states(queries, k, v, plan, scale=how.scale, softcap=how.softcap)
            found.append((state[0].unflatten(0, (len(rows), -1)), state[1].unflatten(0, (len(rows), -1))))

        most = len(self._pieces_plans)
        for start in range(0, len(whole), most):
            run = whole[start : start + most]
            attend(run, self._pieces_plans[len(run) - 1])
        for piece in host.pieces(place, b, self._share, len(whole)):
            rows = piece.rows if piece.resident else host.ring.take()
            step = (piece.stop - piece.start) // host.unit
            attend(rows[None], replace(self._pieces_plans[0], lengths=self._piece_lengths[step, :1]))
            if not piece.resident:
                host.ring.give()
        return found

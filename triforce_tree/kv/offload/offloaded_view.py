"""Views of an offloaded cache: the target's, and what it shares with the retrieval view.

Layers without a window attend to the host store and to the newest tokens on the device; layers with a window
have all slots that they see in rings on the device.
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
"""Most resident pieces of one attention call."""


class OffloadedView(TreeAttentionView):
    """New tokens of an offloaded cache: layers with a window use its rings, the others what a subclass says.

    Args:
        cache: of the sequences.
        store: of the layers without a window; the first slot of the cache's device window is slot ``first``
            of it.
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
        """A layer without a window, which is layer ``host_layer`` of the host store."""
        raise NotImplementedError


class StreamedView(OffloadedView):
    """The target's view: each of T new tokens a sequence sees all committed tokens and its ancestors."""

    # Its pieces depend on the lengths in the host store, and it waits for copies anyway.
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
        most = max(1, min(TOGETHER, max(host.resident_slots, default=0) // host.piece))
        self._pieces_plans = plan_pieces(
            host.heads, queries, host.piece, most, device=host.device, dtype=cache.window.dtype
        )
        # Lengths of a piece, four numbers apart: kernels are specialised on the alignment of pointers.
        steps = torch.arange(host.piece // host.unit + 1, dtype=torch.int32) * host.unit
        self._piece_lengths = steps[:, None].expand(-1, 4).contiguous().to(host.device)

    def begin(self, start: Tensor, mask_words: Tensor | None = None) -> None:
        super().begin(start, mask_words)
        self._share = self.cache.share(self.queries)
        self.cache.host.prefetch(self._share)

    def _attend_without_window(
        self, layer: int, host_layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams
    ) -> Tensor:
        batch, heads, queries, dim = q.shape
        packed = q.transpose(1, 2).reshape(batch, queries, heads, dim)
        attention = self.cache.attention if self._share else None
        if attention is not None:
            kv = [self.cache.host.cpu_part(host_layer, b, self._share) for b in range(batch)]
            attention.submit(packed, kv, params.scale)
        states = [self._attend_to_pieces(host_layer, b, packed[b], params) for b in range(batch)]
        # The window last: it alone is written by this forward.
        self._write(layer, k, v, params)
        keys, values = self.store.layer(layer)
        [plan] = self._plans
        out, lse = planned.states(
            packed.flatten(0, 1), keys, values, plan,
            scale=params.scale, softcap=params.softcap, sinks=params.sinks,
        )  # fmt: skip
        # The CPU's part at the end. By now all of the device's own work in this layer is queued, and so are
        # copies of as many pieces of the next layers as the ring holds.
        if attention is not None:
            cpu_out, cpu_lse = attention.states()
            for b, parts in enumerate(states):
                parts.append((cpu_out[b : b + 1], cpu_lse[b : b + 1]))
        merged = []
        for b, parts in enumerate(states):
            own = slice(b * queries, (b + 1) * queries)
            outs, lses = zip(*parts, (out[None, own], lse[None, own]), strict=True)
            merged.append(merge_states(torch.cat(outs), torch.cat(lses))[0])
        return torch.stack(merged)

    def _attend_to_pieces(
        self, host_layer: int, b: int, q: Tensor, params: AttentionParams
    ) -> list[tuple[Tensor, Tensor]]:
        """Attention of ``q`` ``[T, H_q, D]`` to each piece of the host store that is resident or streamed.

        Returns:
            states of one or several pieces, ``[n, T, H_q, D_v]`` and ``[n, T, H_q]``, in the pieces' order.
        """
        host = self.cache.host
        states: list[tuple[Tensor, Tensor]] = []
        resident = host.resident(host_layer, b, self._share)

        def attend(kv: Tensor, plan: Plan) -> None:
            queries = q if len(kv) == 1 else q.repeat(len(kv), 1, 1)
            k, v = (part.transpose(1, 2) for part in host.heads.split(kv))
            out, lse = planned.states(queries, k, v, plan, scale=params.scale, softcap=params.softcap)
            states.append((out.unflatten(0, (len(kv), -1)), lse.unflatten(0, (len(kv), -1))))

        most = len(self._pieces_plans)
        for start in range(0, len(resident), most):
            run = resident[start : start + most]
            attend(run, self._pieces_plans[len(run) - 1])
        for piece in host.pieces(host_layer, b, self._share, len(resident)):
            kv = piece.kv if piece.resident else host.ring.acquire()
            step = (piece.stop - piece.start) // host.unit
            attend(kv[None], replace(self._pieces_plans[0], lengths=self._piece_lengths[step, :1]))
            if not piece.resident:
                host.ring.release()
        return states

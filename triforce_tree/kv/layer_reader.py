"""Attention to the slots of one layer, by queries that store nothing: those of a drafter."""

from dataclasses import replace

import torch
from torch import Tensor

from triforce_tree.kernels.attention.plan import AttentionParams, FirstVisible, Heads, plan_trees
from triforce_tree.kv.store import KVStore


class LayerReader:
    """Lets T queries of each sequence attend to all committed slots of a layer, or to its window.

    Args:
        store: the KV slots.
        layer: the layer.
        heads: query heads.
        queries: T.
    """

    def __init__(self, store: KVStore, layer: int, heads: int, queries: int) -> None:
        slots, batch = store.layers[layer], store.batch
        self._window, self._queries = slots.window, queries
        shape = slots.group.shape.heads
        own = Heads(heads, shape.kv, shape.dim, shape.value_dim)
        # The newest slot is a tail that all queries see.
        masks = [torch.ones(queries, 1, dtype=torch.bool, device="cpu")] * batch
        plan = plan_trees(own, masks, [0] * batch, device=store.device)
        self._lengths, self._mask = plan.lengths, plan.mask
        self._attention = store.attention.trees(plan, store.dtype, slots.kv[0].dtype)
        self._kv = slots.stored()
        self._first: FirstVisible | None = None
        if self._window is not None:
            # Each on memory of its own: kernels are specialised on the alignment of their pointers.
            counts = (batch * queries, batch, batch)
            parts = (torch.zeros(n, dtype=torch.int32, device=store.device) for n in counts)
            self._first = FirstVisible(*parts)

    def begin(self, ends: Tensor) -> None:
        """Prepares a forward of queries that see the slots of positions before ``ends``, int64 ``[B]``."""
        self._lengths.copy_((ends - 1).clamp_min(0))
        self._mask.copy_((ends > 0).repeat_interleave(self._queries)[:, None])
        if self._first is not None and self._window is not None:
            first = (ends - self._window).clamp_min(0)
            first = torch.minimum(first, self._lengths)
            for part, repeats in zip(self._first, (self._queries, 1, 1), strict=True):
                part.copy_(first.repeat_interleave(repeats))
        self._attention.begin()

    def __call__(self, q: Tensor, params: AttentionParams) -> Tensor:
        """Returns ``[B, T, H_q, D_v]`` for queries ``[B, H_q, T, D]``; reads no window of ``params``."""
        batch, heads, queries, dim = q.shape
        packed = q.transpose(1, 2).reshape(batch * queries, heads, dim)
        out = self._attention.run(packed, self._kv, replace(params, window=None), self._first)
        return out.view(batch, queries, heads, -1)

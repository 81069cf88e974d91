"""Prompts into slots of a common prefix: what is before its end is written once for all sequences."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from triforce_tree.kernels.step.kv_slots import dequantized
from triforce_tree.kv.prefill import SequenceRows, in_int8, windowed_attention
from triforce_tree.kv.shared.store import SharedStore
from triforce_tree.models.attention import AttentionParams


class SharedSequenceRows(SequenceRows):
    """One sequence of a :class:`SharedStore` as a cache that prefill writes into.

    Queries after the prefix attend to one tensor, as those of a prompt alone do, so that they get the same
    bits: keys and values of the prefix are copied for it, those of one layer at a time.
    """

    store: SharedStore

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        store, index, count = self.store, layer.layer_idx, k.shape[2]
        own, (number, place) = store.check(index, params.window), store.place(index)
        scales = own.scales is not None
        fresh = in_int8(k, v) if scales else (k, v)
        start, stop, end = self.length, self.length + count, store.length
        before = max(0, min(count, end - start))  # new tokens of the prefix
        seen = []
        for whole, slots, new in zip(store.whole[number].parts, own.parts, fresh, strict=True):
            common, after = whole[place][:, :, : store.capacity], slots[place, self.sequence, None]
            common[:, :, start : start + before] = new[:, :, :before]
            after[:, :, max(0, start - end) : max(0, stop - end)] = new[:, :, before:]
            both = common[:, :, : min(stop, end)], after[:, :, : max(0, stop - end)]
            seen.append(torch.cat(both, 2) if stop > end else both[0])
        if scales:
            seen = [dequantized(*pair, q.dtype) for pair in zip(seen[:2], seen[2:], strict=True)]
        keys, values = seen
        return windowed_attention(
            q, keys, values, replace(params, window=None, chunked=False), stop - q.shape[2]
        )

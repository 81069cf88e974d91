"""Prompts into slots of common prefixes: what several sequences begin with is written once."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from triforce_tree.kernels.attention.plan import AttentionParams
from triforce_tree.kernels.step.kv_slots import dequantized
from triforce_tree.kv.prefill import SequenceRows, in_int8, windowed_attention
from triforce_tree.kv.shared.store import SharedStore


class SharedSequenceRows(SequenceRows):
    """One sequence of a :class:`SharedStore` as a cache that prefill writes into.

    Queries after a prefix attend to one tensor, as those of a prompt alone do, so that they get the same
    bits: keys and values of the prefixes are copied for it, those of one layer at a time.
    """

    store: SharedStore

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        store, index, count = self.store, layer.layer_idx, k.shape[2]
        own, (number, place) = store.check(index, params.window), store.place(index)
        scales = own.scales is not None
        fresh = in_int8(k, v) if scales else (k, v)
        start, stop = self.length, self.length + count
        written, read = (store.runs(self.sequence, since, stop) for since in (start, 0))
        seen = []
        for whole, new in zip(store.whole[number].parts, fresh, strict=True):
            slots = whole[place]
            for run in written:
                stored = slots[:, :, run.place : run.place + run.stop - run.start]
                stored.copy_(new[:, :, run.start - start : run.stop - start])
            parts = [slots[:, :, run.place : run.place + run.stop - run.start] for run in read]
            seen.append(torch.cat(parts, 2) if len(parts) > 1 else parts[0])
        if scales:
            seen = [dequantized(*pair, q.dtype) for pair in zip(seen[:2], seen[2:], strict=True)]
        keys, values = seen
        return windowed_attention(
            q, keys, values, replace(params, window=None, chunked=False), stop - q.shape[2]
        )

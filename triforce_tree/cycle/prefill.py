"""Prompts into the full cache, one sequence at a time, in chunks."""

from typing import Any

import torch
from torch import Tensor

from triforce_tree.caches.base import Rows, Variant
from triforce_tree.cycle.rows import KVStore
from triforce_tree.hf_model import HFModel
from triforce_tree.kernels.attention.prefill import causal_attention
from triforce_tree.stats import Progress


class SequenceRows:
    """One sequence of a :class:`KVStore` as a cache that prefill writes straight into."""

    def __init__(self, store: KVStore, sequence: int) -> None:
        self.store, self.sequence = store, sequence
        self.length = 0

    def positions(self, rows: Rows) -> Tensor:
        return rows.depths + self.length

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, rows: Rows, how: Variant) -> Tensor:
        stop = self.length + q.shape[2]
        mine = slice(self.sequence, self.sequence + 1)
        keys, values = (t[mine, :, :stop] for t in self.store.layer(layer.layer_idx))
        keys[:, :, self.length :] = k
        values[:, :, self.length :] = v
        return causal_attention(q, keys, values, scale=how.scale, softcap=how.softcap, sinks=how.sinks)

    def advance(self, count: int) -> None:
        self.length += count

    def keep(self, rows: list[int]) -> None:
        raise RuntimeError("prefill proposes nothing")

    def commit(self, count: int) -> None: ...

    def prefill_step(self, coming: int) -> tuple[int, int]:
        return 0, coming


def chunk_tokens(chunk: int | None, device: torch.device) -> int:
    """``chunk``, or as many tokens at once as suit the device."""
    return chunk or (4096 if device.type == "cuda" else 1024)


def prefill(
    model: HFModel, store: KVStore, sequence: int, tokens: list[int], chunk: int, progress: Progress | None
) -> None:
    """Compute the rows of ``tokens`` for one sequence; ``progress`` hears the tokens of each chunk."""
    rows = SequenceRows(store, sequence)
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        depths = torch.arange(len(part), device=model.device)
        model.forward(part, Rows(depths, None, depths, len(part)), rows, last_only=True)
        if progress:
            progress(len(part))

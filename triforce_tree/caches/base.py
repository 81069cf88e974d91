"""What every key-value cache is: committed rows, then a tail that only ``commit`` makes permanent.

A forward writes its rows behind those that are there (``attend``, layer by layer, then ``advance``).
``keep`` selects tail rows, which is acceptance and rollback in one; ``commit`` turns leading tail rows
into committed ones, and there alone happen eviction and upkeep. Which committed rows a forward is shown
may be chosen anew at its start, by the context's rows.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from triforce_tree.attention import AttentionParams
from triforce_tree.kernels import dispatch
from triforce_tree.kernels.prefill import causal_attention

Variant = AttentionParams


@dataclass(frozen=True)
class Rows:
    """The rows of one forward.

    Attributes:
        depths: int64 ``[T]``, distance of each row from the last committed one, from 0; a row's position
            in the text is ``cache.length + depth``.
        mask: bool ``[T, N]`` over all tail rows, the new ones last; None for a causal chunk that is the
            whole tail (prefill).
        tail_depths: int64 ``[N]``, the same distance for every tail row.
        context: how many of the T rows, the leading ones, are tokens of the context; the others are
            proposals. What a cache chooses to show may depend on the context's rows alone: a law that
            looked at the proposals it judges would not be the law that they are accepted by.
    """

    depths: Tensor
    mask: Tensor | None
    tail_depths: Tensor
    context: int = 0


class KVCache(Protocol):
    """The contract of ``triforce_tree.level.Level``, which feeds caches and counts their tail."""

    @property
    def length(self) -> int:
        """Committed tokens."""

    def positions(self, rows: Rows) -> Tensor:
        """int64 ``[T]``: the positions to give the model for these rows."""

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, rows: Rows, how: Variant) -> Tensor:
        """Store the new rows of one layer and attend to everything they may see.

        Args:
            layer: the attention module; ``layer.layer_idx`` numbers it.
            q, k, v: ``[B, H_q, T, D]`` and ``[B, H_kv, T, D]`` as the model hands them over.

        Returns:
            ``[B, H_q, T, D]``.
        """

    def advance(self, count: int) -> None:
        """The forward is over: its ``count`` rows are now in the tail."""

    def keep(self, rows: list[int]) -> None:
        """Reduce the tail to these of its rows, in this order; the others are forgotten."""

    def commit(self, count: int) -> None:
        """Make the first ``count`` tail rows permanent and forget the rest of the tail."""

    def prefill_step(self, coming: int) -> tuple[int, int]:
        """(skip, take): of ``coming`` final tokens, pass over the first ``skip``, then feed ``take``.

        A cache that keeps every row answers (0, coming); one that evicts passes over what nobody would
        see. The skipped tokens count as committed when this returns.
        """


def attend_rows(q: Tensor, k: Tensor, v: Tensor, rows: Rows, start: int, how: Variant) -> Tensor:
    """Attention of new rows over ``k``, ``v`` ``[B, H_kv, S, D]`` whose last rows are the tail.

    ``start`` is the position of the first key row; positions must run on from it to the committed end.
    """
    if rows.mask is None:
        return causal_attention(
            q, k, v, scale=how.scale, window=how.window, softcap=how.softcap, sinks=how.sinks
        )
    first, mask = None, rows.mask
    if how.window is not None:
        tail = mask.shape[1]
        committed = start + k.shape[2] - tail
        oldest = committed + rows.depths - how.window + 1
        first = (oldest - start).clamp_(0, k.shape[2] - tail)
        mask = mask & (rows.depths[:, None] - rows.tail_depths < how.window)
        skip = int(first.min())
        k, v, first = k[:, :, skip:], v[:, :, skip:], first - skip
    return dispatch.tree_attention_out(
        q, k, v, mask, scale=how.scale, first=first, softcap=how.softcap, sinks=how.sinks
    )


class RowBuffer:
    """Growable K and V rows of every layer, ``[B, H_kv, capacity, D]`` each, allocated at first use.

    Args:
        capacity: rows to allocate at first; more are added by halves when they run out.
        layers: number of layers.
    """

    def __init__(self, layers: int, capacity: int) -> None:
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * layers
        self.capacity = capacity

    def __getitem__(self, layer: int) -> tuple[Tensor, Tensor]:
        pair = self._layers[layer]
        if pair is None:
            raise RuntimeError(f"layer {layer} of the cache is empty: run a forward first")
        return pair

    @property
    def filled(self) -> list[int]:
        """Layers that hold rows."""
        return [i for i, pair in enumerate(self._layers) if pair is not None]

    def write(self, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        """Put rows ``[B, H_kv, T, D]`` at ``start``."""
        stop = start + k.shape[2]
        pair = self._layers[layer]
        if pair is None or pair[0].shape[2] < stop:
            pair = self._grow(layer, stop, k, v)
        pair[0][:, :, start:stop] = k
        pair[1][:, :, start:stop] = v

    def _grow(self, layer: int, rows: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        old = self._layers[layer]
        had = 0 if old is None else old[0].shape[2]
        capacity = max(self.capacity, rows if old is None else max(rows, had + had // 2))
        fresh = (
            k.new_empty(k.shape[0], k.shape[1], capacity, k.shape[3]),
            v.new_empty(v.shape[0], v.shape[1], capacity, v.shape[3]),
        )
        if old is not None:
            fresh[0][:, :, :had] = old[0]
            fresh[1][:, :, :had] = old[1]
        self._layers[layer] = fresh
        return fresh

    def view(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        k, v = self[layer]
        return k[:, :, start:stop], v[:, :, start:stop]

    def compact(self, layer: int, base: int, rows: list[int]) -> None:
        """Move rows ``base + rows[i]`` of a layer to ``base + i``."""
        still = next((i for i, row in enumerate(rows) if row != i), len(rows))
        moved = rows[still:]
        if not moved:
            return
        start, stop = base + still, base + len(rows)
        for tensor in self[layer]:
            source = torch.tensor(moved, device=tensor.device) + base
            tensor[:, :, start:stop] = tensor.index_select(2, source)

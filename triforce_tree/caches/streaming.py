"""StreamingLLM (arXiv 2309.17453): attention sinks and a window of recent tokens.

Positions are relative to the cache, so a draft model trained on short texts serves contexts of any
length. The model is run at position 0, where rotary embedding is the identity, so keys arrive unrotated;
they are kept so, beside a rotated copy that is renewed only when rows leave.
"""

from typing import Any

import torch
from torch import Tensor

from triforce_tree.caches.base import RowBuffer, Rows, Variant, attend_rows
from triforce_tree.config import StreamingConfig
from triforce_tree.rope import FamilyRope


class StreamingCache:
    """``sinks`` first rows and between ``window`` and ``2 * window`` recent ones.

    Rows leave in blocks of ``window``: while none leave, every row keeps its place and its rotation, and
    the rows stay one contiguous run.

    Args:
        layers: number of layers.
        config: sinks and window, in tokens.
        rope: the model family's own rotation.
    """

    def __init__(self, layers: int, config: StreamingConfig, rope: FamilyRope) -> None:
        self.config = config
        self.rope = rope
        capacity = config.sinks + 2 * config.window + 128
        self.raw = RowBuffer(layers, capacity)  # unrotated keys, values
        self.rotated = RowBuffer(layers, capacity)  # rotated keys; the value half stays unused
        self._modules: dict[int, Any] = {}
        self._length = 0
        self._held = 0
        self._tail = 0

    @property
    def length(self) -> int:
        return self._length

    @property
    def held(self) -> int:
        """Committed rows still in the cache."""
        return self._held

    def positions(self, rows: Rows) -> Tensor:
        return torch.zeros_like(rows.depths)

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, rows: Rows, how: Variant) -> Tensor:
        index = layer.layer_idx
        self._modules[index] = layer
        start = self._held + self._tail
        q_turned, k_turned = self.rope.rotate(layer, q, k, rows.depths + self._held)
        self.raw.write(index, start, k, v)
        self.rotated.write(index, start, k_turned, k_turned[..., :0])
        stop = start + q.shape[2]
        keys = self.rotated.view(index, 0, stop)[0]
        values = self.raw.view(index, 0, stop)[1]
        return attend_rows(q_turned, keys, values, rows, 0, how)

    def advance(self, count: int) -> None:
        self._tail += count

    def keep(self, rows: list[int]) -> None:
        for index in self.raw.filled:
            self.raw.compact(index, self._held, rows)
            self.rotated.compact(index, self._held, rows)
        self._tail = len(rows)

    def commit(self, count: int) -> None:
        self._length += count
        self._held += count
        self._tail = 0
        if self._held > self.config.sinks + 2 * self.config.window:
            self._evict()

    def _evict(self) -> None:
        sinks, window = self.config.sinks, self.config.window
        leaving = self._held - window - sinks
        self._held = sinks + window
        for index in self.raw.filled:
            self.raw.compact(index, sinks, list(range(leaving, leaving + window)))
            keys = self.raw.view(index, 0, self._held)[0]
            places = torch.arange(self._held, device=keys.device)
            turned = self.rope.rotate(self._modules[index], keys, keys, places)[1]
            self.rotated.write(index, 0, turned, turned[..., :0])

    def prefill_step(self, coming: int) -> tuple[int, int]:
        sinks, window = self.config.sinks, self.config.window
        if self._length < sinks:
            return 0, min(coming, sinks - self._length)
        if self._held + coming <= sinks + 2 * window:
            return 0, coming
        skip = max(0, coming - window)
        if skip:
            self._held = sinks
            self._length += skip
        return skip, coming - skip

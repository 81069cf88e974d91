"""The target's own cache: every row, keys rotated at absolute positions."""

from typing import Any

from torch import Tensor

from triforce_tree.caches.base import RowBuffer, Rows, Variant, attend_rows


class FullCache:
    """All rows of all layers on the model's device.

    Args:
        layers: number of layers.
        capacity: rows to allocate at once (prompt + new tokens + largest tree); it grows when exceeded.

    ``queries[layer]`` holds the queries ``[B, H_q, T, D]`` of the last forward, restricted by ``keep`` to
    the rows kept: what a retrieval cache selects by.
    """

    def __init__(self, layers: int, capacity: int = 0) -> None:
        self.rows = RowBuffer(layers, capacity)
        self.queries: dict[int, Tensor] = {}
        self.windows: dict[int, int | None] = {}
        self._length = 0
        self._tail = 0
        self._queries_start = 0

    @property
    def length(self) -> int:
        return self._length

    def positions(self, rows: Rows) -> Tensor:
        return rows.depths + self._length

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, rows: Rows, how: Variant) -> Tensor:
        index = layer.layer_idx
        start = self._length + self._tail
        self.rows.write(index, start, k, v)
        self.queries[index], self.windows[index] = q, how.window
        self._queries_start = self._tail
        k, v = self.rows.view(index, 0, start + q.shape[2])
        return attend_rows(q, k, v, rows, 0, how)

    def advance(self, count: int) -> None:
        self._tail += count

    def keep(self, rows: list[int]) -> None:
        for index in self.rows.filled:
            self.rows.compact(index, self._length, rows)
        asked = [r - self._queries_start for r in rows if r >= self._queries_start]
        self.queries = {i: q[:, :, asked] for i, q in self.queries.items()} if asked else {}
        self._queries_start = len(rows) - len(asked)
        self._tail = len(rows)

    def commit(self, count: int) -> None:
        self._length += count
        self._tail = 0

    def stand(self, length: int) -> None:
        """Count the first ``length`` rows, which must have been written, and no others; forget the tail."""
        self._length = length
        self._tail = self._queries_start = 0
        self.queries = {}

    def prefill_step(self, coming: int) -> tuple[int, int]:
        return 0, coming

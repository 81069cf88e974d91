"""The settled rows of a cache that is larger than the device: host memory, and what fits beside it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from triforce_tree.kernels.attention.plan import Heads
from triforce_tree.kv.offload.copy_stream import BufferRing, CopyEvent, CopyStream
from triforce_tree.kv.offload.layout import Layout
from triforce_tree.kv.offload.pinned import HostMemory


@dataclass(frozen=True)
class Offload:
    """How a cache is split between device and host.

    Args:
        resident_bytes: of key and value rows that stay on the device.
        piece_bytes: one copy to the device; rows of one layer and sequence.
        buffers: pieces under way at once.
        states_on_host: while a prompt is fed, its hidden states wait in host memory too.
        last_resident: all rows of the last layer stay on the device, before any of the others'; while a
            prompt is fed each layer's rows are computed in their memory, and hidden states wait in level 1's,
            where that holds them. It needs ``resident_bytes`` of at least a layer's rows.
        host_share: of each layer's rows in host memory, the last ones, that the CPU attends to where they are
            (``host_attention``), in passes of several rows.
        plain_host_share: the same in passes of one row, to which the CPU attends faster.
    """

    resident_bytes: int = 0
    piece_bytes: int = 64 << 20
    buffers: int = 3
    states_on_host: bool = False
    last_resident: bool = False
    host_share: float = 0.0
    plain_host_share: float = 0.0

    def __post_init__(self) -> None:
        if self.resident_bytes < 0 or self.piece_bytes < 1 or self.buffers < 2:
            raise ValueError(
                f"{self} cannot work: resident_bytes must be at least 0, piece_bytes 1 and buffers 2 (one "
                "that is read, one that is filled)"
            )
        for name in ("host_share", "plain_host_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must lie between 0 and 1")

    def share(self, queries: int) -> float:
        """Of the rows in host memory, what the CPU attends to in a pass of so many rows a text."""
        return self.host_share if queries > 1 else self.plain_host_share


@dataclass(frozen=True)
class Piece:
    """Rows ``[start, stop)`` of one sequence in one layer; ``rows`` ``[stop - start, 2, H_kv, D]``."""

    start: int
    stop: int
    rows: Tensor
    resident: bool


class HostStore:
    """K and V rows ``[S, 2, H_kv, D]`` of every layer of B sequences, written in order and never changed.

    A row's keys and values of all heads lie together, so that any run of rows is one copy. Rows are cut
    into pieces at fixed places; the leading pieces of every layer stay on the device as far as
    ``resident_bytes`` reach. Where a piece lives changes nothing in what is computed from it.

    Args:
        layers, batch: how many; there may be no layers.
        heads: of the attention.
        rows: S, most rows of a sequence.
        unit: pieces begin at multiples of it (the retrieval cache's chunk), and of 16.
        settings: the split.
        progress: called with the bytes of each block of host memory once it is there.

    Raises:
        HostMemoryError: host memory is short; nothing is kept.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        heads: Heads,
        rows: int,
        device: torch.device,
        dtype: torch.dtype,
        unit: int,
        settings: Offload,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.layers, self.batch, self.heads, self.device = layers, batch, heads, device
        self.row_bytes = 2 * heads.kv * heads.dim * dtype.itemsize
        layout = Layout.of(rows, unit, self.row_bytes, settings.piece_bytes)
        self.unit, self.rows, self.piece = layout.unit, layout.slots, layout.piece
        self.last_resident = self._last_fits(settings)
        self.resident_rows = self._resident(settings.resident_bytes)
        self.base = [0] * batch
        shape = (2, heads.kv, heads.dim)
        self.near = [
            [torch.empty((near, *shape), device=device, dtype=dtype) for _ in range(batch)]
            for near in self.resident_rows
        ]
        self.memory = HostMemory(locked=device.type == "cuda")
        self.far: list[list[Tensor]] = []
        try:
            self.memory.check(batch * sum(self.rows - near for near in self.resident_rows) * self.row_bytes)
            for near in self.resident_rows:
                self.far.append([])
                for _ in range(batch):
                    block = self.memory.take((self.rows - near, *shape), dtype)
                    self.far[-1].append(block)
                    if progress:
                        progress(block.nbytes)
        except BaseException:
            self.close()
            raise
        self.ring = BufferRing(settings.buffers, (self.piece, *shape), device, dtype)
        self.out = CopyStream(device)
        self._share = 0.0
        self._scheduled: tuple[float, list[int]] | None = None
        self._schedule: list[Tensor] = []

    def _last_fits(self, settings: Offload) -> bool:
        enough = settings.resident_bytes >= self.rows * self.row_bytes * self.batch
        return settings.last_resident and self.layers > 0 and enough

    def _resident(self, size: int) -> list[int]:
        """Rows of each layer that stay on the device: whole pieces, the first layers one more."""
        last = [self.rows] if self.last_resident else []
        layers = self.layers - len(last)
        size -= sum(last) * self.row_bytes * self.batch
        pieces = -(-self.rows // self.piece)
        have = min(size // (self.piece * self.row_bytes * self.batch), pieces * layers)
        shares = [have // layers + (layer < have % layers) for layer in range(layers)]
        return [*(min(share * self.piece, self.rows) for share in shares), *last]

    @property
    def host_bytes(self) -> int:
        """Of host memory that is taken."""
        return self.memory.bytes

    @property
    def resident_bytes(self) -> int:
        return sum(t.nbytes for layer in self.near for t in layer)

    def resident(self, layer: int, b: int, share: float = 0.0) -> Tensor:
        """The leading ones of :meth:`pieces` that are whole and on the device, ``[n, piece, 2, H_kv, D]``."""
        count = min(self.resident_rows[layer], self._end(layer, b, share)) // self.piece
        near: Tensor = self.near[layer][b][: count * self.piece]
        return near.view(count, self.piece, *near.shape[1:])

    def pieces(self, layer: int, b: int, share: float = 0.0, first: int = 0) -> Iterator[Piece]:
        """The rows before ``base[b]`` but those of :meth:`attended`, cut at multiples of ``piece``.

        Args:
            first: the number of the piece to begin with.
        """
        near, end = self.resident_rows[layer], self._end(layer, b, share)
        for start in range(first * self.piece, end, self.piece):
            stop = min(start + self.piece, end)
            if start < near:
                yield Piece(start, stop, self.near[layer][b][start:stop], True)
            else:
                yield Piece(start, stop, self.far[layer][b][start - near : stop - near], False)

    def attended(self, layer: int, b: int, share: float) -> Tensor:
        """The last rows before ``base[b]``, in host memory: ``share`` of those there, to whole units."""
        near = self.resident_rows[layer]
        start, stop = (max(0, row - near) for row in (self._end(layer, b, share), self.base[b]))
        return self.far[layer][b][start:stop]

    def _end(self, layer: int, b: int, share: float) -> int:
        """Where the pieces end."""
        far = max(0, self.base[b] - self.resident_rows[layer])
        return self.base[b] - round(share * far / self.unit) * self.unit

    def streamed_bytes(self, share: float = 0.0) -> int:
        """What one pass copies to the device where the CPU attends to ``share`` of the rows."""
        ends = (
            self._end(layer, b, share) - self.resident_rows[layer]
            for layer in range(self.layers)
            for b in range(self.batch)
        )
        return sum(max(0, rows) * self.row_bytes for rows in ends)

    def prefetch(self, share: float | None = None) -> None:
        """Let the first pieces of the next pass come, behind whatever was written before.

        Args:
            share: of the rows in host memory that this pass leaves there; None for that of the last pass,
                which mostly begins with the same pieces.
        """
        self.out.join(self.ring.copy_stream)
        self._share = self._share if share is None else share
        if self._scheduled != (self._share, self.base):
            self._scheduled = (self._share, list(self.base))
            self._schedule = [
                piece.rows
                for layer in range(self.layers)
                for b in range(self.batch)
                for piece in self.pieces(layer, b, self._share)
                if not piece.resident
            ]
        self.ring.start(self._schedule)

    def write(self, layer: int, b: int, start: int, rows: Tensor) -> CopyEvent:
        """Store device rows ``[n, 2, H_kv, D]`` from row ``start`` on.

        Returns:
            set when ``rows`` may be overwritten.
        """
        near = max(0, min(self.resident_rows[layer] - start, rows.shape[0]))
        if near:
            place = self.near[layer][b][start : start + near]
            # The last layer's rows may have been computed where they belong.
            if place.data_ptr() != rows.data_ptr():
                place.copy_(rows[:near])
        if near == rows.shape[0]:
            return CopyEvent(None)
        first = start + near - self.resident_rows[layer]
        return self.out.copy(self.far[layer][b][first : first + rows.shape[0] - near], rows[near:])

    def read(self, layer: int, b: int, start: int, stop: int) -> Tensor:
        """Rows ``[stop - start, 2, H_kv, D]``, on the device."""
        self.out.join()
        near = self.resident_rows[layer]
        parts = []
        if start < near:
            parts.append(self.near[layer][b][start : min(stop, near)])
        if stop > near:
            far = self.far[layer][b][max(start, near) - near : stop - near]
            parts.append(far.to(self.device, non_blocking=True))
        return torch.cat(parts)

    def close(self) -> None:
        """Give all memory back; the store is of no use afterwards."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if hasattr(self, "ring"):
            self.ring.close()
        self.near, self.far, self._schedule = [], [], []
        self.memory.release()

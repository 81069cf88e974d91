"""Splits the committed keys and values of a cache between device and host memory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triforce_tree.kernels.attention.plan import Heads
from triforce_tree.kv.offload.copy_stream import BufferRing, CopyEvent, CopyStream, copy_over_link
from triforce_tree.kv.offload.pinned import HostMemory
from triforce_tree.trees.device_shapes import unit_slots

EVICTED_TOGETHER = 128
"""Tokens that leave the device window at once, rounded up to whole units."""


def round_up(count: int, unit: int) -> int:
    """Returns the next multiple of ``unit``."""
    return -(-count // unit) * unit


def piece_slots(piece_bytes: int, slot_bytes: int, slots: int, unit: int) -> int:
    """Returns the KV slots of a piece of a layer: whole units, about ``piece_bytes``, at least one unit."""
    return max(1, min(piece_bytes // slot_bytes, slots) // unit) * unit


def eviction_block(unit: int) -> int:
    """Returns how many tokens leave the device window at once."""
    return round_up(EVICTED_TOGETHER, unit)


def window_slots(recent: int, unit: int, scratch_slots: int) -> int:
    """Returns the KV slots of the device window: recent tokens, those soon to be evicted, scratch slots."""
    return recent + eviction_block(unit) + scratch_slots


@dataclass(frozen=True)
class Offload:
    """Describes how a cache is split between device and host.

    Args:
        resident_bytes: the bytes of keys and values that stay on the device.
        piece_bytes: of one copy to the device, of a layer and sequence.
        buffers: pieces that are prefetched.
        states_on_host: during prefill hidden states are kept in host memory as well.
        last_resident: all KV slots of the last layer stay on the device, before any of the others'; during
            prefill each layer's keys and values are computed in their memory, and hidden states are kept in
            the retrieval cache's, where they fit. ``resident_bytes`` must then be at least those of a layer.
        host_share: of each layer's slots in host memory, the last ones, that the CPU attends to where they
            are (``host_attention``), in passes of several tokens.
        plain_host_share: the same in passes of one token, where the CPU's attention is faster.
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
        """Returns the share of host slots that the CPU attends to in a pass of ``queries`` tokens."""
        return self.host_share if queries > 1 else self.plain_host_share


@dataclass(frozen=True)
class Piece:
    """Is a run of slots ``[start, stop)`` of a sequence in one layer; ``kv`` is ``[stop - start, row]``."""

    start: int
    stop: int
    kv: Tensor
    resident: bool


class HostStore:
    """Stores the keys and values of every layer of B sequences.

    When a sequence is cut to a shorter prefix, the slots of that prefix stay where they are.

    A slot is a row of the keys of all heads and then their values (``Heads.split``), so that any run of slots
    is one copy, whatever the widths of keys and values. A layer is cut
    into pieces at fixed slots; its leading pieces stay on the device as far as ``resident_bytes`` allows.
    Results do not depend on where a piece is kept.

    Args:
        layers, batch: how many; there may be no layers.
        heads: of the attention.
        max_seq_len: most tokens of a sequence; S is this rounded up to whole units.
        chunk: of the retrieval cache; pieces begin at multiples of it and of 16.
        settings: the split.
        progress: called with the bytes of each block of host memory after it was allocated.

    Attributes:
        unit: slots that pieces are a multiple of.
        slots: S.
        slot_bytes: of one slot of a layer.
        piece: slots of a piece.
        resident_slots: of each layer, those on the device, which come first.
        on_device: ``[resident_slots, row]`` of each layer and sequence.
        on_host: the other slots, likewise.
        base: tokens of each sequence that are in the store.

    Raises:
        HostMemoryError: host memory is short; nothing stays allocated.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        heads: Heads,
        max_seq_len: int,
        device: torch.device,
        dtype: torch.dtype,
        chunk: int,
        settings: Offload,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.layers, self.batch, self.heads, self.device = layers, batch, heads, device
        self.unit = unit_slots(chunk)
        self.slots = round_up(max_seq_len, self.unit)
        self.slot_bytes = heads.row * dtype.itemsize
        self.piece = piece_slots(settings.piece_bytes, self.slot_bytes, self.slots, self.unit)
        self.last_resident = self._last_fits(settings)
        self.resident_slots = self._resident(settings.resident_bytes)
        self.base = [0] * batch
        self.on_device = [
            [torch.empty((resident, heads.row), device=device, dtype=dtype) for _ in range(batch)]
            for resident in self.resident_slots
        ]
        self._initialised = False
        self.memory = HostMemory(locked=device.type == "cuda")
        self.on_host: list[list[Tensor]] = []
        try:
            others = sum(self.slots - resident for resident in self.resident_slots)
            self.memory.check(batch * others * self.slot_bytes)
            for resident in self.resident_slots:
                self.on_host.append([])
                for _ in range(batch):
                    block = self.memory.take((self.slots - resident, heads.row), dtype)
                    self.on_host[-1].append(block)
                    if progress:
                        progress(block.nbytes)
        except BaseException:
            self.close()
            raise
        self.ring = BufferRing(settings.buffers, (self.piece, heads.row), device, dtype)
        self.to_host = CopyStream(device)
        self._share = 0.0
        self._scheduled: tuple[float, list[int]] | None = None
        self._schedule: list[Tensor] = []

    def initialise(self, held: Sequence[int]) -> None:
        """Zeroes the slots on the device after the first ``held[b]`` of each sequence, once.

        Made-up sequences have all slots. Fresh memory of the host is zero.
        """
        if not self._initialised:
            self._initialised = True
            for layer in self.on_device:
                for slots, count in zip(layer, held, strict=True):
                    slots[count:].zero_()

    def _last_fits(self, settings: Offload) -> bool:
        enough = settings.resident_bytes >= self.slots * self.slot_bytes * self.batch
        return settings.last_resident and self.layers > 0 and enough

    def _resident(self, size: int) -> list[int]:
        """Returns the slots of each layer that stay on the device: whole pieces, first layers one more."""
        last = [self.slots] if self.last_resident else []
        layers = self.layers - len(last)
        size -= sum(last) * self.slot_bytes * self.batch
        pieces = -(-self.slots // self.piece)
        resident = min(size // (self.piece * self.slot_bytes * self.batch), pieces * layers)
        counts = [resident // layers + (layer < resident % layers) for layer in range(layers)]
        return [*(min(count * self.piece, self.slots) for count in counts), *last]

    @property
    def resident_bytes(self) -> int:
        return sum(t.nbytes for layer in self.on_device for t in layer)

    def resident(self, layer: int, b: int, share: float = 0.0) -> Tensor:
        """Returns the leading whole pieces of :meth:`pieces` that are on the device, ``[n, piece, row]``."""
        count = min(self.resident_slots[layer], self._end(layer, b, share)) // self.piece
        leading: Tensor = self.on_device[layer][b][: count * self.piece]
        return leading.view(count, self.piece, self.heads.row)

    def pieces(self, layer: int, b: int, share: float = 0.0, first: int = 0) -> Iterator[Piece]:
        """Returns the slots before ``base[b]`` without :meth:`cpu_part`, cut at multiples of ``piece``.

        Args:
            first: index of the piece to begin with.
        """
        resident, end = self.resident_slots[layer], self._end(layer, b, share)
        for start in range(first * self.piece, end, self.piece):
            stop = min(start + self.piece, end)
            if start < resident:
                yield Piece(start, stop, self.on_device[layer][b][start:stop], True)
            else:
                yield Piece(start, stop, self.on_host[layer][b][start - resident : stop - resident], False)

    def cpu_part(self, layer: int, b: int, share: float) -> Tensor:
        """Returns the last slots before ``base[b]`` in host memory: a ``share`` of them, in whole units."""
        resident = self.resident_slots[layer]
        start, stop = (max(0, slot - resident) for slot in (self._end(layer, b, share), self.base[b]))
        return self.on_host[layer][b][start:stop]

    def _end(self, layer: int, b: int, share: float) -> int:
        """Returns the slot of a layer and sequence before which pieces are streamed to the device."""
        on_host = max(0, self.base[b] - self.resident_slots[layer])
        return self.base[b] - round(share * on_host / self.unit) * self.unit

    def prefetch(self, share: float | None = None) -> None:
        """Begins to copy the first pieces of the next pass, after all writes to the host so far.

        Args:
            share: of the slots in host memory, what the CPU attends to in this pass; None for that of the
                last pass, which mostly begins with the same pieces.
        """
        self.to_host.join(self.ring.copy_stream)
        self._share = self._share if share is None else share
        if self._scheduled != (self._share, self.base):
            self._scheduled = (self._share, list(self.base))
            self._schedule = [
                piece.kv
                for layer in range(self.layers)
                for b in range(self.batch)
                for piece in self.pieces(layer, b, self._share)
                if not piece.resident
            ]
        self.ring.start(self._schedule)

    def write(self, layer: int, b: int, start: int, kv: Tensor) -> CopyEvent:
        """Stores ``[n, row]`` of slots on the device from slot ``start`` on.

        Returns:
            the event after which ``kv`` may be overwritten.
        """
        size, first_on_host = kv.shape[0], self.resident_slots[layer]
        resident = max(0, min(first_on_host - start, size))
        if resident:
            target = self.on_device[layer][b][start : start + resident]
            # The last layer's may have been computed in place.
            if target.data_ptr() != kv.data_ptr():
                target.copy_(kv[:resident])
        if resident == size:
            return CopyEvent(None)
        first = start + resident - first_on_host
        return self.to_host.copy(self.on_host[layer][b][first : first + size - resident], kv[resident:])

    def copy_first(self, layer: int, b: int, out: Tensor) -> None:
        """Copies the first rows to ``out`` ``[n, row]`` on the device; rows that are there already stay."""
        self.to_host.join()
        resident = self.on_device[layer][b][: out.shape[0]]
        if resident.data_ptr() != out.data_ptr():
            out[: resident.shape[0]] = resident
        on_host = self.on_host[layer][b][: out.shape[0] - resident.shape[0]]
        copy_over_link(out[resident.shape[0] :], on_host)

    def read(self, layer: int, b: int, start: int, stop: int) -> Tensor:
        """Returns ``[stop - start, row]`` of slots ``[start, stop)``, on the device."""
        self.to_host.join()
        resident = self.resident_slots[layer]
        parts = []
        if start < resident:
            parts.append(self.on_device[layer][b][start : min(stop, resident)])
        if stop > resident:
            others = self.on_host[layer][b][max(start, resident) - resident : stop - resident]
            parts.append(torch.empty_like(others, device=self.device))
            copy_over_link(parts[-1], others)
        return torch.cat(parts)

    def close(self) -> None:
        """Frees all memory; the store cannot be used afterwards."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if hasattr(self, "ring"):
            self.ring.close()
        self.on_device, self.on_host, self._schedule = [], [], []
        self.memory.release()

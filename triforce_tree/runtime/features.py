"""Keeps hidden states of the target by position, in buffers that CUDA graphs write and drafters read."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class Features:
    """Keeps hidden states of B sequences at their first and newest positions.

    The first ``leading`` positions have fixed slots, and all others share a ring buffer. The ring is so long
    that writes of a pass after the end of a sequence never overwrite its newest ``history`` positions.

    Args:
        layers: the hidden states to keep: i means the output of decoder layer i, and the number of layers
            means the state after the final norm.
        batch: B.
        size: hidden size.
        leading: number of first positions to keep.
        history: number of newest positions to keep.
        beyond: most positions after a sequence's committed tokens that passes write.
        device, dtype: device and dtype of the hidden states.

    Attributes:
        first: int64 ``[B]``, the first position whose hidden state was written to the ring. The states of
            positions ``max(first, end - history)`` to ``end - 1`` can be read.
        known_leading: int64 ``[B]``, how many of the first positions have hidden states.
    """

    def __init__(
        self,
        layers: Sequence[int],
        batch: int,
        size: int,
        leading: int,
        history: int,
        beyond: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.leading, self.history, self._ring = leading, history, history + beyond
        shape = (batch, leading + self._ring, size)
        self._states = {layer: torch.zeros(shape, device=device, dtype=dtype) for layer in layers}
        counters = torch.zeros(3, batch, dtype=torch.int64, device=device)
        self.first: Tensor = counters[0]
        self.known_leading: Tensor = counters[1]
        # The position after the last one that was written.
        self._stop: Tensor = counters[2]

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self._states)

    def _slots(self, positions: Tensor) -> Tensor:
        ring = self.leading + (positions - self.leading) % self._ring
        return torch.where(positions < self.leading, positions.clamp_min(0), ring)

    def write(self, hidden: Mapping[int, Tensor], start: Tensor) -> None:
        """Writes hidden states ``[B, T, hidden_size]`` by layer, for positions from ``start`` ``[B]`` on."""
        count = next(iter(hidden.values())).shape[1]
        slots = self._slots(start[:, None] + torch.arange(count, device=start.device))[..., None]
        for layer, kept in self._states.items():
            states = hidden[layer]
            kept.scatter_(1, slots.expand_as(states), states.to(kept.dtype))
        torch.maximum(self._stop, start + count, out=self._stop)

    def read(self, layer: int, positions: Tensor) -> Tensor:
        """Returns ``[B, T, hidden_size]`` for positions ``[B, T]``; arbitrary for positions not kept."""
        return self.read_all([layer], positions)[0]

    def read_all(self, layers: Sequence[int], positions: Tensor) -> list[Tensor]:
        """Returns what :meth:`read` returns for each of several layers."""
        slots = self._slots(positions)[..., None]
        kept = [self._states[layer] for layer in layers]
        return [states.gather(1, slots.expand(-1, -1, states.shape[2])) for states in kept]

    def begin(self, b: int, start: int) -> None:
        """Prepares sequence b for :meth:`feed` from position ``start`` on; states before it stay."""
        self.first[b] = self.first_known(b, start)
        self._stop[b] = start
        self.known_leading[b].clamp_(max=start)

    def first_known(self, b: int, end: int) -> int:
        """Returns the position from which on sequence b has the states of all positions before ``end``."""
        first, stop = int(self.first[b]), int(self._stop[b])
        return end if stop < end else min(end, max(first, stop - self._ring))

    def forget(self, b: int) -> None:
        """Drops all states of sequence b."""
        for counter in (self.first, self.known_leading, self._stop):
            counter[b] = 0

    def parts(self, b: int) -> list[Tensor]:
        """Returns all buffers of sequence b, whose copies :meth:`put_back` restores."""
        return [buffer[b] for buffer in self.buffers]

    def put_back(self, b: int, parts: Sequence[Tensor]) -> None:
        """Restores what :meth:`parts` gave; forgets the states if other ones were kept then."""
        own = self.parts(b)
        if [(part.shape, part.dtype) for part in parts] != [(part.shape, part.dtype) for part in own]:
            self.forget(b)
            return
        for buffer, part in zip(own, parts, strict=True):
            buffer.copy_(part, non_blocking=True)

    def copy_leading(self, source: int, b: int) -> None:
        """Copies the states of the first positions from sequence ``source``, whose prefix b shares; all
        others are dropped.
        """
        self.first[b] = self._stop[b] = 0
        for kept in self._states.values():
            kept[b, : self.leading] = kept[source, : self.leading]
        self.known_leading[b] = self.known_leading[source]

    def feed(self, b: int, start: int, hidden: Mapping[int, Tensor]) -> None:
        """Writes hidden states ``[1, T, hidden_size]`` by layer, for sequence b from position ``start`` on.

        Layers may be written by separate calls with the same ``start``.
        """
        for layer, (states,) in hidden.items():
            kept = self._states[layer]
            stop = start + len(states)
            newest = max(start, stop - self._ring)
            for first, last in ((start, min(stop, self.leading)), (newest, stop)):
                if first < last:
                    slots = self._slots(torch.arange(first, last, device=kept.device))
                    kept[b, slots] = states[first - start : last - start].to(kept.dtype)
            self._stop[b] = stop
        if start <= self.leading and int(self.known_leading[b]) >= start:
            self.known_leading[b] = min(start + states.shape[0], self.leading)

    def rewind(self, lengths: Tensor) -> None:
        """Rolls back to ``lengths`` ``[B]`` tokens, and marks states that were overwritten as missing."""
        torch.maximum(self.first, self._stop - self._ring, out=self.first)
        torch.minimum(self.known_leading, lengths, out=self.known_leading)
        self._stop.copy_(lengths)

    def save(self) -> list[Tensor]:
        """Returns a copy of all buffers."""
        return [tensor.clone() for tensor in self.buffers]

    def restore(self, saved: Sequence[Tensor]) -> None:
        """Restores a copy from :meth:`save`."""
        for tensor, value in zip(self.buffers, saved, strict=True):
            tensor.copy_(value)

    @property
    def buffers(self) -> list[Tensor]:
        """Returns all buffers that passes change."""
        return [self.first, self.known_leading, self._stop, *self._states.values()]

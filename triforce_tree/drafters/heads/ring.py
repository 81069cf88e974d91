"""The slots of a cache that holds the first and the newest positions of each sequence."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from triforce_tree.drafters.heads.growth import GrowingDrafter
from triforce_tree.runtime.features import Features
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.runtime.token_ids import id_tensor


class Ring:
    """Assigns positions to slots: the first ``sinks`` positions have slots of their own, all others share a
    ring buffer.

    Args:
        sinks: the number of first positions.
        window: the number of newest positions that are read.
        beyond: most positions after the newest one that are written; they overwrite none in the window.

    Attributes:
        slots: the number of slots. One more slot, the last, receives what must not be kept.
    """

    def __init__(self, sinks: int, window: int, beyond: int) -> None:
        self.sinks, self.window, self._length = sinks, window, window + beyond
        self.slots = sinks + self._length

    def slots_of(self, positions: Tensor, kept: Tensor) -> Tensor:
        """Returns the slot of each of ``positions``, int64 like it: the last one where ``kept`` is False."""
        ring = self.sinks + (positions - self.sinks) % self._length
        slots = torch.where(positions < self.sinks, positions, ring)
        return torch.where(kept & (positions >= 0), slots, self.slots)

    def positions(self, end: Tensor) -> Tensor:
        """Returns the newest position before ``end`` ``[B, 1]`` that each slot can hold, int64
        ``[B, slots + 1]``.
        """
        slot = torch.arange(self.slots + 1, device=end.device)
        newest = end - 1 - (end - 1 - slot) % self._length
        return torch.where(slot < self.sinks, slot, newest)

    def dropped(self, end: Tensor) -> Tensor:
        """Returns the number of positions between sinks and window, int64 ``[B, 1]``."""
        return (end - self.window - self.sinks).clamp_min(0)

    def visible(self, end: Tensor, positions: Tensor, features: Features) -> Tensor:
        """Returns whether each slot holds a position in sinks and window whose hidden states are known, bool
        ``[B, slots + 1]``.

        Args:
            positions: what :meth:`positions` returns for ``end``.
        """
        slot = torch.arange(self.slots + 1, device=end.device)
        known, first = features.known_leading[:, None], features.first[:, None]
        return torch.where(
            slot < self.sinks,
            (positions < end) & ((positions < known) | (positions >= first)),
            (positions >= self.sinks + self.dropped(end)) & (positions >= first) & (slot < self.slots),
        )


class RingDrafter(GrowingDrafter):
    """A drafter that computes what its cache holds of committed tokens from hidden states of the target.

    ``propose`` computes it for as many of the newest tokens as a pass with its trees can add. A pass with
    matched tokens, or several without the drafter, may have added more.

    Args:
        sinks, window: numbers of first and of newest positions in the cache.
        shapes: the arguments of :class:`GrowingDrafter`.

    Raises:
        ValueError: a size is out of range.
    """

    # The number of newest positions that ``propose`` computes.
    _fresh: int
    # The number of tokens of each sequence that the cache belongs to.
    _known: list[int]

    def __init__(self, sinks: int, window: int, *shapes: Any) -> None:
        super().__init__(*shapes)
        if not 0 <= sinks <= window or window < 1:
            raise ValueError(f"sinks={sinks} and window={window} must be 0 <= sinks <= window, window >= 1")
        self.sinks, self.window = sinks, window

    def bind(self, state: SequenceState) -> None:
        super().bind(state)
        self._fresh = max(state.max_draft_tokens, self._depth) + 2

    def start(self, sequences: Sequence[Sequence[int]]) -> None:
        self._known = [len(tokens) for tokens in sequences]
        self._fill([known - 1 for known in self._known], self.window)

    def start_one(self, b: int, sequences: Sequence[Sequence[int]]) -> None:
        self._known[b] = len(sequences[b])
        # An end of 0 means that nothing is stored for a sequence.
        self._fill([known - 1 if i == b else 0 for i, known in enumerate(self._known)], self.window)

    def prepare(self, sequences: Sequence[Sequence[int] | None], resumed: bool) -> None:
        running = {b: len(tokens) for b, tokens in enumerate(sequences) if tokens is not None}
        added = max(length - self._known[b] for b, length in running.items())
        if added > self._fresh:
            short = any(self._known[b] <= self.sinks for b in running)
            ends = [running.get(b, 1) - 1 for b in range(len(sequences))]
            self._fill(ends, self.window if short else min(added, self.window))
        for b, length in running.items():
            self._known[b] = length

    @torch.no_grad()
    def _fill(self, ends: list[int], newest: int) -> None:
        """Computes what the cache holds of the newest positions before token ``ends[b]`` of each sequence b.

        Nothing is computed for a sequence whose end is 0.

        Args:
            newest: the number of these positions; if it is ``window``, the first ones are computed too.
        """
        end = id_tensor(ends, self._state.device)[:, None]
        if self.sinks and newest == self.window:
            first = torch.arange(self.sinks, device=end.device).expand(len(ends), -1)
            self._store(end, first, first < end)
        positions = self._newest(end, newest)
        self._store(end, positions, positions >= self.sinks)

    def _newest(self, end: Tensor, count: int) -> Tensor:
        """Returns the newest ``count`` positions before ``end`` ``[B, 1]``, int64 ``[B, T]``, and those
        before them that are needed for their computation.
        """
        return end + torch.arange(-count, 0, device=end.device)

    def _store(self, end: Tensor, positions: Tensor, kept: Tensor) -> None:
        """Computes the ``positions``, int64 ``[B, T]``, before token ``end`` ``[B, 1]``, and stores those
        that are ``kept``, bool ``[B, T]``.
        """
        raise NotImplementedError

"""Records at which lengths sequences can be continued.

Rings and recurrent states lose what earlier positions need. All other KV slots keep every position. A ring
holds little more than the window of the newest position, and a recurrent state belongs to one length alone.
Copies at the ends of prompts let a conversation continue from there when its next tokens differ from those
that were decoded.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from triforce_tree.kv.recurrent_states import RecurrentStates
from triforce_tree.kv.store import KVStore

MOST_COPIES = 3
"""Copies of a sequence: at the first prompt's end, which forks of a session share, and at the newest ones."""


class Continued(Protocol):
    """Holds sequences that can be continued from their present lengths, or from copies of earlier ones."""

    def copy(self, b: int, length: int) -> list[Tensor]:
        """Returns copies of what sequence b, which has ``length`` tokens, needs to be continued, beside what
        every length leaves in place.
        """

    def put_back(self, b: int, length: int, copies: Sequence[Tensor]) -> None:
        """Lets sequence b continue from ``length`` tokens, of which there are copies."""

    def continues(self, b: int, length: int) -> bool:
        """Returns whether sequence b can be continued from its first ``length`` tokens as it is."""

    def clear(self, b: int) -> None:
        """Lets sequence b begin anew."""


class StoredSequences:
    """Sequences whose keys and values are in KV slots on the device (``Continued``).

    Args:
        store: the KV slots.
        states: the states of recurrent layers; None where there are none.
    """

    def __init__(self, store: KVStore, states: RecurrentStates | None) -> None:
        self._store, self._states = store, states

    def copy(self, b: int, length: int) -> list[Tensor]:
        states = self._states.buffers if self._states is not None else []
        return [*self._store.window(b, length), *(state[b].clone() for state in states)]

    def put_back(self, b: int, length: int, copies: Sequence[Tensor]) -> None:
        states = self._states.buffers if self._states is not None else []
        windows = len(copies) - len(states)
        self._store.set_window(b, length, copies[:windows])
        for state, copy in zip(states, copies[windows:], strict=True):
            state[b].copy_(copy, non_blocking=True)
        if self._states is not None:
            self._states.lengths[b] = length

    def continues(self, b: int, length: int) -> bool:
        if self._states is not None and self._states.lengths[b] != length:
            return False
        return self._store.continues(b, length)

    def clear(self, b: int) -> None:
        self._store.fed(b, 0)


class Marks:
    """Records lengths that sequences can be continued from, and keeps copies for some.

    Args:
        sequences: what is continued.
        batch: number of sequences.
    """

    def __init__(self, sequences: Continued, batch: int) -> None:
        self._sequences = sequences
        self._copies: list[list[tuple[int, list[Tensor]]]] = [[] for _ in range(batch)]

    def take(self, earlier: "Marks") -> None:
        """Takes over the copies of the first sequences of an earlier batch."""
        count = min(len(self._copies), len(earlier._copies))
        self._copies[:count] = earlier._copies[:count]

    def copies(self, b: int) -> Sequence[tuple[int, list[Tensor]]]:
        """Returns the lengths of sequence b that there are copies of, and the copies."""
        return self._copies[b]

    def continues(self, b: int, length: int) -> bool:
        """Returns whether sequence b can be continued from its first ``length`` tokens as it is."""
        return self._sequences.continues(b, length)

    def start(self, b: int, length: int, unit: int) -> int:
        """Returns the greatest length up to ``length`` that sequence b can be continued from, or 0.

        Args:
            unit: copies count at multiples of it.
        """
        if self._sequences.continues(b, length):
            return length
        return max((at for at, _ in self._copies[b] if at <= length and at % unit == 0), default=0)

    def restore(self, b: int, length: int) -> None:
        """Lets sequence b continue from a length that :meth:`start` found, and drops later copies."""
        if not length:
            self._sequences.clear(b)
        elif not self._sequences.continues(b, length):
            [copies] = [copies for at, copies in self._copies[b] if at == length]
            self._sequences.put_back(b, length, copies)
        self.prune(b, length)

    def prune(self, b: int, length: int) -> None:
        """Drops the copies after ``length``, because other tokens follow."""
        self._copies[b] = [copy for copy in self._copies[b] if copy[0] <= length]

    def add(self, b: int, length: int) -> None:
        """Copies what sequence b needs to be continued from ``length``, where it is now, if memory allows."""
        copies = [copy for copy in self._copies[b] if copy[0] != length]
        if not length:
            return
        try:
            copies.append((length, self._sequences.copy(b, length)))
        except torch.OutOfMemoryError:
            return
        if len(copies) > MOST_COPIES:
            del copies[1]
        self._copies[b] = copies

    def copy(self, b: int, length: int) -> list[Tensor]:
        """Returns copies for sequence b, which has ``length`` tokens now."""
        return self._sequences.copy(b, length)

    def put_back(self, b: int, length: int, copies: Sequence[Tensor]) -> None:
        """Lets sequence b continue from copies of another sequence with the same first ``length`` tokens."""
        self._copies[b] = []
        self._sequences.put_back(b, length, copies)

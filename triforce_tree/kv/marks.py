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

    def parts(self, b: int) -> list[Tensor]:
        """Returns what sequence b needs to be continued, beside what every length leaves in place."""

    def continues(self, b: int, length: int) -> bool:
        """Returns whether sequence b can be continued from its first ``length`` tokens as it is."""

    def set_length(self, b: int, length: int) -> None:
        """Records that sequence b has ``length`` tokens, 0 or those of a copy that was restored."""


class StoredSequences:
    """Sequences whose keys and values are in KV slots on the device (``Continued``).

    Args:
        store: the KV slots.
        states: of recurrent layers; None where there are none.
    """

    def __init__(self, store: KVStore, states: RecurrentStates | None) -> None:
        self._store, self._states = store, states

    def parts(self, b: int) -> list[Tensor]:
        rings = [part[:, b] for group in self._store.groups if group.ring for part in group.parts]
        return rings + [state[b] for state in (self._states.buffers if self._states is not None else [])]

    def continues(self, b: int, length: int) -> bool:
        if self._states is not None and self._states.lengths[b] != length:
            return False
        return self._store.continues(b, length)

    def set_length(self, b: int, length: int) -> None:
        self._store.fed(b, length, length)
        if length and self._states is not None:
            self._states.lengths[b] = length


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

    def lengths(self, b: int) -> Sequence[int]:
        """Returns the lengths of sequence b that there are copies of."""
        return [length for length, _ in self._copies[b]]

    def start(self, b: int, length: int, copies: bool) -> int:
        """Returns the greatest length up to ``length`` that sequence b can be continued from, or 0.

        Args:
            copies: whether copies count, too.
        """
        if self._sequences.continues(b, length):
            return length
        return max((at for at in self.lengths(b) if at <= length and copies), default=0)

    def restore(self, b: int, length: int) -> None:
        """Lets sequence b continue from a length that :meth:`start` found, and drops later copies."""
        if not length:
            self._sequences.set_length(b, 0)
        elif not self._sequences.continues(b, length):
            [parts] = [parts for at, parts in self._copies[b] if at == length]
            for own, copy in zip(self._sequences.parts(b), parts, strict=True):
                own.copy_(copy)
            self._sequences.set_length(b, length)
        self.prune(b, length)

    def prune(self, b: int, length: int) -> None:
        """Drops the copies after ``length``, because other tokens follow."""
        self._copies[b] = [copy for copy in self._copies[b] if copy[0] <= length]

    def add(self, b: int, length: int) -> None:
        """Copies what sequence b needs to be continued from ``length``, where it is now, if memory allows."""
        copies = [copy for copy in self._copies[b] if copy[0] != length]
        if not (parts := self._sequences.parts(b)) or not length:
            return
        try:
            copies.append((length, [part.clone() for part in parts]))
        except torch.OutOfMemoryError:
            return
        if len(copies) > MOST_COPIES:
            del copies[1]
        self._copies[b] = copies

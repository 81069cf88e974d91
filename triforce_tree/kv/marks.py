"""Records at which lengths sequences can be continued.

Rings and recurrent states lose what earlier positions need. All other KV slots keep every position. A ring
holds little more than the window of the newest position, and a recurrent state belongs to one length alone.
Copies at the ends of prompts let a conversation continue from there when its next tokens differ from those
that were decoded.
"""

import torch
from torch import Tensor

from triforce_tree.kv.recurrent_states import RecurrentStates
from triforce_tree.kv.store import KVStore

# The first prompt's end, which forks of a session share, and the newest ones.
_MOST = 3


class Marks:
    """Records lengths that sequences can be continued from, and copies rings and states for some.

    Args:
        store: KV slots on the device.
        states: of recurrent layers; None where there are none.
        batch: sequences.
    """

    def __init__(self, store: KVStore, states: RecurrentStates | None, batch: int) -> None:
        self._store, self._states = store, states
        # Whether positions before the newest one are lost.
        self._forgets = states is not None or any(group.ring for group in store.groups)
        self._copies: list[list[tuple[int, list[Tensor]]]] = [[] for _ in range(batch)]

    def start(self, b: int, length: int, copies: bool) -> int:
        """Returns the greatest length up to ``length`` that sequence b can be continued from, or 0.

        Args:
            copies: whether copies count, too.
        """
        if not self._forgets or self._continues(b, length):
            return length
        return max((at for at, _ in self._copies[b] if at <= length and copies), default=0)

    def restore(self, b: int, length: int) -> None:
        """Lets sequence b continue from a length that :meth:`start` found, and drops later copies."""
        if not length:
            self._store.begin(b)
        elif self._forgets and not self._continues(b, length):
            [parts] = [parts for at, parts in self._copies[b] if at == length]
            for own, copy in zip(self._parts(b), parts, strict=True):
                own.copy_(copy)
            self._store.fed(b, length)
            if self._states is not None:
                self._states.lengths[b] = length
        self.prune(b, length)

    def prune(self, b: int, length: int) -> None:
        """Drops the copies after ``length``, because other tokens follow."""
        self._copies[b] = [copy for copy in self._copies[b] if copy[0] <= length]

    def add(self, b: int, length: int) -> None:
        """Copies what sequence b needs to be continued from ``length``, where it is now, if memory allows."""
        copies = [copy for copy in self._copies[b] if copy[0] != length]
        if not (parts := self._parts(b)) or not length:
            return
        try:
            copies.append((length, [part.clone() for part in parts]))
        except torch.OutOfMemoryError:
            return
        if len(copies) > _MOST:
            del copies[1]
        self._copies[b] = copies

    def _continues(self, b: int, length: int) -> bool:
        if self._states is not None and self._states.lengths[b] != length:
            return False
        return self._store.continues(b, length)

    def _parts(self, b: int) -> list[Tensor]:
        rings = [part[:, b] for group in self._store.groups if group.ring for part in group.parts]
        return rings + [state[b] for state in (self._states.buffers if self._states is not None else [])]

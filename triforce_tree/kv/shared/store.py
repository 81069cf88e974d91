"""KV slots of a batch whose sequences begin alike: those of the common prefix once, then each one's own."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from triforce_tree.kv.cached_tokens import CachedTokens
from triforce_tree.kv.store import KVGroup, KVStore
from triforce_tree.models.attention import KVShape


class SharedStore(KVStore):
    """K and V of B sequences, all of which begin with the same P tokens.

    The slots of each KV head are ``[prefix | sequence 0 | sequence 1 | ...]``: position r < P of every
    sequence is slot r, and position r >= P of sequence b is slot ``r - P`` of its own. P may change between
    batches, up to the ``capacity``; kernels read it on the device.

    Args:
        layers: as for :class:`KVStore`; none has a window that hides anything.
        batch: B.
        capacity: most tokens of the prefix, a multiple of ``page``.
        own: slots of a sequence after the prefix, scratch slots included, rounded up to whole pages.
        page, scratch, bits: as for :class:`KVStore`.

    Attributes:
        groups: the sequences' own slots, ``[layers, B, H_kv, own, D]``.
        whole: all slots, ``[layers, 1, H_kv, capacity + B * own, D]`` and more to fill a page.
        rows: capacity + own.
        length: P, on the host.
        prefix: int64 ``[1]``, P on the device; ``prefix_pages``: P / page.
        shift: int32 ``[B, 1, 1]``, from the number of a page of a sequence after P to its page in ``whole``.
    """

    def __init__(
        self,
        layers: Sequence[KVShape | None],
        batch: int,
        capacity: int,
        own: int,
        device: torch.device,
        dtype: torch.dtype,
        page: int,
        scratch: int,
        bits: int,
    ) -> None:
        own = -(-own // page) * page
        full = [replace(shape, window=None, chunked=False) if shape is not None else None for shape in layers]
        super().__init__(full, 1, capacity + batch * own, device, dtype, page, bits=bits)
        self.capacity, self.own, self.batch = capacity, own, batch
        self.rows, self.scratch = capacity + own, scratch
        self._most_tokens = self.rows - scratch
        self._lengths = [0] * batch
        self.whole = self.groups
        self.groups = [self._own_slots(group) for group in self.whole]
        self.length = 0
        self.prefix, self.prefix_pages = torch.zeros(2, 1, dtype=torch.int64, device=device)
        self._first_pages = (capacity + own * torch.arange(batch, device=device)[:, None, None]) // page
        self.shift = self._first_pages.int()

    def _own_slots(self, group: KVGroup) -> KVGroup:
        def own(slots: Tensor) -> Tensor:
            after = slots[:, 0, :, self.capacity : self.capacity + self.batch * self.own]
            split: Tensor = after.unflatten(2, (self.batch, self.own))
            return split.transpose(1, 2)

        scales = None if group.scales is None else (own(group.scales[0]), own(group.scales[1]))
        return replace(group, k=own(group.k), v=own(group.v), scales=scales)

    def set_prefix(self, length: int) -> None:
        """From now on the first ``length`` tokens of all sequences, whole pages, are the prefix."""
        if length % self.page or length > self.capacity:
            raise ValueError(
                f"a common prefix of {length} tokens is not a multiple of {self.page} up to {self.capacity}; "
                "make another store"
            )
        self.length = length
        self.prefix.fill_(length)
        self.prefix_pages.fill_(length // self.page)
        self.shift.copy_(self._first_pages - length // self.page)

    def share(self, length: int, cached: CachedTokens, prompts: Sequence[Sequence[int]]) -> None:
        """Before a prefill of prompts which share their first ``length`` tokens, forget what it overwrites.

        Args:
            cached: which tokens the sequences hold; all of them hold the same prefix.
        """
        most = max(cached.common(b, prompt, "chunks") for b, prompt in enumerate(prompts))
        kept = min(most, length, self.length)
        if kept < max(length, self.length):
            for b in range(self.batch):
                cached.keep(b, kept)
        self.set_prefix(length)

    def take_prefix(self, slots: Sequence[Tensor], tokens: Sequence[int], cached: CachedTokens) -> None:
        """Begin with a prefix that another store holds, in whole chunks of a prefill.

        Args:
            slots: of its first tokens, as ``leading`` returns them.
            tokens: as many; those beyond the capacity are left out.
            cached: which tokens the sequences of this store hold; the first one gets these.
        """
        unit = math.lcm(self.page, cached.chunk)
        count = min(len(tokens), self.capacity) // unit * unit
        for own, others in zip(leading(self.whole, 0, count), slots, strict=True):
            own.copy_(others[:, :, :count])
        self.set_prefix(count)
        cached.copied(0, tokens, count)

    def fits(self, max_seq_len: int, prefix: int) -> bool:
        """Whether sequences of so many tokens, ``prefix`` of them common, fit."""
        assert self.scratch is not None
        return 0 < prefix <= self.capacity and max_seq_len - prefix + self.scratch <= self.own

    def copy_within(self, source: int, b: int, start: int, stop: int) -> None:
        """See :class:`KVStore`; the prefix is that of all sequences already."""
        super().copy_within(source, b, max(0, start - self.length), max(0, stop - self.length))

    def common_slots(self, group: KVGroup) -> list[Tensor]:
        """The prefix's slots of a group of ``whole`` as if each sequence had them: keys, then their scales.

        Returns:
            views ``[layers, B, H_kv, capacity, D]``.
        """
        parts = [group.k] if group.scales is None else [group.k, group.scales[0]]
        return [t[..., : self.capacity, :].expand(-1, self.batch, -1, -1, -1) for t in parts]

    @property
    def bytes(self) -> int:
        """Of all keys and values, and their scales."""
        return sum(part.nbytes for group in self.whole for part in group.parts)

    @contextmanager
    def saved(self, start: int, count: int) -> Iterator[None]:
        """See :class:`KVStore`. Inside, as much as the capacity allows is the prefix."""
        before = self.length
        self.set_prefix(min(self.capacity, start // self.page * self.page))
        try:
            with super().saved(start - self.length, count):
                yield
        finally:
            self.set_prefix(before)

    def in_pages(self, page: int) -> KVStore:
        """Not for these slots, whose first ones are those of another sequence's pages."""
        raise ValueError(f"slots of a common prefix have pages of {self.page}; make another store")


def leading(groups: Sequence[KVGroup], sequence: int, count: int) -> list[Tensor]:
    """The first ``count`` slots of a sequence in all groups, none a ring: ``[layers, H_kv, count, D]``."""
    return [part[:, sequence, :, :count] for group in groups for part in group.parts]

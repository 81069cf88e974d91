"""Stores keys and values in pages that texts share, and which pages each sequence of a batch has."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from triforce_tree.kernels.attention.prefixes import PrefixPlan, PrefixSegment, segments_of
from triforce_tree.kv.backend import CacheSpec
from triforce_tree.kv.pool.pages import selection, slots_in, wide
from triforce_tree.kv.store import KVGroup, KVStore, dequantised, in_int8
from triforce_tree.models.hf_model import HFModel
from triforce_tree.runtime.packed import Packed

DEPTH = 4
"""Fewest segments of shared pages that a sequence may begin with."""


class PagedStore(KVStore):
    """Holds K and V in pages, each of which belongs to a part of a text.

    All layers keep every position, also those with a sliding window: a text may be continued anywhere.

    Args:
        target: the model.
        slots: the KV slots of each head, for all texts; they are rounded up to whole pages.
        page: the KV slots of a page.
        bits, beside: as for :class:`KVStore`.
    """

    def __init__(
        self, target: HFModel, slots: int, page: int, bits: int = 16, beside: KVStore | None = None
    ) -> None:
        full = [shape and replace(shape, window=None, chunked=False) for shape in target.kv_layers]
        super().__init__(full, 1, slots, target.device, target.dtype, page, bits=bits, beside=beside)

    def append_at(
        self, layer: int, written: slice | Tensor, seen: slice | Tensor, visible: int, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Stores the next keys and values of a text, and returns those of the slots that it sees.

        Its queries attend to one tensor, as those of a prompt alone do, so that they get the same bits. Keys
        and values are copied for it where the slots are not consecutive, those of one layer at a time.

        Args:
            written: the slots of the new tokens, see :func:`selection`.
            seen: the slots of all tokens that they may see, the new ones included.
            visible: the number of these tokens.
            k, v: ``[1, H_kv, T, D]`` and ``[1, H_kv, T, D_v]``.
        """
        own, found = self.layers[layer], list[Tensor]()
        fresh = (k, v) if own.scales is None else in_int8(k, v)
        for part, new in zip(own.parts, fresh, strict=True):
            slots, given = wide(part[0], new[0].to(part.dtype))
            slots[:, written] = given
            found.append(_selected(part[0], seen)[None])
        keys, values = found if own.scales is None else dequantised(found, k.dtype)
        return keys[:, :, :visible], values[:, :, :visible]

    @property
    def stored(self) -> list[Tensor]:
        """Returns all K, V and scales, by layer: ``[H_kv, S, D]``."""
        return [layer[0] for group in self._memory_of for part in group.parts for layer in part]

    def copy_slots(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copies the slots ``source`` of all layers to other slots ``target``, int64 ``[n]``."""
        old, new = (selection(slots, self.device) for slots in (source, target))
        for layer in self.stored:
            (slots,) = wide(layer)
            slots[:, new] = slots[:, old]

    def slots_of(self, pages: Sequence[int]) -> slice | Tensor:
        """Returns an index of the slots of pages."""
        return selection(slots_in(pages, 0, len(pages) * self.page, self.page), self.device)


class PooledStore(PagedStore):
    """Holds K and V of B sequences, several of which may share the pages of a common prefix.

    Sequence b begins with P_b tokens in pages that others may read, too, and goes on in pages of its own.
    Both may change between two passes, as far as they fit: kernels read the page tables on the device.

    Args:
        spec: what the slots are needed for; no layer has a window that hides anything.
        slots: the KV slots of each head, for all prefixes and sequences.
        page: the KV slots of a page, a multiple of the chunks of a retrieval.
        beside: a store for another number of sequences, whose pages this one uses as well.

    Attributes:
        groups: the slots as each sequence's: ``[layers, B, H_kv, slots, D]``, B times the same memory.
        whole: all slots, ``[layers, 1, H_kv, slots, D]`` and more to fill a page.
        total_slots: the KV slots of a head.
        depth: the most segments of shared pages that a sequence begins with.
        shared, own: the shared pages and the own pages of each sequence, on the host.
        prefix: int64 ``[B]``, where the prefix ends that each sequence reads together with others.
        pages: int32 ``[B, slots / page]``, the page in ``whole`` of each page of a sequence.
        writable: the same for the sequence's own pages, and -1 for all others.
        chunks: int32 ``[B, slots / chunk]``, the chunk in ``whole`` of each chunk of a retrieval.
        means: the means of the chunks of a retrieval, by group, which all stores of these pages share.
    """

    writable: Tensor

    def __init__(self, spec: CacheSpec, slots: int, page: int, beside: "PooledStore | None" = None) -> None:
        batch, device = spec.batch, spec.target.device
        super().__init__(spec.target, slots, page, spec.config.kv_bits, beside)
        self.total_slots, self.depth, self.batch = self.slots, max(DEPTH, batch.bit_length()), batch
        self.slots, self.scratch = -(-spec.slots // page) * page, spec.scratch
        self._most_tokens = self.slots - spec.scratch
        self._begin_empty(batch)
        self.whole = self.groups
        self.groups = [_for_each(group, batch) for group in self.whole]
        self._set_layers()
        self._in_page = page // spec.config.retrieval.chunk if spec.levels == 3 else 1
        table, in_page = ((batch, self.slots // page), torch.int32), self._in_page
        self._packed = Packed(device, table, table, ((batch,), torch.int64))
        self.pages, self.writable, self.prefix = self._packed.tensors
        self.chunks = torch.empty(batch, self.pages.shape[1] * in_page, dtype=torch.int32, device=device)
        self._chunk_in_page = torch.arange(in_page, dtype=torch.int32, device=device)
        # The pages of each sequence in the tables, and how many of them are shared, -1 at first.
        self._in_tables: list[tuple[list[int], int]] = [([], -1)] * batch
        self._plans: WeakSet[PrefixPlan] = WeakSet()
        # What the plans were given last.
        self._planned: tuple[list[PrefixSegment], list[int]] = ([], [0] * batch)
        self.means: dict[int, Tensor] = beside.means if beside is not None else {}
        self.shared: list[list[int]] = [[] for _ in range(batch)]
        self.own = self.shared
        self._selected: tuple[object, slice | Tensor, slice | Tensor] | None = None
        self._current = True

    def initialise(self, held: Sequence[int | None]) -> None:
        """See :class:`KVStore`; prefixes may be kept that no sequence holds."""
        super().initialise([None])

    @property
    def _memory_of(self) -> list[KVGroup]:
        return self.whole

    def keep_current(self, plan: PrefixPlan) -> None:
        """Gives a plan the prefixes now and whenever they change."""
        self._plans.add(plan)
        plan.set(*self._planned)

    def _segments(self) -> tuple[list[PrefixSegment], list[int]]:
        """Returns the prefixes that several sequences read together, and where those of each sequence end."""
        found = segments_of(self.shared, self.depth, self.page)
        segments, ends = [each for each in found if each.rows > 1], [0] * self.batch
        for start, length, first, rows in segments:
            for b in range(first, first + rows):
                ends[b] = max(ends[b], start + length)
        return segments, ends

    def set(self, shared: Sequence[Sequence[int]], own: Sequence[Sequence[int]]) -> None:
        """Sets that sequence b begins with the pages ``shared[b]`` and goes on in the pages ``own[b]``.

        A prefill sees this at once, and passes after :meth:`update`.
        """
        self.shared, self.own = [list(pages) for pages in shared], [list(pages) for pages in own]
        self._selected, self._current = None, False

    def update(self) -> None:
        """Copies the pages of the sequences to the device, if they have changed."""
        if self._current:
            return
        self._current = True
        pages, writable, prefix = self._packed.arrays
        most = pages.shape[1]
        for b, (first, rest) in enumerate(zip(self.shared, self.own, strict=True)):
            every = [*first, *rest][:most]
            if self._in_tables[b] != (every, len(first)):
                self._in_tables[b] = every, len(first)
                # Pages after the own ones are not read.
                pages[b], writable[b] = 0, -1
                pages[b, : len(every)] = every
                writable[b, len(first) : len(every)] = every[len(first) :]
        segments, ends = self._segments()
        prefix[:] = ends
        self._packed.send()
        of_pages = self.chunks.view(*self.pages.shape, self._in_page)
        torch.add(self._chunk_in_page, self.pages[:, :, None], alpha=self._in_page, out=of_pages)
        if self._planned != (segments, ends):
            self._planned = segments, ends
            for plan in self._plans:
                plan.set(segments, ends)

    def _slots(self, b: int, start: int, stop: int, spare: bool = False) -> slice | Tensor:
        """Returns the slots of positions ``start`` to ``stop`` of a sequence, see :func:`selection`."""
        slots = slots_in([*self.shared[b], *self.own[b]], start, stop, self.page)
        return selection(slots, self.device, spare)

    def append(self, layer: int, b: int, start: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`KVStore` and :meth:`append_at`."""
        key, stop = (b, start, k.shape[2]), start + k.shape[2]
        if self._selected is None or self._selected[0] != key:
            # All layers of a forward have the same slots.
            self._selected = key, self._slots(b, start, stop), self._slots(b, 0, stop, spare=True)
        return self.append_at(layer, *self._selected[1:], stop, k, v)

    def positions(self, b: int, start: int, stop: int) -> list[Tensor]:
        """See :class:`KVStore`; these are copies where the pages are not consecutive."""
        chosen = self._slots(b, start, stop)
        return [_selected(layer, chosen) for layer in self.stored]

    def set_positions(self, b: int, start: int, parts: Sequence[Tensor]) -> None:
        """Stores what :meth:`positions` gave, from position ``start`` of a sequence on."""
        chosen = self._slots(b, start, start + parts[0].shape[1])
        for layer, part in zip(self.stored, parts, strict=True):
            slots, values = wide(layer, part.to(layer.device, non_blocking=True))
            slots[:, chosen] = values

    def copy_from(self, source: KVStore, b: int, start: int, pages: Sequence[int]) -> None:
        """Copies positions of sequence b from a store whose sequences have slots of their own to pages."""
        chosen, stop = self.slots_of(pages), start + len(pages) * self.page
        for parts in zip(self.stored, source.positions(b, start, stop), strict=True):
            new, old = wide(*parts)
            new[:, chosen] = old

    def copy_pages(self, source: "PooledStore", there: Sequence[int], here: Sequence[int]) -> None:
        """Copies pages of another store to as many slots, in this order; its pages may have another size."""
        chosen, others = self.slots_of(here), source.slots_of(there)
        for parts in zip(self.stored, source.stored, strict=True):
            new, old = wide(*parts)
            new[:, chosen] = old[:, others]

    def tokens(self) -> tuple[int, int]:
        read = [page for pages in self.shared for page in pages]
        saved = (len(read) - len(set(read))) * self.page
        return sum(self._lengths) - saved, saved

    @contextmanager
    def saved(self, start: int, count: int) -> Iterator[None]:
        """See :class:`KVStore`. Inside, as much of the made-up sequences as fits is one prefix of all."""
        assert self.scratch is not None
        before, page, every = (self.shared, self.own), self.page, self.total_slots // self.page
        own = -(-(page + self.scratch + 1) // page)
        length = min(every - self.batch * own, start // page)
        ends = range(every, every - self.batch * own, -own)
        self.set([list(range(length))] * self.batch, [list(range(end - own, end)) for end in ends])
        self.update()
        written = [
            self._slots(b, start, min(start + count, (length + own) * page)) for b in range(self.batch)
        ]
        stored = [wide(layer)[0] for layer in self.stored]
        kept = [[layer[:, slots].clone() for slots in written] for layer in stored]
        try:
            yield
        finally:
            for layer, copies in zip(stored, kept, strict=True):
                for slots, copy in zip(written, copies, strict=True):
                    layer[:, slots] = copy
            self.set(*before)
            self.update()


def _selected(slots: Tensor, chosen: slice | Tensor) -> Tensor:
    """Returns some of the slots ``[H_kv, S, D]``."""
    return wide(slots)[0][:, chosen].view(slots.dtype)


def _for_each(group: KVGroup, batch: int) -> KVGroup:
    """Returns a group's slots as those of each sequence, without a copy."""

    def seen(slots: Tensor) -> Tensor:
        return slots.expand(-1, batch, -1, -1, -1)

    scales = None if group.scales is None else (seen(group.scales[0]), seen(group.scales[1]))
    return replace(group, k=seen(group.k), v=seen(group.v), scales=scales)

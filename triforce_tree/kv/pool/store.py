"""Stores the KV slots of a batch whose sequences share prefixes, each of which is stored once."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from weakref import WeakSet

import torch
from torch import Tensor

from triforce_tree.kernels.attention.prefixes import PrefixPlan, PrefixSegment
from triforce_tree.kv.backend import CacheSpec
from triforce_tree.kv.pool.blocks import Run
from triforce_tree.kv.store import KVGroup, KVStore, dequantised, in_int8

DEPTH = 4
"""Fewest runs of shared slots that a sequence may begin with."""


class PooledStore(KVStore):
    """Holds K and V of B sequences, several of which may share the slots of a common prefix.

    Sequence b begins with P_b tokens in one or more runs of slots that others may read, too, and position
    r >= P_b is slot ``r - P_b`` of its own ones. Both may change between two passes, as far as they fit:
    kernels read where they are on the device.

    Args:
        spec: what the slots are needed for; no layer has a window that hides anything.
        slots: of each KV head, for all prefixes and sequences.
        page: prefixes and own slots begin at whole pages.

    Attributes:
        groups: the slots as each sequence's: ``[layers, B, H_kv, slots, D]``, B times the same memory.
        whole: all slots, ``[layers, 1, H_kv, slots, D]`` and more to fill a page.
        total_slots: of a head.
        depth: most runs that a sequence begins with.
        paths: these runs of each sequence, on the host.
        places: the first of each sequence's own slots, on the host.
        prefix, first: int64 ``[B]``, P_b and ``places`` on the device.
        pages: int32 ``[B, slots / page]``, the page in ``whole`` of each page of a sequence.
    """

    def __init__(self, spec: CacheSpec, slots: int, page: int) -> None:
        target, batch, device = spec.target, spec.batch, spec.target.device
        full = [shape and replace(shape, window=None, chunked=False) for shape in target.kv_layers]
        super().__init__(full, 1, slots, device, target.dtype, page, bits=spec.config.kv_bits)
        self.total_slots, self.depth, self.batch = self.slots, max(DEPTH, batch.bit_length()), batch
        self.slots, self.scratch = -(-spec.slots // page) * page, spec.scratch
        self._most_tokens = self.slots - spec.scratch
        self._lengths, self._lost = [0] * batch, [0] * batch
        self.whole = self.groups
        self.groups = [_for_each(group, batch) for group in self.whole]
        self._set_layers()
        self.prefix, self.first = torch.zeros(2, batch, dtype=torch.int64, device=device)
        self.pages = torch.zeros(batch, self.slots // page, dtype=torch.int32, device=device)
        self._plans: WeakSet[PrefixPlan] = WeakSet()
        self.paths: list[list[Run]] = [[] for _ in range(batch)]
        self.places = [0] * batch

    def initialise(self, held: Sequence[int | None]) -> None:
        """See :class:`KVStore`; prefixes may be kept that no sequence holds."""
        super().initialise([None])

    @property
    def _memory_of(self) -> list[KVGroup]:
        return self.whole

    def keep_current(self, plan: PrefixPlan) -> None:
        """Gives a plan the prefixes now and whenever they change."""
        self._plans.add(plan)
        plan.set(self.segments(), self.places)

    def segments(self) -> list[PrefixSegment]:
        """Returns the runs of slots that are read once, each with the adjacent sequences that share it."""
        found: list[PrefixSegment] = []
        for depth in range(max(map(len, self.paths))):
            before = None
            for b, path in enumerate(self.paths):
                run = path[depth] if depth < len(path) else None
                if run is None:
                    pass
                elif run == before:
                    found[-1] = found[-1]._replace(rows=found[-1].rows + 1)
                else:
                    found.append(PrefixSegment(run.place, run.stop - run.start, b, 1))
                before = run
        return found

    def set(self, paths: Sequence[Sequence[Run]], places: Sequence[int]) -> None:
        """Sets that sequence b begins with the positions of ``paths[b]`` and continues at ``places[b]``."""
        self.paths, self.places = [list(path) for path in paths], list(places)
        ends = [path[-1].stop if path else 0 for path in paths]
        self.prefix.copy_(torch.tensor(ends))
        self.first.copy_(torch.tensor(self.places))
        page, table = self.page, torch.empty(self.pages.shape, dtype=torch.int32)
        numbers = torch.arange(table.shape[1], dtype=torch.int32)
        for b, (path, end) in enumerate(zip(paths, ends, strict=True)):
            # Pages after the own slots are not read.
            table[b] = (numbers + (places[b] - end) // page).clamp_max(self.total_slots // page - 1)
            for start, stop, place in path:
                part = slice(start // page, stop // page)
                table[b, part] = numbers[part] + (place - start) // page
        self.pages.copy_(table)
        segments = self.segments()
        for plan in self._plans:
            plan.set(segments, self.places)

    def runs(self, b: int, start: int, stop: int) -> list[Run]:
        """Returns the runs of slots that hold positions ``start`` to ``stop`` of a sequence."""
        path = self.paths[b]
        end = path[-1].stop if path else 0
        found = []
        for run in [*path, Run(end, max(end, stop), self.places[b])]:
            first, last = max(run.start, start), min(run.stop, stop)
            if first < last:
                found.append(Run(first, last, run.place + first - run.start))
        return found

    @property
    def _parts(self) -> list[Tensor]:
        """Returns all stored tensors, ``[layers, 1, H_kv, slots, D]``."""
        return [part for group in self.whole for part in group.parts]

    def append(self, layer: int, b: int, start: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`KVStore`.

        Queries after a prefix attend to one tensor, as those of a prompt alone do, so that they get the same
        bits: keys and values of the prefixes are copied for it, those of one layer at a time.
        """
        own, stop = self.layers[layer], start + k.shape[2]
        fresh = (k, v) if own.scales is None else in_int8(k, v)
        written, read = self.runs(b, start, stop), self.runs(b, 0, stop)
        seen = []
        for whole, new in zip(self.whole[own.number].parts, fresh, strict=True):
            slots = whole[own.place]
            for run in written:
                stored = slots[:, :, run.place : run.place + run.stop - run.start]
                stored.copy_(new[:, :, run.start - start : run.stop - start])
            parts = [slots[:, :, run.place : run.place + run.stop - run.start] for run in read]
            seen.append(torch.cat(parts, 2) if len(parts) > 1 else parts[0])
        return (seen[0], seen[1]) if own.scales is None else dequantised(seen, k.dtype)

    def copy_from(self, source: KVStore, b: int, run: Run) -> None:
        """Copies positions of sequence b from a store whose sequences have slots of their own to a run."""
        for group, other in zip(self.whole, source.groups, strict=True):
            for new, old in zip(group.parts, other.parts, strict=True):
                new[:, 0, :, run.place : run.place + run.stop - run.start] = old[
                    :, b, :, run.start : run.stop
                ]

    def move_runs(self, stored: Sequence[tuple[int, int]]) -> None:
        """Puts runs of slots, given by place and size, one after the other from slot 0 on."""
        total = sum(size for _, size in stored)
        for part in self._parts:
            for (slots,) in part:
                slots[:, :total] = torch.cat([slots[:, at : at + size] for at, size in stored], 1)

    def copy_runs(self, source: "PooledStore", copies: Sequence[tuple[int, int, int]]) -> None:
        """Copies runs of slots of another store: places there, sizes, and places here."""
        for new, old in zip(self._parts, source._parts, strict=True):
            for start, size, place in copies:
                new[:, 0, :, place : place + size] = old[:, 0, :, start : start + size]

    def tokens(self) -> tuple[int, int]:
        """See :class:`KVStore`."""
        runs = sorted((run.place, run.stop - run.start) for path in self.paths for run in path)
        read, stored, end = sum(count for _, count in runs), 0, 0
        # Runs of several sequences overlap.
        for place, count in runs:
            stored += max(0, place + count - max(place, end))
            end = max(end, place + count)
        return sum(self._lengths) - read + stored, read - stored

    @contextmanager
    def saved(self, start: int, count: int) -> Iterator[None]:
        """See :class:`KVStore`. Inside, as much of the made-up sequences as fits is one prefix of all."""
        assert self.scratch is not None
        before, page = (self.paths, self.places), self.page
        own = -(-(page + self.scratch + 1) // page) * page
        length = min(self.total_slots - self.batch * own, start) // page * page
        places = [self.total_slots // page * page - (b + 1) * own for b in range(self.batch)]
        self.set([[Run(0, length, 0)] if length else []] * self.batch, places)
        written = [slice(run.place, run.place + run.stop - run.start)
                   for b in range(self.batch) for run in self.runs(b, start, start + count)]  # fmt: skip
        kept = [[part[..., slots, :].clone() for slots in written] for part in self._parts]
        try:
            yield
        finally:
            for part, copies in zip(self._parts, kept, strict=True):
                for slots, copy in zip(written, copies, strict=True):
                    part[..., slots, :] = copy
            self.set(*before)

    def in_pages(self, page: int) -> KVStore:
        """Raises ValueError: the first slots of a sequence belong to pages of others, too."""
        raise ValueError(f"slots of a common prefix have pages of {self.page}; make another store")


def _for_each(group: KVGroup, batch: int) -> KVGroup:
    """Returns a group's slots as those of each sequence, without a copy."""

    def seen(slots: Tensor) -> Tensor:
        return slots.expand(-1, batch, -1, -1, -1)

    scales = None if group.scales is None else (seen(group.scales[0]), seen(group.scales[1]))
    return replace(group, k=seen(group.k), v=seen(group.v), scales=scales)

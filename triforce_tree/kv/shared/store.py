"""KV slots of a batch whose sequences begin alike: those of common prefixes once, then each one's own."""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from weakref import WeakSet

import torch
from torch import Tensor

from triforce_tree.kernels.attention.nodes import PrefixPlan, PrefixSegment
from triforce_tree.kv.cached_tokens import CachedTokens
from triforce_tree.kv.shared.tree import PrefixTree, Run
from triforce_tree.kv.store import KVGroup, KVStore
from triforce_tree.models.attention import KVShape


class SharedStore(KVStore):
    """K and V of B sequences, several of which begin with the same tokens.

    The slots of each KV head are ``[prefixes | sequence 0 | sequence 1 | ...]``. Sequence b begins with P_b
    tokens in one or more runs of the prefixes' slots, and position r >= P_b is slot ``r - P_b`` of its own.
    Prefixes may change between batches, as far as they fit; kernels read them on the device.

    Args:
        layers: as for :class:`KVStore`; none has a window that hides anything.
        batch: B.
        capacity: slots of all prefixes, a multiple of ``page``.
        own: slots of a sequence after its prefixes, scratch slots included, rounded up to whole pages.
        rows: slots of the longest sequence, those of its prefixes included.
        page, scratch, bits: as for :class:`KVStore`.

    Attributes:
        groups: the sequences' own slots, ``[layers, B, H_kv, own, D]``.
        whole: all slots, ``[layers, 1, H_kv, capacity + B * own, D]`` and more to fill a page.
        paths: the runs of each sequence's prefixes, on the host.
        prefix: int64 ``[B]``, P_b on the device.
        pages: int32 ``[B, rows / page]``, the page in ``whole`` of each page of a sequence.
    """

    def __init__(
        self,
        layers: Sequence[KVShape | None],
        batch: int,
        capacity: int,
        own: int,
        rows: int,
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
        self.rows, self.scratch = -(-rows // page) * page, scratch
        self._most_tokens = self.rows - scratch
        self._lengths = [0] * batch
        self.whole = self.groups
        self.groups = [self._own_slots(group) for group in self.whole]
        self.prefix = torch.zeros(batch, dtype=torch.int64, device=device)
        self.pages = torch.zeros(batch, self.rows // page, dtype=torch.int32, device=device)
        self._plans: WeakSet[PrefixPlan] = WeakSet()
        self._tree = PrefixTree()
        self.paths: list[list[Run]] = []
        self._set([[] for _ in range(batch)])

    def _own_slots(self, group: KVGroup) -> KVGroup:
        def own(slots: Tensor) -> Tensor:
            after = slots[:, 0, :, self.capacity : self.capacity + self.batch * self.own]
            split: Tensor = after.unflatten(2, (self.batch, self.own))
            return split.transpose(1, 2)

        scales = None if group.scales is None else (own(group.scales[0]), own(group.scales[1]))
        return replace(group, k=own(group.k), v=own(group.v), scales=scales)

    def tell(self, plan: PrefixPlan) -> None:
        """Let a plan know the prefixes from now on, whenever they change."""
        self._plans.add(plan)
        plan.set(self.segments())

    def segments(self) -> list[PrefixSegment]:
        """What is read once: a run, for the sequences with it that follow each other."""
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

    def _set(self, paths: Sequence[Sequence[Run]]) -> None:
        """From now on sequence b begins with the positions of ``paths[b]``."""
        self.paths = [list(path) for path in paths]
        ends = [path[-1].stop if path else 0 for path in paths]
        self.prefix.copy_(torch.tensor(ends))
        page, rows = self.page, torch.empty(self.pages.shape, dtype=torch.int32)
        numbers = torch.arange(rows.shape[1], dtype=torch.int32)
        for b, (path, end) in enumerate(zip(paths, ends, strict=True)):
            first = (self.capacity + b * self.own) // page
            # Pages after the own slots are not read.
            rows[b] = (numbers + (first - end // page)).clamp_max(first + self.own // page - 1)
            for start, stop, place in path:
                part = slice(start // page, stop // page)
                rows[b, part] = numbers[part] + (place - start) // page
        self.pages.copy_(rows)
        segments = self.segments()
        for plan in self._plans:
            plan.set(segments)

    def share(self, tree: PrefixTree, cached: CachedTokens, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Before a prefill of prompts with other prefixes, forget what it overwrites.

        Args:
            tree: prefixes of these prompts, which fit.
            cached: which tokens the sequences hold.

        Returns:
            how many tokens of each sequence are those that it held before.

        Raises:
            ValueError: the prefixes do not fit.
        """
        if tree.size.slots > self.capacity:
            raise ValueError(
                f"common prefixes of {tree.size.slots} tokens exceed {self.capacity} KV slots; "
                "make another store"
            )
        self._tree, before = tree, self.paths
        after = [[node.run for node in tree.path(prompt)] for prompt in prompts]
        kept, whole = [], []
        for b, prompt in enumerate(prompts):
            # Of every sequence, what is where this one has it from now on.
            found = [
                min(cached.common(other, prompt, "chunks"), _same(before[other], after[b], other == b))
                for other in range(self.batch)
            ]
            end = after[b][-1].stop if after[b] else 0
            kept.append((max(found), found[b]))
            # Its own slots hold what they did, and so do all runs of prefixes that it has.
            whole.append(before[b] == after[b] and cached.common(b, prompt, "chunks") >= end)
        for b, (prompt, (most, _)) in enumerate(zip(prompts, kept, strict=True)):
            if not whole[b]:
                cached.copied(b, prompt, most)
        self._set(after)
        return [own for _, own in kept]

    def join(self, b: int, prompt: Sequence[int], cached: CachedTokens) -> None:
        """Before a prefill of another prompt into row b, while the others go on: use the prefixes it has."""
        path = [node.run for node in self._tree.path(prompt)]
        if path != self.paths[b]:
            cached.keep(b, _same(self.paths[b], path, own=False))
            self._set([path if row == b else other for row, other in enumerate(self.paths)])

    def take_prefix(self, source: KVStore, b: int, tokens: Sequence[int], cached: CachedTokens) -> None:
        """Begin with tokens that sequence b of another store holds, in whole chunks of a prefill.

        Args:
            tokens: of the sequence, from its beginning; those beyond the capacity are left out.
            cached: which tokens the sequences of this store hold; the first one gets these.
        """
        unit = math.lcm(self.page, cached.chunk)
        count = min(len(tokens), self.capacity) // unit * unit
        shared = isinstance(source, SharedStore)
        groups = source.whole if isinstance(source, SharedStore) else source.groups
        runs = source.runs(b, 0, count) if isinstance(source, SharedStore) else [Run(0, count, 0)]
        for group, other in zip(self.whole, groups, strict=True):
            for new, old in zip(group.parts, other.parts, strict=True):
                for start, stop, place in runs:
                    new[:, 0, :, start:stop] = old[:, 0 if shared else b, :, place : place + stop - start]
        self._set([[Run(0, count, 0)] if count else []] * self.batch)
        cached.copied(0, tokens, count)

    def fits(self, max_seq_len: int, tree: PrefixTree) -> bool:
        """Whether sequences of so many tokens fit, which have these prefixes."""
        assert self.scratch is not None
        own = max_seq_len - tree.size.saved + self.scratch
        return bool(tree) and tree.size.slots <= self.capacity and own <= self.own

    def runs(self, b: int, start: int, stop: int) -> list[Run]:
        """Where positions ``start`` to ``stop`` of a sequence are, in slots of ``whole``."""
        path = self.paths[b]
        end = path[-1].stop if path else 0
        found = []
        for run in [*path, Run(end, max(end, stop), self.capacity + b * self.own)]:
            first, last = max(run.start, start), min(run.stop, stop)
            if first < last:
                found.append(Run(first, last, run.place + first - run.start))
        return found

    def copy_within(self, source: int, b: int, start: int, stop: int) -> None:
        """See :class:`KVStore`; what both have in the same slots stays."""
        for run in self.runs(b, start, stop):
            for old in self.runs(source, run.start, run.stop):
                place, count = run.place + old.start - run.start, old.stop - old.start
                if place == old.place:
                    continue
                for part in (part for group in self.whole for part in group.parts):
                    part[:, 0, :, place : place + count] = part[:, 0, :, old.place : old.place + count]

    @property
    def bytes(self) -> int:
        """Of all keys and values, and their scales."""
        return sum(part.nbytes for group in self.whole for part in group.parts)

    @contextmanager
    def saved(self, start: int, count: int) -> Iterator[None]:
        """See :class:`KVStore`. Inside, as much as the capacity allows is one prefix of all."""
        before, length = self.paths, min(self.capacity, start // self.page * self.page)
        self._set([[Run(0, length, 0)] if length else []] * self.batch)
        try:
            with super().saved(start - length, count):
                yield
        finally:
            self._set(before)

    def in_pages(self, page: int) -> KVStore:
        """Not for these slots, whose first ones are those of another sequence's pages."""
        raise ValueError(f"slots of a common prefix have pages of {self.page}; make another store")


def _same(one: Sequence[Run], other: Sequence[Run], own: bool) -> int:
    """How many positions from 0 on two paths have in the same slots.

    ``own``: those after both paths are in the same slots, too.
    """
    position = 0
    while True:
        found = [next((r for r in path if r.start <= position < r.stop), None) for path in (one, other)]
        x, y = found
        if x is None or y is None or x.place - x.start != y.place - y.start:
            break
        position = min(x.stop, y.stop)
    ends = {path[-1].stop if path else 0 for path in (one, other)}
    return sys.maxsize if own and ends == {position} else position

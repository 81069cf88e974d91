"""KV slots of a batch whose sequences begin alike: those of common prefixes once, and each one's own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from triforce_tree.kernels.attention.segments import PrefixPlan, PrefixSegment
from triforce_tree.kv.cached_tokens import CachedTokens
from triforce_tree.kv.shared.tree import DEPTH, PrefixTree, Run
from triforce_tree.kv.store import KVGroup, KVStore
from triforce_tree.models.attention import KVShape
from triforce_tree.runtime.features import Features


class SlotLayout(NamedTuple):
    """What the slots of a batch are made for, however many there are.

    Attributes:
        layers: as for :class:`KVStore`; none has a window that hides anything.
        batch: B.
        rows: slots of the longest sequence, those of its prefixes included.
        device, dtype: as for :class:`KVStore`.
        page, scratch, bits: likewise; prefixes and own slots begin at whole pages.
    """

    layers: Sequence[KVShape | None]
    batch: int
    rows: int
    device: torch.device
    dtype: torch.dtype
    page: int
    scratch: int
    bits: int


class SharedStore(KVStore):
    """K and V of B sequences, several of which begin with the same tokens.

    Sequence b begins with P_b tokens in one or more runs of slots that others may read, too, and position
    r >= P_b is slot ``r - P_b`` of its own ones. Both may change between two passes, as far as they fit:
    kernels read where they are on the device.

    Args:
        layout: of the batch.
        slots: of each KV head, for all prefixes and sequences.
        depth: most runs that a sequence begins with.

    Attributes:
        groups: the slots as each sequence's: ``[layers, B, H_kv, slots, D]``, B times the same memory.
        whole: all slots, ``[layers, 1, H_kv, slots, D]`` and more to fill a page.
        slots: of a head.
        depth: as given.
        paths: these runs of each sequence, on the host.
        places: the first of each sequence's own slots, on the host.
        prefix, first: int64 ``[B]``, P_b and ``places`` on the device.
        pages: int32 ``[B, rows / page]``, the page in ``whole`` of each page of a sequence.
    """

    def __init__(self, layout: SlotLayout, slots: int, depth: int = DEPTH) -> None:
        layers, batch, rows, device, dtype, page, scratch, bits = layout
        full = [replace(shape, window=None, chunked=False) if shape is not None else None for shape in layers]
        super().__init__(full, 1, slots, device, dtype, page, bits=bits)
        self.slots, self.depth, self.batch = self.rows, depth, batch
        self.rows, self.scratch = -(-rows // page) * page, scratch
        self._most_tokens = self.rows - scratch
        self._lengths, self._lost = [0] * batch, [0] * batch
        self.whole = self.groups
        self.groups = [_for_each(group, batch) for group in self.whole]
        self.prefix, self.first = torch.zeros(2, batch, dtype=torch.int64, device=device)
        self.pages = torch.zeros(batch, self.rows // page, dtype=torch.int32, device=device)
        self._plans: WeakSet[PrefixPlan] = WeakSet()
        self.paths: list[list[Run]] = [[] for _ in range(batch)]
        self.places = [0] * batch

    def initialise(self, held: Sequence[int | None]) -> None:
        """See :class:`KVStore`; prefixes may be kept that no sequence holds."""
        super().initialise([None])

    @property
    def _memory_of(self) -> list[KVGroup]:
        return self.whole

    def share(
        self,
        tree: PrefixTree,
        cached: CachedTokens,
        prompts: Sequence[Sequence[int]],
        features: Features | None = None,
    ) -> list[int]:
        """Before a prefill of other prompts into all rows, forget what it overwrites.

        Args:
            tree: prefixes of these prompts, which fit.
            cached: which tokens the sequences hold.
            features: hidden states that a drafter reads.

        Returns:
            how many tokens of each sequence are those that it held before.

        Raises:
            ValueError: they do not fit.
        """
        raise NotImplementedError

    def join(
        self, b: int, prompt: Sequence[int], cached: CachedTokens, features: Features | None = None
    ) -> None:
        """Before a prefill of another prompt into row b, while the others go on: use the prefixes it has."""
        raise NotImplementedError

    def fits(self, max_seq_len: int, tree: PrefixTree) -> bool:
        """Whether sequences of so many tokens fit, which have these prefixes."""
        raise NotImplementedError

    def take_over(self, source: KVStore, b: int, kept: CachedTokens, cached: CachedTokens) -> None:
        """Take up what another store holds of the texts to come.

        Args:
            b: the sequence of the other store that holds most of the first prompt.
            kept, cached: which tokens the sequences of the other store, and of this one, hold.
        """
        raise NotImplementedError

    def keeps(self, prefix: PrefixTree) -> bool:
        """Whether a store for such prefixes may take over more than the beginning of the first prompt."""
        return False

    def forget(self) -> None:
        """Nothing of what the slots hold is to be found again."""

    def layout_of_trial(self, start: int) -> tuple[list[list[Run]], list[int]]:
        """Paths and places of made-up sequences of ``start`` tokens: as much as fits is one prefix of all."""
        raise NotImplementedError

    def tell(self, plan: PrefixPlan) -> None:
        """Let a plan know the prefixes from now on, whenever they change."""
        self._plans.add(plan)
        plan.set(self.segments(), self.places)

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

    def _set(self, paths: Sequence[Sequence[Run]], places: Sequence[int]) -> None:
        """From now on sequence b begins with the positions of ``paths[b]``, and goes on at ``places[b]``."""
        self.paths, self.places = [list(path) for path in paths], list(places)
        ends = [path[-1].stop if path else 0 for path in paths]
        self.prefix.copy_(torch.tensor(ends))
        self.first.copy_(torch.tensor(self.places))
        page, rows = self.page, torch.empty(self.pages.shape, dtype=torch.int32)
        numbers = torch.arange(rows.shape[1], dtype=torch.int32)
        for b, (path, end) in enumerate(zip(paths, ends, strict=True)):
            # Pages after the own slots are not read.
            rows[b] = (numbers + (places[b] - end) // page).clamp_max(self.slots // page - 1)
            for start, stop, place in path:
                part = slice(start // page, stop // page)
                rows[b, part] = numbers[part] + (place - start) // page
        self.pages.copy_(rows)
        segments = self.segments()
        for plan in self._plans:
            plan.set(segments, self.places)

    def runs(self, b: int, start: int, stop: int) -> list[Run]:
        """Where positions ``start`` to ``stop`` of a sequence are."""
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
        """All that is stored, ``[layers, 1, H_kv, slots, D]``."""
        return [part for group in self.whole for part in group.parts]

    def copy_within(self, source: int, b: int, start: int, stop: int) -> None:
        """See :class:`KVStore`; what both have in the same slots stays."""
        for run in self.runs(b, start, stop):
            for old in self.runs(source, run.start, run.stop):
                place, count = run.place + old.start - run.start, old.stop - old.start
                if place == old.place:
                    continue
                for part in self._parts:
                    part[:, 0, :, place : place + count] = part[:, 0, :, old.place : old.place + count]

    def copy_from(self, source: KVStore, b: int, start: int, stop: int, place: int) -> None:
        """Positions ``start`` to ``stop`` of sequence b of another store go to slots from ``place`` on."""
        shared = isinstance(source, SharedStore)
        groups = source.whole if isinstance(source, SharedStore) else source.groups
        runs = source.runs(b, start, stop) if isinstance(source, SharedStore) else [Run(start, stop, start)]
        for group, other in zip(self.whole, groups, strict=True):
            for new, old in zip(group.parts, other.parts, strict=True):
                for run in runs:
                    to, count = place + run.start - start, run.stop - run.start
                    read = old[:, 0 if shared else b, :, run.place : run.place + count]
                    new[:, 0, :, to : to + count] = read

    def tokens(self) -> tuple[int, int]:
        """See :class:`KVStore`."""
        runs = sorted((run.place, run.stop - run.start) for path in self.paths for run in path)
        read, stored, end = sum(count for _, count in runs), 0, 0
        # Runs of several rows overlap.
        for place, count in runs:
            stored += max(0, place + count - max(place, end))
            end = max(end, place + count)
        return sum(self._lengths) - read + stored, read - stored

    @property
    def bytes(self) -> int:
        """Of all keys and values, and their scales."""
        return sum(part.nbytes for part in self._parts)

    @contextmanager
    def saved(self, start: int, count: int) -> Iterator[None]:
        """See :class:`KVStore`. Inside, all sequences begin with one prefix: see :meth:`layout_of_trial`."""
        before = self.paths, self.places
        self._set(*self.layout_of_trial(start))
        written = [slice(run.place, run.place + run.stop - run.start)
                   for b in range(self.batch) for run in self.runs(b, start, start + count)]  # fmt: skip
        kept = [[part[..., slots, :].clone() for slots in written] for part in self._parts]
        try:
            yield
        finally:
            for part, copies in zip(self._parts, kept, strict=True):
                for slots, copy in zip(written, copies, strict=True):
                    part[..., slots, :] = copy
            self._set(*before)

    def in_pages(self, page: int) -> KVStore:
        """Not for these slots, whose first ones are those of another sequence's pages."""
        raise ValueError(f"slots of a common prefix have pages of {self.page}; make another store")


def _for_each(group: KVGroup, batch: int) -> KVGroup:
    """The slots of a group as those of each sequence, without a copy."""

    def seen(slots: Tensor) -> Tensor:
        return slots.expand(-1, batch, -1, -1, -1)

    scales = None if group.scales is None else (seen(group.scales[0]), seen(group.scales[1]))
    return replace(group, k=seen(group.k), v=seen(group.v), scales=scales)

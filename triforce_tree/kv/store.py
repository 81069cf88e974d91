"""Stores keys and values on the device: the KV slots of every layer, grouped by shape and window.

Slot r of a sequence holds position r. A layer with a window (``AttentionParams``) keeps no more slots than
forwards may still see, in a *ring*: position r is in slot ``r % ring``, and older positions are overwritten.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from triforce_tree.kernels import step
from triforce_tree.kernels.attention.backend import chosen
from triforce_tree.kernels.attention.plan import KV, AttentionParams
from triforce_tree.kernels.attention.prefill import capacity
from triforce_tree.kernels.step.kv_slots import dequantized
from triforce_tree.kv.window import ring_table
from triforce_tree.models.attention import KVShape

RING_PAGE = 128
"""Slots of a page of a ring, and what its size is rounded up to: a whole number of any kernel's tiles."""

# Groups begin at multiples of so many elements: copies are fastest at aligned addresses.
_ALIGN = 128


@dataclass(frozen=True)
class KVGroup:
    """Holds the KV slots of layers with equal heads and window.

    Attributes:
        layers: their indices in the model.
        shape: heads; and the window, None where it hides nothing of any sequence that fits.
        k, v: ``[layers, B, H_kv, S, D]`` and ``[layers, B, H_kv, S, D_v]``.
        scales: of k and of v in int8, fp32 ``[layers, B, H_kv, S, 1]``; None in other dtypes.
        page: slots of the unit that tables refer to.
        ring: S where the slots are a ring, else 0.
        table: int32 ``[B, pages]`` of a ring: the page of each run of positions. It never changes.
    """

    layers: tuple[int, ...]
    shape: KVShape
    k: Tensor
    v: Tensor
    page: int
    ring: int
    table: Tensor | None
    scales: tuple[Tensor, Tensor] | None = None

    @property
    def slots(self) -> int:
        """Returns S, the KV slots of a sequence."""
        return self.k.shape[3]

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Returns all stored tensors: ``k``, ``v`` and their scales, if there are any."""
        return (self.k, self.v, *(self.scales or ()))

    @property
    def pages_apart(self) -> int:
        """Returns the pages between sequences: page p of sequence b is ``b * pages_apart + p``."""
        return self.shape.heads.kv * (self.slots // self.page)

    def paged(self, place: int, table: Tensor | None = None) -> KV:
        """Returns K and V of the group's layer ``place`` as pages ``[pages, H_kv, page, D]``, uncopied.

        Args:
            table: the pages of each sequence.
        """
        k, v, *scales = (self._pages(part[place]) for part in self.parts)
        return KV(k, v, table, (scales[0], scales[1]) if scales else None)

    def _pages(self, slots: Tensor) -> Tensor:
        (batch, heads, _, dim), page = slots.shape, self.page
        count = (batch - 1) * self.pages_apart + self.slots // page
        strides = (page * dim, self.slots * dim, dim, 1)
        return slots.as_strided((count, heads, page, dim), strides, slots.storage_offset())

    def slots_of(self, positions: range) -> slice | Tensor:
        """Returns the slots that hold a range of positions."""
        if not self.ring:
            return slice(positions.start, positions.stop)
        return torch.arange(positions.start, positions.stop, device=self.k.device) % self.ring

    def runs(self, start: int, stop: int) -> list[tuple[slice, slice]]:
        """Returns contiguous runs of the slots of positions ``start`` to ``stop``, at most S of them.

        Each comes with its positions, counted from ``start``.
        """
        found: list[tuple[slice, slice]] = []
        while start < stop:
            slot = start % self.ring if self.ring else start
            count = min(stop - start, self.slots - slot)
            done = found[-1][1].stop if found else 0
            found.append((slice(slot, slot + count), slice(done, done + count)))
            start += count
        return found


class LayerSlots:
    """The KV slots of one layer.

    Args:
        group: the group of the layer, and ``number`` its index in the store.
        place: the layer's index in the group.
        most_tokens: most committed tokens of a sequence.

    Attributes:
        layer: its index in the model.
        kv: ``[B, H_kv, S, D]`` and ``[B, H_kv, S, D_v]``.
        scales: of both, fp32 ``[B, H_kv, S, 1]``; None where they have none.
        parts: all of these tensors.
    """

    def __init__(self, group: KVGroup, number: int, place: int, most_tokens: int) -> None:
        self.group, self.number, self.place = group, number, place
        self.layer, self.window, self.ring = group.layers[place], group.shape.window, group.ring
        self.parts = k, v, *scales = tuple(part[place] for part in group.parts)
        self.kv, self.scales = (k, v), (scales[0], scales[1]) if scales else None
        self._most_tokens = most_tokens

    def stored(self) -> KV:
        """Returns the keys and values of all sequences as attention reads them."""
        if self.ring:
            return self.group.paged(self.place, self.group.table)
        return KV(*self.kv, scales=self.scales)

    def checked(self, params: AttentionParams) -> AttentionParams:
        """Returns how the layer attends: without a window that hides no position of any sequence.

        Raises:
            RuntimeError: the KV slots were made for another window.
        """
        if params.window == self.window:
            return params
        if self.window is None and params.window is not None and params.window >= self._most_tokens:
            return replace(params, window=None, chunked=False)
        raise RuntimeError(
            f"layer {self.layer} attends within a window of {params.window} positions, but its KV slots are "
            f"for a window of {self.window}"
        )


class KVStore:
    """Stores K and V of B sequences.

    Args:
        layers: what each layer keeps; None for a layer whose keys and values are elsewhere.
        batch: B.
        slots: KV slots of a sequence, rounded up to whole pages.
        page: slots of the unit that tables refer to, in layers without a window.
        scratch: most slots after the committed ones that forwards write. With it, layers with a window become
            rings where that takes less memory; None keeps every position of every layer.
        min_elements: least elements of ``memory``; the groups lie at its front.
        beside: a store of as many slots of the same layers, whose memory this one uses as well; by default
            new memory is allocated.
        bits: of each key's and value's elements: 16 stores them in ``dtype``, and 8 in int8 with a scale for
            each vector (``kernels/step/kv_slots.quantized``).

    Attributes:
        groups: by their first layers.
        layers: the slots of each layer, by its index in the model.
        dtype: of new keys and values, and of queries.
        slots: KV slots of a sequence in layers without a window.
        index_layers: the number of layers, if indexers' keys are stored, else None: the keys of layer i's
            indexer are those of ``layers[index_layers + i]`` (``HFModel.kv_layers``).
        attention: the backend of views that are made from now on, by default the device's.
        writable: int32 ``[B, slots / page]``, the page that each run of positions is written to, or -1; None
            where slot r of a sequence holds position r.
    """

    writable: Tensor | None = None
    _initialised: bool

    def __init__(
        self,
        layers: Sequence[KVShape | None],
        batch: int,
        slots: int,
        device: torch.device,
        dtype: torch.dtype,
        page: int = 64,
        scratch: int | None = None,
        min_elements: int = 0,
        bits: int = 16,
        beside: "KVStore | None" = None,
    ) -> None:
        self.bits = bits
        self.batch, self.page, self.scratch = batch, page, scratch
        self.slots = -(-slots // page) * page
        self.device, self.dtype, self.attention = device, dtype, chosen("auto", device)
        # Most committed tokens: later slots are scratch.
        self._most_tokens = slots - (scratch or 0)
        keeps = any(shape is not None and shape.index for shape in layers)
        self.index_layers = len(layers) // 2 if keeps else None
        members: dict[KVShape, list[int]] = {}
        for index, shape in enumerate(layers):
            if shape is not None:
                if shape.window is not None and shape.window >= self._most_tokens:
                    shape = replace(shape, window=None, chunked=False)
                members.setdefault(shape, []).append(index)
        rings = [self._ring(shape) for shape in members]
        sizes = [
            (len(indices), batch, shape.heads.kv, ring or self.slots, dim)
            for (shape, indices), ring in zip(members.items(), rings, strict=True)
            for dim in (shape.heads.dim, shape.heads.value_dim)
        ]
        parts, end = [], 0
        for size in sizes:
            start = -(-end // _ALIGN) * _ALIGN
            end = start + math.prod(size)
            parts.append(slice(start, end))
        stored = torch.int8 if bits == 8 else dtype
        if beside is None:
            self.memory = torch.empty(max(min_elements, end), device=device, dtype=stored)
        else:
            self.memory = beside.memory
        self.groups: list[KVGroup] = []
        views = iter(self.memory[part].view(size) for part, size in zip(parts, sizes, strict=True))
        for (shape, indices), ring in zip(members.items(), rings, strict=True):
            where = batch, shape.heads.kv, ring // RING_PAGE, -(-self.slots // RING_PAGE)
            table = ring_table(*where, device) if ring else None
            unit = RING_PAGE if ring else page
            k, v = next(views), next(views)
            scales = None
            if beside is not None:
                scales = beside._memory_of[len(self.groups)].scales
            elif bits == 8:
                first, second = torch.empty(2, *k.shape[:-1], 1, device=device, dtype=torch.float32)
                scales = first, second
            self.groups.append(KVGroup(tuple(indices), shape, k, v, unit, ring, table, scales))
        self._set_layers()
        self._begin_empty(batch)
        self._initialised = beside is not None and beside._initialised

    def _begin_empty(self, batch: int) -> None:
        """Sets the lengths of ``batch`` sequences to zero, and forgets which positions were written."""
        self._lengths = [0] * batch
        # For each sequence and group: the positions before this one were lost when another store, a copy or a
        # file was read.
        self._lost = [[0] * len(self.groups) for _ in range(batch)]
        # The end of the positions that were written, those of scratch slots included.
        self._written = [0] * batch

    def _set_layers(self) -> None:
        self.layers = {
            layer: LayerSlots(group, number, place, self._most_tokens)
            for number, group in enumerate(self.groups)
            for place, layer in enumerate(group.layers)
        }

    def initialise(self, held: Sequence[int | None]) -> None:
        """Writes a finite value to every slot that may never have been written, at the first call only.

        Passes over made-up sequences read all slots, and a CPU would read pages that were never written
        many times faster than others.

        Args:
            held: for each sequence, how many of its first slots are kept as they are; None keeps every
                finite value.
        """
        if self._initialised:
            return
        self._initialised = True
        for part in (part for group in self._memory_of for part in group.parts):
            for b, count in enumerate(held):
                if count is not None:
                    part[:, b, :, min(count, part.shape[3]) :].zero_()
                elif part.is_floating_point():
                    part[:, b].nan_to_num_(0.0, 0.0, 0.0)
                else:
                    part[:, b].bitwise_or_(0)

    @property
    def _memory_of(self) -> list[KVGroup]:
        """Returns groups that have each slot once."""
        return self.groups

    def _ring(self, shape: KVShape) -> int:
        """Returns the slots of a ring; 0 if a ring would save no memory."""
        if shape.window is None or self.scratch is None:
            return 0
        ring = -(-(shape.window + self.scratch) // RING_PAGE) * RING_PAGE
        return ring if ring < self.slots else 0

    def serves(self, batch: int, positions: int, scratch: int, page: int, bits: int) -> bool:
        """Returns whether a cache of so many positions per sequence, with tables of such pages, fits into the
        store.
        """
        enough = self.batch == batch and self.slots >= positions and self.slots % page == 0
        return enough and self.bits == bits and (self.scratch is None or self.scratch >= scratch)

    def take(self, source: "KVStore", sequence: int, length: int) -> bool:
        """Copies the first ``length`` positions of a sequence from a store of the same layers and bits.

        Returns:
            whether ``source`` still had all that the next token needs; otherwise nothing was copied.
        """
        if not source.continues(sequence, length):
            return False
        lost = [0] * len(self.groups)
        for number, group in enumerate(self.groups):
            for place, layer in enumerate(group.layers):
                other, index = source.layers[layer].group, source.layers[layer].place
                # All that passes have not overwritten: the text may be continued a little earlier, too.
                rings = [(group, self), (other, source)]
                kept = [own.ring - (store.scratch or 0) for own, store in rings if own.ring]
                positions = range(max(0, length - min(kept, default=length)), length)
                missing = next(
                    n for g, n in zip(source.groups, source._lost[sequence], strict=True) if g is other
                )
                lost[number] = max(lost[number], positions.start, missing)
                for old, new in zip(other.parts, group.parts, strict=True):
                    own, theirs = new[place, sequence], old[index, sequence]
                    own[:, group.slots_of(positions)] = theirs[:, other.slots_of(positions)]
        self.fed(sequence, length)
        self._lost[sequence] = lost
        return True

    @contextmanager
    def saved(self, start: int, count: int) -> Iterator[None]:
        """Restores the slots of ``count`` positions from ``start`` on at the end of the context."""
        written = [
            (slots, group.slots_of(range(start, start + min(count, group.slots))))
            for group in self.groups
            for slots in group.parts
        ]
        before = [slots[..., places, :].clone() for slots, places in written]
        try:
            yield
        finally:
            for (slots, places), old in zip(written, before, strict=True):
                slots[..., places, :] = old

    def in_pages(self, page: int) -> "KVStore":
        """Returns a store on the same memory whose tables have another page size, in layers without a window.

        Their slots must be a whole number of such pages.
        """
        other = copy.copy(self)
        other.page = page
        other.groups = [g if g.ring else replace(g, page=page) for g in self.groups]
        other._set_layers()
        return other

    def without_first(self, slots: int) -> "KVStore":
        """Returns a store on the same memory without the first ``slots`` of each layer; not for rings or 8
        bits.
        """
        other = copy.copy(self)
        other.groups = [replace(g, k=g.k[..., slots:, :], v=g.v[..., slots:, :]) for g in self.groups]
        other.slots = self.slots - slots
        other._set_layers()
        return other

    @property
    def kv(self) -> tuple[Tensor, Tensor]:
        """Returns K and V, as in ``KVGroup``, of a store whose layers are all alike."""
        [group] = self.groups
        return group.k, group.v

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all keys and values, and of their scales."""
        return sum(part.nbytes for group in self._memory_of for part in group.parts)

    def append(self, layer: int, b: int, start: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the next keys and values of one sequence, and returns all that its new tokens may see.

        Args:
            start: position of the first of them.
            k, v: ``[1, H_kv, T, D]`` and ``[1, H_kv, T, D_v]``.

        Returns:
            ``[1, H_kv, S, D]`` and ``[1, H_kv, S, D_v]`` of the last S positions, the new ones included, as
            they are stored: in 8 bits the text must not depend on the size of chunks.
        """
        own = self.layers[layer]
        group, count = own.group, k.shape[2]
        stop = start + count
        cached = [part[b : b + 1] for part in own.parts]
        fresh = (k, v) if own.scales is None else in_int8(k, v)
        if group.ring:
            assert group.shape.window is not None
            # Read the window's slots before the chunk overwrites them; of a long chunk only its end is kept.
            older = group.runs(max(0, start - group.shape.window + 1), start)
            seen = [
                torch.cat([*(old[:, :, slots] for slots, _ in older), new], 2)
                for old, new in zip(cached, fresh, strict=True)
            ]
            kept = min(count, group.ring)
            for old, new in zip(cached, fresh, strict=True):
                for slots, tokens in group.runs(stop - kept, stop):
                    old[:, :, slots] = new[:, :, count - kept :][:, :, tokens]
        else:
            for old, new in zip(cached, fresh, strict=True):
                old[:, :, start:stop] = new
            # Later slots are dequantised for their memory only.
            most = capacity(stop) if own.scales is not None and k.is_cuda else stop
            seen = [old[:, :, :most] for old in cached]
        keys, values = seen if own.scales is None else dequantised(seen, k.dtype)
        return keys[:, :, :stop], values[:, :, :stop]

    def positions(self, b: int, start: int, stop: int) -> list[Tensor]:
        """Returns the slots of positions ``start`` to ``stop`` of a sequence, ``[H_kv, n, D]`` of each part
        of each layer that keeps all positions.
        """
        whole = (group for group in self.groups if not group.ring)
        return [layer[b, :, start:stop] for group in whole for part in group.parts for layer in part]

    def set_positions(self, b: int, start: int, parts: Sequence[Tensor]) -> None:
        """Stores what :meth:`positions` gave, from position ``start`` of a sequence on."""
        stop = start + (parts[0].shape[1] if parts else 0)
        for own, part in zip(self.positions(b, start, stop), parts, strict=True):
            own.copy_(part, non_blocking=True)

    def move(self, index: Tensor, start: Tensor) -> None:
        """Moves slot ``start[b] + index[b, i]`` to ``start[b] + i`` in all layers; -1 moves nothing."""
        table = (self.writable, self.page)
        for group in self.groups:
            step.move_kv(group.k, group.v, index, start, group.ring, *table)
            if group.scales is not None:
                step.move_kv(*group.scales, index, start, group.ring, *table)

    def fed(self, sequence: int, length: int, start: int = 0) -> None:
        """Records that a sequence was prefilled from ``start`` up to ``length`` tokens."""
        self._lengths[sequence] = length
        self._written[sequence] = max(self._written[sequence] if start else 0, length)
        if not start:
            self._lost[sequence] = [0] * len(self.groups)

    def restored(self, sequence: int, length: int) -> None:
        """Records that a sequence was stored up to ``length`` tokens, in rings what the next one needs."""
        self._lengths[sequence] = self._written[sequence] = length
        self._lost[sequence] = [_last(group, length).start if group.ring else 0 for group in self.groups]

    def window(self, sequence: int, length: int) -> list[Tensor]:
        """Returns what the rings of a sequence with ``length`` tokens keep for the next one: copies of
        ``[layers, H_kv, n, D]`` of their last n positions.
        """
        return [
            part[:, sequence][:, :, group.slots_of(_last(group, length))]
            for group in self.groups
            if group.ring
            for part in group.parts
        ]

    def set_window(self, sequence: int, length: int, parts: Sequence[Tensor]) -> None:
        """Stores what :meth:`window` gave for ``length`` tokens, maybe of another store of these layers."""
        given = iter(parts)
        self.restored(sequence, length)
        for group in self.groups:
            if group.ring:
                slots = group.slots_of(_last(group, length))
                for part in group.parts:
                    part[:, sequence][:, :, slots] = next(given).to(part.device, non_blocking=True)

    def grown(self, counts: Sequence[int]) -> None:
        """Records how many tokens were appended to each sequence."""
        # The lists are changed in place, because all stores that share the memory share them.
        scratch, before = self.scratch or 0, self._lengths
        self._written[:] = [max(w, length + scratch) for w, length in zip(self._written, before, strict=True)]
        self._lengths[:] = [length + count for length, count in zip(before, counts, strict=True)]

    def tokens(self) -> tuple[int, int]:
        """Returns the tokens that are stored, and how many more the sequences have since they share slots."""
        return sum(self._lengths), 0

    def holds(self, lengths: Sequence[int]) -> bool:
        """Returns whether decoding can continue from these lengths, which do not exceed what was written."""
        return all(self.continues(b, length) for b, length in enumerate(lengths))

    def continues(self, sequence: int, length: int) -> bool:
        """Returns whether a sequence can be continued from its first ``length`` tokens, which were written.

        A ring keeps the slots that the last position sees, but not those that much earlier ones do.
        """
        for group, lost in zip(self.groups, self._lost[sequence], strict=True):
            needed = max(0, length - (group.shape.window or 0))
            if (lost and needed < lost) or (group.ring and needed < self._written[sequence] - group.ring):
                return False
        return True


def _last(group: KVGroup, length: int) -> range:
    """Returns which of the first ``length`` tokens a layer with a window keeps for later ones."""
    assert group.shape.window is not None
    return range(max(0, length - group.shape.window), length)


def in_int8(k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Returns keys and values ``[1, H_kv, T, D]`` in int8, then their scales ``[1, H_kv, T, 1]``."""
    stored = [torch.empty(t.shape, dtype=torch.int8, device=t.device) for t in (k, v)]
    scales = torch.empty(2, *k.shape[:3], 1, dtype=torch.float32, device=k.device)
    # The operator is the same with which decoding stores keys and values, so that both round alike.
    start = torch.zeros(k.shape[0], dtype=torch.int64, device=k.device)
    step.append_kv(stored[0], stored[1], k, v, start, 0, scales[0], scales[1])
    return (*stored, *scales)


def dequantised(parts: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns keys and values in ``dtype`` of keys, values and their scales in 8 bits."""
    k, v, k_scales, v_scales = parts
    return dequantized(k, k_scales, dtype), dequantized(v, v_scales, dtype)

"""The full cache of a cycle whose settled rows live in host memory.

    rows of a text:    0 ............. base ...... length (the root) ... tail
                       host store      window, on the device

Level 2 attends to the host store piece by piece, in a fixed order and whatever is resident, then to the
window, and merges by log-sum-exp; meanwhile the CPU may attend to a share of the rows where they are. New
rows stay in the window until they are settled and old enough to leave it; then they go to the host, off the
critical path.

All this is of layers without a window. Layers with one keep it in a ring on the device (``kv/store.py``).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from triforce_tree.kernels.attention.plan import Heads
from triforce_tree.kv.offload.host_attention import HostAttention, check_host_attention
from triforce_tree.kv.offload.host_store import HostStore, Offload
from triforce_tree.kv.offload.layerwise_prefill import HostStates, ReservedStates, fill_by_layers
from triforce_tree.kv.prefill import SequenceRows
from triforce_tree.kv.store import KVStore
from triforce_tree.models.attention import KVShape
from triforce_tree.models.hf_model import HFModel
from triforce_tree.runtime.stats import Progress

LEAVING = 128
"""Rows that leave the window together, rounded up to whole units."""


class OffloadedCache:
    """Rows of B texts: settled ones in a :class:`HostStore`, the newest in a window on the device.

    Args:
        model: the target.
        batch: texts.
        max_seq_len: most rows of one.
        recent: rows before the root that always stay in the window.
        scratch_slots: rows that passes may write behind the settled ones.
        slots: rows of copies that level 1 keeps in front of the window, in the same memory.
        chunk: rows that level 1's copies consist of, and whose key means are kept; 0 without a level 1.
        settings: how the rows are split.
        progress: called with bytes of host memory as they are taken.

    Attributes:
        places: of each layer of the model, which layer of the host store it is; None for one with a window.
        rings: keys and values of the layers with a window.
        store: slots and window of the others ``[layers, 2, B, H_kv, slots + W, D]``; level 1's memory.
        window: the same without the slots.
        base: int64 ``[B]``, rows of each text that are in the host store.
        means: ``[layers, B, H_kv, C, D]``, of the keys of each chunk before ``base``; None without chunks.
        settings: as given; the CPU's shares may be changed between two passes.
        attention: of the CPU; None where the settings leave it no rows.

    Raises:
        ValueError: layers without a window have different heads, or the CPU is to attend for a model that it
            cannot attend for.
        HostMemoryError: host memory is short.
    """

    def __init__(
        self,
        model: HFModel,
        batch: int,
        max_seq_len: int,
        recent: int,
        scratch_slots: int,
        slots: int,
        chunk: int,
        settings: Offload,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.model, self.recent, self.chunk, self.closed = model, recent, chunk, False
        device, dtype = model.device, model.dtype
        heads = one_shape(model)
        whole, windowed = _kept_elsewhere(model.kv_shapes)
        held = [layer for layer, shape in enumerate(whole) if shape is not None]
        self.places = [held.index(layer) if layer in held else None for layer in range(len(whole))]
        layers = len(held)
        self.rings = KVStore(
            windowed, batch, max_seq_len + scratch_slots, device, dtype, scratch=scratch_slots
        )
        self.settings = settings
        self.attention: HostAttention | None = None
        if settings.host_share or settings.plain_host_share:
            check_host_attention(model)
            self.attention = HostAttention(heads, device, dtype, layers * batch)
        self.host = HostStore(
            layers, batch, heads, max_seq_len, device, dtype, max(1, chunk), settings, progress
        )
        self.leaving = -(-LEAVING // self.host.unit) * self.host.unit
        self.slots, self.scratch_slots = slots, scratch_slots
        # While a prompt is fed nothing of this is needed: it holds one layer's rows then, or hidden states.
        least = 0 if self.host.last_resident or not layers else self.host.rows * 2 * heads.kv * heads.dim
        rows = slots + recent + self.leaving + scratch_slots
        self.store = KVStore(whole, batch, rows, device, dtype, least=least)
        self.window = self.store.scratch_slots(slots)
        self.base = torch.zeros(batch, dtype=torch.int64, device=device)
        self.lengths = [0] * batch
        self.means: Tensor | None = None
        if chunk:
            count = self.host.rows // chunk
            self.means = torch.zeros(layers, batch, heads.kv, count, heads.dim, device=device, dtype=dtype)

    def share(self, queries: int) -> float:
        """Of the rows in host memory, what the CPU attends to in a pass of so many rows a text."""
        return self.settings.share(queries) if self.attention is not None else 0.0

    def prefill(self, prompts: Sequence[Sequence[int]], chunk: int, progress: Progress | None = None) -> None:
        """Compute the rows of all but the last token of each prompt."""
        self.host.ring.forget()
        fillings = []
        for b, prompt in enumerate(prompts):
            tokens = list(prompt[:-1])
            self.rings.fed(b, len(tokens))
            self.lengths[b] = len(tokens)
            self.host.base[b] = self._base_of(len(tokens))
            fillings.append(OffloadedPrefill(self, b))
            self._fill(tokens, chunk, fillings[-1], progress)
            # The last layer's rows have left the memory that the next one, or the window, is written to.
            self.host.out.join()
        for filling in fillings:
            filling.commit()
        self._publish()

    def _fill(
        self, tokens: list[int], chunk: int, filling: "OffloadedPrefill", progress: Progress | None
    ) -> None:
        hidden = len(tokens) * self.model.model.config.get_text_config(decoder=True).hidden_size
        if self.host.last_resident and hidden <= self.store.memory.numel():
            reserved = ReservedStates(self.store.memory, chunk)
            fill_by_layers(self.model, tokens, chunk, filling, progress, reserved)
            return
        if not self.settings.states_on_host:
            fill_by_layers(self.model, tokens, chunk, filling, progress)
            return
        states = HostStates(len(tokens), chunk, self.host.device)
        try:
            fill_by_layers(self.model, tokens, chunk, filling, progress, states)
        finally:
            states.close()

    def _base_of(self, length: int) -> int:
        """Where the window begins behind a text that has just been fed."""
        unit = self.host.unit
        return max(0, length - self.recent) // unit * unit

    def _publish(self) -> None:
        """Let device and ring know what stands where; no choice reads a row before it has arrived."""
        self.host.out.join()
        self.base.copy_(torch.tensor(self.host.base))
        self.host.prefetch()

    def committed(self, counts: Sequence[int]) -> None:
        """Texts have grown by so many rows; whole blocks that are no longer recent leave the window."""
        moved = False
        for b, count in enumerate(counts):
            self.lengths[b] += count
            while self.lengths[b] - self.host.base[b] >= self.recent + self.leaving:
                self._leave(b, self.leaving)
                moved = True
        if moved:
            self._publish()
        else:
            self.host.prefetch()

    def _leave(self, b: int, count: int) -> None:
        """The window's first ``count`` rows go to the host, the others move up."""
        base = self.host.base[b]
        left = self.lengths[b] - base - count
        for layer in range(self.host.layers):
            kv = self.window.kv[:, :, b]
            gone = kv[layer, :, :, :count].permute(2, 0, 1, 3).contiguous()
            self.host.write(layer, b, base, gone)
            self.average(layer, b, base, gone)
            kv[layer, :, :, :left] = kv[layer, :, :, count : count + left].clone()
        self.host.base[b] = base + count

    def average(self, layer: int, b: int, start: int, rows: Tensor) -> None:
        """Key means of the chunks in ``rows`` ``[n, 2, H_kv, D]``, which begin at row ``start``."""
        if self.means is not None and rows.shape[0]:
            keys = rows[:, 0].unflatten(0, (-1, self.chunk)).mean(1, dtype=torch.float32)
            first = start // self.chunk
            self.means[layer, b, :, first : first + keys.shape[0]] = keys.transpose(0, 1).to(rows.dtype)

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Stand behind beginnings of the texts whose rows are here, as right after feeding them.

        Raises:
            ValueError: a text has fewer rows here.
        """
        for b, length in enumerate(lengths):
            if length > self.lengths[b]:
                raise ValueError(
                    f"text {b} has {self.lengths[b]} rows in the cache, not {length}; feed it first"
                )
            base, old = self._base_of(length), self.host.base[b]
            self.lengths[b] = length
            if base > old:
                self._leave(b, base - old)
            elif base < old:
                kept = max(0, length - old)
                for layer in range(self.host.layers):
                    kv = self.window.kv[layer, :, b]
                    newest = kv[:, :, :kept].clone()
                    back = self.host.read(layer, b, base, min(length, old)).permute(1, 2, 0, 3)
                    kv[:, :, : back.shape[2]] = back
                    kv[:, :, back.shape[2] : back.shape[2] + kept] = newest
                self.host.base[b] = base
        self._publish()

    @contextmanager
    def trial(self, length: int) -> Iterator[None]:
        """Inside, texts of ``length`` rows may be run at, without harm to rows that are here.

        What the runs write lands at the window's end. The host store shows what is resident and one piece
        more, so that every kernel of a pass runs and little is streamed.
        """
        base, host = self.base.clone(), self.host.base
        self.base.fill_(max(0, length - (self.window.rows - self.scratch_slots)))
        shown = min(self.host.resident_rows, default=0) + self.host.piece
        self.host.base = [min(shown, self.host.rows)] * len(host)
        self.host.ring.forget()
        try:
            yield
        finally:
            self.base.copy_(base)
            self.host.base = host
            self.host.ring.forget()

    def close(self) -> None:
        """Give the memory back: at once on the host, with the last reference on the device."""
        self.closed = True
        if self.attention is not None:
            self.attention.close()
        self.host.close()


class OffloadedPrefill:
    """Where the rows of one text's prefill go, layer by layer; see ``layerwise.Sink``.

    A layer's rows stand in the memory of slots and window, so those that belong into the window wait aside;
    or, where the last layer is resident, in its memory, so that its own rows are computed in their place.
    """

    def __init__(self, cache: OffloadedCache, b: int) -> None:
        self.cache, self.b = cache, b
        heads, newest = cache.host.heads, cache.lengths[b] - cache.host.base[b]
        shape = (cache.host.layers, 2, heads.kv, newest, heads.dim)
        self._aside = torch.empty(shape, device=cache.host.device, dtype=cache.model.dtype)

    @property
    def places(self) -> list[int | None]:
        """See ``OffloadedCache``."""
        return self.cache.places

    def windowed(self) -> SequenceRows:
        """Where layers with a window keep theirs."""
        return SequenceRows(self.cache.rings, self.b)

    def buffer(self, rows: int) -> Tensor:
        """Room for one layer's rows ``[rows, 2, H_kv, D]``."""
        if self.cache.host.last_resident:
            return self.cache.host.near[-1][self.b][:rows]
        heads = self.cache.host.heads
        size = rows * 2 * heads.kv * heads.dim
        return self.cache.store.memory[:size].view(rows, 2, heads.kv, heads.dim)

    def part(self, layer: int, start: int, rows: Tensor) -> Callable[[], None]:
        """Rows from ``start`` on are computed; what comes back must be called before they are overwritten."""
        count = max(0, min(self.cache.host.base[self.b] - start, rows.shape[0]))
        return self.cache.host.write(layer, self.b, start, rows[:count]).wait

    def whole(self, layer: int, rows: Tensor) -> None:
        """All rows of a layer are computed."""
        base = self.cache.host.base[self.b]
        self.cache.average(layer, self.b, 0, rows[:base])
        self._aside[layer] = rows[base:].permute(1, 2, 0, 3)

    def commit(self) -> None:
        """Put the newest rows into the window."""
        if self.cache.host.layers:
            self.cache.window.kv[:, :, self.b, :, : self._aside.shape[3]] = self._aside


def _kept_elsewhere(shapes: Sequence[KVShape]) -> tuple[list[KVShape | None], list[KVShape | None]]:
    """The layers without a window, and those with one, each with None in the place of the others."""
    whole = [None if shape.window is not None else shape for shape in shapes]
    return whole, [shape if shape.window is not None else None for shape in shapes]


def one_shape(model: HFModel) -> Heads:
    """Heads of the layers without a window; of any layer where all have one.

    Raises:
        ValueError: they differ.
    """
    found = list(dict.fromkeys(s.heads for s in model.kv_shapes if s.window is None)) or [model.heads]
    if len(found) > 1:
        shapes = " and ".join(f"{heads.kv} x {heads.dim}" for heads in found)
        raise ValueError(
            f"the layers of {model.name} have keys of {shapes} numbers, but those of an offloaded cache need "
            "one shape; keep the cache on the device (leave offload out)"
        )
    return found[0]

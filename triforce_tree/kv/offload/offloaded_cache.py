"""The full cache of a decoding program whose committed keys and values are in host memory.

    tokens of a sequence:    0 ............. base ...... length (the root) ... tail
                             host store      device window

The target attends to the host store piece by piece, in a fixed order wherever pieces are, then to the window,
and merges by log-sum-exp; meanwhile the CPU may attend to a share of the slots in host memory. New keys and
values stay in the window until they are committed and no longer recent; then they are copied to the host,
beside the computation.

All this concerns layers without a window. Layers with one keep it in a ring on the device (``kv/store.py``),
recurrent layers their states (``kv/recurrent_states.py``).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from triforce_tree.kernels.attention.plan import Heads
from triforce_tree.kernels.step.kv_slots import key_moments
from triforce_tree.kv.backend import CacheSpec
from triforce_tree.kv.offload.host_attention import HostAttention, check_host_attention
from triforce_tree.kv.offload.host_store import HostStore, Offload, eviction_block, window_slots
from triforce_tree.kv.store import KVStore
from triforce_tree.models.hf_model import HFModel


class OffloadedCache:
    """Keeps the keys and values of B sequences; older ones are in a :class:`HostStore`, recent ones on the
    device.

    Args:
        spec: what the slots are needed for.
        settings: how the cache is split.
        progress: called with bytes of host memory as they are allocated.

    Attributes:
        model: the target.
        recent: tokens before the root that always stay in the window.
        slots: KV slots for gathered chunks, in front of the window in the same memory.
        chunk: tokens of a chunk of the retrieval, whose mean keys are kept; 0 without a retrieval.
        host_layers: for each layer of the model, its layer of the host store; None for a layer with a window
            or without attention.
        rings: keys and values of the layers with a window.
        store: gathered chunks and window of the others, slots + W KV slots, which the retrieval model attends
            to.
        window: the same without the gathered chunks.
        base: int64 ``[B]``, tokens of each sequence that are in the host store.
        means: ``[layers, B, H_kv, C, columns]``, what is kept of the keys of each chunk before ``base``; None
            without chunks.
        settings: as given; the CPU's shares may be changed between two passes.
        attention: the attention on the CPU; None where the settings give it no share.

    Raises:
        ValueError: layers without a window have different heads, or the settings give the CPU a share and it
            cannot attend for this model.
        HostMemoryError: host memory is short.
    """

    def __init__(
        self, spec: CacheSpec, settings: Offload, progress: Callable[[int], None] | None = None
    ) -> None:
        self.model = model = spec.target
        batch, max_seq_len, self.scratch_slots = spec.batch, spec.max_seq_len, spec.scratch
        device, dtype, retrieval = model.device, model.dtype, spec.config.retrieval
        self.recent = self.slots = self.chunk = 0
        if spec.levels == 3:
            self.recent, self.chunk = retrieval.recent, retrieval.chunk
            self.slots = (retrieval.budget - self.recent) // self.chunk * self.chunk
        heads, shapes = one_shape(model), model.kv_layers
        whole = [None if shape is None or shape.window is not None else shape for shape in shapes]
        windowed = [None if shape is None or shape.window is None else shape for shape in shapes]
        offloaded = [layer for layer, shape in enumerate(whole) if shape is not None]
        self.host_layers = [
            offloaded.index(layer) if layer in offloaded else None for layer in range(len(whole))
        ]
        layers = len(offloaded)
        self.rings = KVStore(
            windowed, batch, max_seq_len + self.scratch_slots, device, dtype, scratch=self.scratch_slots
        )
        self.settings = settings
        self.attention: HostAttention | None = None
        if settings.host_share or settings.plain_host_share:
            check_host_attention(model)
            self.attention = HostAttention(heads, device, dtype, layers * batch)
        self.host = HostStore(
            layers, batch, heads, max_seq_len, device, dtype, max(1, self.chunk), settings, progress
        )
        self.eviction_block = eviction_block(self.host.unit)
        # During prefill this memory is free for the keys and values of one layer, or for hidden states.
        one_layer = self.host.slots * self.host.slot_bytes // dtype.itemsize
        least = 0 if self.host.last_resident or not layers else one_layer
        total = self.slots + window_slots(self.recent, self.host.unit, self.scratch_slots)
        self.store = KVStore(whole, batch, total, device, dtype, min_elements=least)
        self.window = self.store.without_first(self.slots)
        self.base = torch.zeros(batch, dtype=torch.int64, device=device)
        self.lengths = [0] * batch
        self.means: Tensor | None = None
        if self.chunk:
            count, columns = self.host.slots // self.chunk, retrieval.columns(model.heads.dim)
            self.means = torch.zeros(layers, batch, heads.kv, count, columns, device=device, dtype=dtype)

    def share(self, queries: int) -> float:
        """Returns the share of host slots that the CPU attends to in a pass of ``queries`` tokens."""
        return self.settings.share(queries) if self.attention is not None else 0.0

    def transferred_bytes(self, tokens: int, queries: int) -> int:
        """Returns the bytes of keys and values that a pass of ``queries`` tokens per sequence copies.

        ``tokens`` are committed before it.
        """
        slot = self.host.layers * self.host.slot_bytes
        on_host = max(0, len(self.lengths) * tokens * slot - self.host.resident_bytes)
        return int((1 - self.share(queries)) * on_host)

    def base_after(self, length: int) -> int:
        """Returns the first position of the device window after a prefill of ``length`` tokens."""
        unit = self.host.unit
        return max(0, length - self.recent) // unit * unit

    def publish(self) -> None:
        """Copies the new bases to the device, and prefetches, after all writes to the host so far."""
        self.host.to_host.join()
        self.base.copy_(torch.tensor(self.host.base, device="cpu"))
        self.host.prefetch()

    def committed(self, counts: Sequence[int]) -> None:
        """Records the number of committed tokens; blocks that are no longer recent leave the window."""
        evicted = False
        for b, count in enumerate(counts):
            self.lengths[b] += count
            while self.lengths[b] - self.host.base[b] >= self.recent + self.eviction_block:
                self._evict(b, self.eviction_block)
                evicted = True
        if evicted:
            self.publish()
        else:
            self.host.prefetch()

    def _evict(self, b: int, count: int) -> None:
        """Copies the window's first ``count`` slots to the host, and moves the others to its front."""
        base = self.host.base[b]
        left = self.lengths[b] - base - count
        for layer in range(self.host.layers):
            self.store_means(layer, b, base, self.write_window(layer, b, count))
            for window in (t[layer, b] for t in self.window.kv):
                window[:, :left] = window[:, count : count + left].clone()
        self.host.base[b] = base + count

    def write_window(self, layer: int, b: int, count: int) -> Tensor:
        """Copies the window's first ``count`` slots to the host too, and returns them."""
        return self.write(
            layer, b, self.host.base[b], [slots[layer, b, :, :count] for slots in self.window.kv]
        )

    def write(self, layer: int, b: int, start: int, parts: Sequence[Tensor]) -> Tensor:
        """Stores keys and values ``[H_kv, n, D]`` in the host store from slot ``start`` on.

        Returns:
            the same as rows ``[n, row]`` on the device.
        """
        host = self.host
        rows = torch.empty(parts[0].shape[1], host.heads.row, device=host.device, dtype=self.window.dtype)
        for target, part in zip(host.heads.split(rows), parts, strict=True):
            target.copy_(part.transpose(0, 1))
        host.write(layer, b, start, rows)
        return rows

    def store_means(self, layer: int, b: int, start: int, kv: Tensor) -> None:
        """Stores the mean keys of the chunks in rows ``kv`` ``[n, row]``, which begin at slot ``start``."""
        if self.means is not None and kv.shape[0]:
            keys = self.host.heads.split(kv)[0].unflatten(0, (-1, self.chunk))
            moments = key_moments(keys, 1, self.means.shape[4])
            first = start // self.chunk
            self.means[layer, b, :, first : first + len(moments)] = moments.transpose(0, 1).to(kv.dtype)

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Shortens each sequence to its first tokens, as they were right after a prefill of that length.

        Raises:
            ValueError: a sequence has fewer tokens in the cache.
        """
        for b, length in enumerate(lengths):
            if length > self.lengths[b]:
                raise ValueError(
                    f"sequence {b} has {self.lengths[b]} tokens in the cache, not {length}; prefill it first"
                )
            base, old = self.base_after(length), self.host.base[b]
            self.lengths[b] = length
            if base > old:
                self._evict(b, base - old)
            elif base < old:
                kept = max(0, length - old)
                for layer in range(self.host.layers):
                    back = self.host.read(layer, b, base, min(length, old))
                    count = back.shape[0]
                    for slots, part in zip(self.window.kv, self.host.heads.split(back), strict=True):
                        window = slots[layer, b]
                        window[:, count : count + kept] = window[:, :kept].clone()
                        window[:, :count] = part.transpose(0, 1)
                self.host.base[b] = base
        self.publish()

    def restored(self, length: int) -> None:
        """Records that all layers of the only sequence were written, its whole units to the host."""
        self.host.ring.invalidate()
        self.lengths[0], unit = length, self.host.unit
        self.host.base[0] = length // unit * unit
        self.set_lengths([length])

    @contextmanager
    def trial(self, length: int, held: Sequence[int]) -> Iterator[None]:
        """Lets forwards run on made-up sequences of ``length`` tokens; KV slots in use stay unchanged.

        ``held``: tokens of each sequence whose keys and values are in use.

        What the forwards write goes to the window's end. The host store shows what is resident and one piece
        more, so that every kernel of a pass runs and little is streamed.
        """
        # If the cache is in use, the slots of the window hold positions, and the slots before it hold copied
        # chunks.
        self.store.initialise([None if count else 0 for count in held])
        self.host.initialise(held)
        base, host = self.base.clone(), self.host.base
        self.base.fill_(max(0, length - (self.window.slots - self.scratch_slots)))
        shown = min(self.host.resident_slots, default=0) + self.host.piece
        self.host.base = [min(shown, self.host.slots)] * len(host)
        self.host.ring.invalidate()
        try:
            yield
        finally:
            self.base.copy_(base)
            self.host.base = host
            self.host.ring.invalidate()

    def close(self) -> None:
        """Frees the memory: at once on the host, with the last reference on the device."""
        if self.attention is not None:
            self.attention.close()
        self.host.close()


def one_shape(model: HFModel) -> Heads:
    """Returns the heads of the layers without a window, or of any layer if all have one.

    Raises:
        ValueError: they differ, or an indexer chooses what they attend to.
    """
    if model.indexed:
        raise ValueError(
            f"{model.name} chooses what it attends to by an indexer, whose keys an offloaded cache does not "
            "keep; keep the cache on the device (leave offload out)"
        )
    found = list(dict.fromkeys(s.heads for s in model.kv_shapes if s.window is None)) or [model.heads]
    if len(found) > 1:
        shapes = " and ".join(f"{heads.kv} x ({heads.dim} + {heads.value_dim})" for heads in found)
        raise ValueError(
            f"the layers of {model.name} have keys and values of {shapes} elements, but an offloaded cache "
            "needs one shape; keep the cache on the device (leave offload out)"
        )
    return found[0]

"""The KV backend whose committed keys and values are in host memory."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from triforce_tree.config import NO_OFFLOAD
from triforce_tree.kv.backend import PARTS, CacheSpec, KVBackend, PromptRun
from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.kv.offload.offloaded_cache import OffloadedCache
from triforce_tree.kv.offload.offloaded_prefill import prefill_offloaded
from triforce_tree.kv.offload.views import GatheredRetrievalView, StreamedView
from triforce_tree.trees.device_shapes import least_prompt, tree_shapes

# Units of KV slots of one copy from or to host memory.
_BLOCK_UNITS = 256


class OffloadedBackend(KVBackend):
    """Stores keys and values in an :class:`OffloadedCache`, but windows and recurrent states on the device.

    Args:
        spec: what the slots are needed for.
        settings: how the slots are split between device and host.
        pinned: called with bytes of host memory as they are taken.

    Attributes:
        cache: the slots.

    Raises:
        ValueError: 8 bits, or a target that cannot be offloaded.
        HostMemoryError: host memory is short.
    """

    retrieval: GatheredRetrievalView | None = None
    replaces = False
    fixed_passes = transfers = True

    def __init__(self, spec: CacheSpec, settings: Offload, pinned: Callable[[int], None] | None) -> None:
        super().__init__(spec)
        if spec.config.kv_bits != 16:
            raise ValueError(f"kv_bits={spec.config.kv_bits} is for a cache on the device; {NO_OFFLOAD}")
        self.cache = OffloadedCache(spec, settings, pinned)
        self.store, self.unit = self.cache.rings, self.cache.host.unit
        self.least_prompt = least_prompt(spec.config, spec.levels)
        if spec.levels == 3:
            shape = tree_shapes(spec.config)[0]
            self.retrieval = GatheredRetrievalView(
                self.cache, shape.nodes, spec.config.retrieval, shape.depths
            )

    def view(self, queries: int, mask: Tensor | None, depths: Sequence[int] | None) -> StreamedView:
        return StreamedView(self.cache, queries, mask, depths)

    @property
    def bytes(self) -> int:
        return self.store.nbytes + self.cache.store.nbytes + self.cache.host.resident_bytes

    def tokens(self) -> tuple[int, int]:
        """See :class:`KVBackend`; none are counted, as the host has most of them."""
        return 0, 0

    def transferred_bytes(self, tokens: int, queries: int) -> int:
        return self.cache.transferred_bytes(tokens, queries)

    def prefill(
        self, prompts: Sequence[Sequence[int]], first: int, starts: Sequence[int], run: PromptRun
    ) -> list[int]:
        """See :class:`KVBackend`; layer by layer, in memory that all sequences use."""
        prefill_offloaded(self.cache, prompts, self.chunk, starts, run)
        for b, (prompt, start) in enumerate(zip(prompts, starts, strict=True)):
            self.cached.fed(b, prompt, start)
        return list(starts)

    def begin(self, lengths: Sequence[int]) -> None:
        self.cache.set_lengths(lengths)
        if self.retrieval is not None:
            self.retrieval.fill()

    def committed(self, counts: Sequence[int]) -> None:
        super().committed(counts)
        self.cache.committed(counts)

    def layer(self, layer: int, count: int) -> dict[str, Tensor]:
        cache, index = self.cache, self.cache.host_layers[layer]
        if index is None:
            return super().layer(layer, count)
        host, base = cache.host, min(cache.host.base[0], count)
        parts = [
            torch.empty(host.heads.kv, count, dim, dtype=cache.window.dtype, device="cpu")
            for dim in (host.heads.dim, host.heads.value_dim)
        ]
        for start, stop in self._blocks(base):
            for part, rows in zip(parts, host.heads.split(host.read(index, 0, start, stop)), strict=True):
                part[:, start:stop] = rows.transpose(0, 1)
        for part, slots in zip(parts, cache.window.kv, strict=True):
            part[:, base:] = slots[index, 0, :, : count - base]
        return dict(zip(PARTS, parts, strict=False))

    def layer_slots(self, layer: int, count: int) -> tuple[dict[str, Tensor], int]:
        if self.cache.host_layers[layer] is None:
            return super().layer_slots(layer, count)
        return dict(zip(PARTS, self.cache.window.kv, strict=False)), count

    def set_layer(self, layer: int, count: int, parts: Sequence[Tensor]) -> None:
        cache, index = self.cache, self.cache.host_layers[layer]
        if index is None:
            super().set_layer(layer, count, parts)
            return
        base = count // self.unit * self.unit
        for start, stop in self._blocks(base):
            rows = cache.write(index, 0, start, [part[:, start:stop] for part in parts])
            cache.store_means(index, 0, start, rows)
        for slots, part in zip(cache.window.kv, parts, strict=True):
            slots[index, 0, :, : count - base] = part[:, base:].to(slots.device)

    def _blocks(self, stop: int) -> Iterator[tuple[int, int]]:
        """Runs of slots that are copied at once, up to ``stop``."""
        block = _BLOCK_UNITS * self.cache.host.unit
        for start in range(0, stop, block):
            yield start, min(start + block, stop)

    @property
    def layout(self) -> list[object]:
        window = self.cache.window
        own = [(group.layers, group.shape, 16, window.dtype) for group in window.groups]
        return [*own, *super().layout]

    def read(self, b: int, start: int, stop: int) -> list[Tensor]:
        """See :class:`KVBackend`; the layers whose windows are on the device come last."""
        host, window = self.cache.host, self.cache.window
        base = host.base[b]
        middle = min(max(start, base), stop)
        found: list[list[Tensor]] = [[] for _ in window.groups for _ in PARTS[:2]]
        for layer in range(host.layers):
            parts = [slots[layer, b, :, middle - base : stop - base] for slots in window.kv]
            if start < middle:
                older = host.heads.split(host.read(layer, b, start, middle))
                parts = [torch.cat([o.transpose(0, 1), new], 1) for o, new in zip(older, parts, strict=True)]
            for all_layers, part in zip(found, parts, strict=True):
                all_layers.append(part)
        return [*(part for all_layers in found for part in all_layers), *super().read(b, start, stop)]

    def fill(
        self,
        b: int,
        prompt: Sequence[int],
        start: int,
        length: int,
        runs: Iterable[tuple[int, int, list[Tensor]]],
    ) -> None:
        cache, host = self.cache, self.cache.host
        layers, flushed, base = host.layers, start // host.unit * host.unit, length // host.unit * host.unit
        for layer in range(layers if flushed > host.base[b] else 0):
            rows = cache.write_window(layer, b, flushed - host.base[b])
            cache.store_means(layer, b, host.base[b], rows)
        for first, stop, parts in runs:
            whole = max(first, min(stop, base))
            for layer in range(layers):
                own = [part.to(host.device, non_blocking=True) for part in parts[layer : 2 * layers : layers]]
                rows = cache.write(layer, b, first, [part[:, : whole - first] for part in own])
                cache.store_means(layer, b, first, rows)
                for slots, part in zip(cache.window.kv, own, strict=True) if stop > whole else ():
                    slots[layer, b, :, whole - base : stop - base] = part[:, whole - first :]
            self.store.set_positions(b, first, parts[2 * layers :])
        host.ring.invalidate()
        cache.lengths[b], host.base[b] = length, base
        self._filled(b, prompt, start, length)

    def restored(self, length: int) -> None:
        super().restored(length)
        self.cache.restored(length)

    @contextmanager
    def trial(self, length: int, count: int) -> Iterator[None]:
        window = self.cache.window
        first = min(length, window.slots - self.spec.scratch)
        made_up = self.cache.trial(length, self.cached.lengths)
        with super().trial(length, count), made_up, window.saved(first, count):
            yield

    def close(self) -> None:
        self.closed = True
        self.cache.close()

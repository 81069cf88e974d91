"""Keys and values of earlier texts, in host memory: what a later prompt may begin with.

Kept are the whole chunks of prefills, each under a digest of all tokens up to its end, so that texts which
begin alike share their chunks (as the blocks of vLLM's prefix cache do). A chunk has the bits that a prefill
would compute again.
"""

import hashlib
import logging
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from triforce_tree.kv.cached_tokens import CachedTokens
from triforce_tree.kv.offload.pinned import HostMemory, HostMemoryError
from triforce_tree.kv.store import KVStore
from triforce_tree.runtime.features import Features

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Chunk:
    """The KV slots of one chunk: ``[H_kv, chunk, D]`` of each part of each layer, in ``memory``."""

    slots: list[Tensor]
    memory: HostMemory


class KeptPrefixes:
    """Chunks of earlier texts, up to so many bytes; those used longest ago make room for new ones.

    Attributes:
        limit: most bytes of host memory.
    """

    def __init__(self) -> None:
        self.limit = 0
        # The one used longest ago first; of a text its end before its beginning.
        self._chunks: OrderedDict[bytes, _Chunk] = OrderedDict()
        self._told = False

    @property
    def taken(self) -> int:
        """Bytes of host memory."""
        return sum(chunk.memory.bytes for chunk in self._chunks.values())

    def bound(self, limit: int) -> None:
        """Set the limit, and drop what exceeds it."""
        self.limit = limit
        while self.taken > self.limit:
            self._drop()

    def keep(
        self,
        store: KVStore,
        cached: CachedTokens,
        b: int,
        function: object,
        needed: Collection[bytes] = (),
    ) -> None:
        """Copy the whole chunks of a sequence from the device, as far as the limit and the machine allow.

        Args:
            store: without rings.
            cached: which tokens its sequences hold.
            function: ``HFModel.function_key`` of the model that has computed them.
            needed: digests of chunks that must stay.
        """
        tokens = cached.held[b][: cached.whole[b]]
        digests = list(_digests(tokens, cached.chunk, function, store))
        staying = {*digests, *needed}
        self._use([*digests, *needed])
        for at, digest in enumerate(digests):
            if digest in self._chunks:
                continue
            parts = _parts(store, b, at * cached.chunk, (at + 1) * cached.chunk)
            size = sum(part.nbytes for part in parts)
            if not self._make_room(size, staying):
                break
            memory = HostMemory(store.device.type == "cuda", "prefix_cache", "lower prefix_cache")
            try:
                memory.check(size)
                slots = [memory.take(part.shape, part.dtype) for part in parts]
            except HostMemoryError as error:
                memory.release()
                if not self._told:
                    _LOG.warning("prefix_cache: earlier texts are not kept any more: %s", error)
                self._told = True
                break
            for target, part in zip(slots, parts, strict=True):
                target.copy_(part, non_blocking=True)
            self._chunks[digest] = _Chunk(slots, memory)
        self._use(digests)
        if store.device.type == "cuda":
            # The slots may be overwritten by other streams, and the copies dropped.
            torch.cuda.synchronize(store.device)

    def find(self, store: KVStore, chunk: int, prompt: Sequence[int], function: object) -> list[bytes]:
        """The digests of chunks that all but the last token of a prompt begins with, one after the other."""
        found = []
        for digest in _digests(prompt[:-1], chunk, function, store):
            if digest not in self._chunks:
                break
            found.append(digest)
        self._use(found)
        return found

    def restore(self, store: KVStore, b: int, chunk: int, digests: Sequence[bytes], first: int) -> None:
        """Copy chunks ``first`` and later of a prompt to the device."""
        for at, digest in enumerate(digests[first:], first):
            parts = _parts(store, b, at * chunk, (at + 1) * chunk)
            for part, slots in zip(parts, self._chunks[digest].slots, strict=True):
                part.copy_(slots, non_blocking=True)

    def clear(self) -> None:
        """Give all memory back."""
        while self._chunks:
            self._drop()

    def _use(self, digests: Sequence[bytes]) -> None:
        for digest in reversed(digests):
            if digest in self._chunks:
                self._chunks.move_to_end(digest)

    def _make_room(self, size: int, needed: set[bytes]) -> bool:
        """Drop chunks until ``size`` more bytes fit; False where that would drop one that is needed."""
        while self.taken + size > self.limit:
            if next(iter(self._chunks), b"") in needed or not self._chunks:
                return False
            self._drop()
        return True

    def _drop(self) -> None:
        _, chunk = self._chunks.popitem(last=False)
        if chunk.memory.locked:
            torch.cuda.synchronize()
        chunk.memory.release()


class Means(Protocol):
    def lost(self, b: int, start: int) -> None: ...


class PrefixExchange:
    """Exchanges the texts of one cache on the device with :class:`KeptPrefixes`.

    Args:
        prefixes: texts of all caches of the same models.
        store: the KV slots, none of which are rings.
        cached: the tokens that they hold.
        means: told which chunk means are not known.
    """

    def __init__(self, prefixes: KeptPrefixes, store: KVStore, cached: CachedTokens, means: Means) -> None:
        self.prefixes, self._store, self._cached, self._means = prefixes, store, cached, means

    def keep(self, function: object) -> None:
        """Copy all texts of the cache, which is not used any more.

        Args:
            function: ``HFModel.function_key`` of the model that has computed them.
        """
        for b in range(len(self._cached.held)):
            self.prefixes.keep(self._store, self._cached, b, function)

    def before(
        self,
        prompts: Sequence[Sequence[int]],
        starts: Sequence[int],
        function: object,
        now: object,
        features: Features | None,
    ) -> None:
        """Keep what a prefill of these prompts overwrites, and bring back what they begin with.

        Args:
            starts: tokens of each prompt that the cache holds, computed by the model as it is now.
            function, now: of the model that has computed what the cache holds, and of the model as it is.
            features: hidden states for the drafter; those of a text that is brought back are not known.
        """
        cached, chunk = self._cached, self._cached.chunk

        def find() -> list[list[bytes]]:
            return [self.prefixes.find(self._store, chunk, prompt, now) for prompt in prompts]

        # Once more afterwards: a prompt may begin with what another sequence holds.
        needed = [digest for found in find() for digest in found]
        for b, start in enumerate(starts):
            if start < cached.whole[b]:
                self.prefixes.keep(self._store, cached, b, function, needed)
        if function != now:
            cached.clear()
        for b, (prompt, start, found) in enumerate(zip(prompts, starts, find(), strict=True)):
            length = len(found) * chunk
            if length <= start:
                continue
            first = min(start, cached.whole[b]) // chunk
            self.prefixes.restore(self._store, b, chunk, found, first)
            cached.fed(b, prompt[: length + 1], first * chunk)
            self._store.fed(b, length)
            self._means.lost(b, first * chunk)
            if features is not None:
                features.begin(b, 0)


def _digests(tokens: Sequence[int], chunk: int, function: object, store: KVStore) -> Iterator[bytes]:
    """Of each whole chunk of a text: of all tokens up to its end, the model and how slots are stored."""
    shapes = [(group.layers, group.shape) for group in store.groups]
    digest = hashlib.sha256(repr((function, store.bits, store.dtype, chunk, shapes)).encode())
    for stop in range(chunk, len(tokens) + 1, chunk):
        digest.update(array("q", tokens[stop - chunk : stop]).tobytes())
        yield digest.digest()


def _parts(store: KVStore, b: int, start: int, stop: int) -> list[Tensor]:
    """The slots of sequence b, by layer: ``[H_kv, stop - start, D]``."""
    return [layer[b, :, start:stop] for group in store.groups for part in group.parts for layer in part]

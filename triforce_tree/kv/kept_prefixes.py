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
from itertools import takewhile
from typing import Protocol

import torch
from torch import Tensor

from triforce_tree.kv.cached_tokens import CachedTokens
from triforce_tree.kv.offload.pinned import HostMemory, HostMemoryError
from triforce_tree.kv.store import KVGroup, KVStore
from triforce_tree.runtime.features import Features

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Chunk:
    """Holds the KV slots of one chunk in ``memory``: ``[H_kv, chunk, D]`` of each part of each layer."""

    slots: list[Tensor]
    memory: HostMemory


class KeptPrefixes:
    """Keeps chunks of earlier texts in host memory; the least recently used are dropped beyond the limit.

    Attributes:
        limit: the most bytes of host memory.
    """

    def __init__(self) -> None:
        self.limit = 0
        # The one used longest ago first; of a text its end before its beginning.
        self._chunks: OrderedDict[bytes, _Chunk] = OrderedDict()
        self._warned = False

    @property
    def taken(self) -> int:
        """Returns the bytes of host memory in use."""
        return sum(chunk.memory.bytes for chunk in self._chunks.values())

    def bound(self, limit: int) -> None:
        """Sets the most bytes of host memory, and drops the prefixes that exceed it."""
        self.limit = limit
        while self.taken > self.limit:
            self._drop()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._chunks

    def put(self, digest: bytes, parts: Sequence[Tensor], staying: Collection[bytes] = ()) -> bool:
        """Copies a chunk from the device if limit and machine allow it; returns whether it is kept.

        Args:
            digest: of the chunk, see :func:`digests_of`.
            parts: its KV slots, ``[H_kv, chunk, D]`` of each part of each layer.
            staying: digests of chunks that must not be dropped for it.
        """
        if digest in self._chunks:
            return True
        size, locked = sum(part.nbytes for part in parts), parts[0].is_cuda
        if not self._free_bytes(size, staying):
            return False
        memory = HostMemory(locked, "prefix_cache", "lower prefix_cache")
        try:
            memory.check(size)
            slots = [memory.take(part.shape, part.dtype) for part in parts]
        except HostMemoryError as error:
            memory.release()
            if not self._warned:
                _LOG.warning("prefix_cache: earlier texts are not kept any more: %s", error)
            self._warned = True
            return False
        for target, part in zip(slots, parts, strict=True):
            target.copy_(part, non_blocking=True)
        self._chunks[digest] = _Chunk(slots, memory)
        return True

    def slots(self, digest: bytes) -> list[Tensor]:
        """Returns the KV slots of a chunk that is kept, as :meth:`put` got them, in host memory."""
        return self._chunks[digest].slots

    def use(self, digests: Sequence[bytes]) -> None:
        """Notes that these chunks of a text are used now. Its beginning is noted last, and dropped last."""
        for digest in reversed(digests):
            if digest in self._chunks:
                self._chunks.move_to_end(digest)

    def clear(self) -> None:
        """Releases all memory."""
        while self._chunks:
            self._drop()

    def _free_bytes(self, size: int, needed: Collection[bytes]) -> bool:
        """Drops chunks until ``size`` more bytes fit; returns False if that would drop one that is needed."""
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


class Exchange(Protocol):
    """Keeps copies of the texts of one cache, and brings back what prompts begin with."""

    def keep(self, function: object) -> None:
        """Copies all texts of the cache, which is not used any more.

        Args:
            function: ``HFModel.function_key`` of the model that has computed them.
        """

    def before(
        self,
        prompts: Sequence[Sequence[int]],
        starts: Sequence[int],
        function: object,
        now: object,
        features: Features | None,
    ) -> None:
        """Keeps what a prefill of these prompts overwrites, and copies back what they begin with.

        Args:
            starts: tokens of each prompt that the cache holds, computed by the model as it is now.
            function, now: of the model that has computed what the cache holds, and of the model as it is.
            features: hidden states for the drafter; those of a text that is brought back are not known.
        """


class PrefixExchange:
    """Is the :class:`Exchange` of sequences with their own slots on the device, none of which are rings.

    Args:
        prefixes: texts of all caches of the same models.
        store: the KV slots.
        cached: the tokens that they hold.
        means: is notified which chunk means are not known.
    """

    def __init__(self, prefixes: KeptPrefixes, store: KVStore, cached: CachedTokens, means: Means) -> None:
        self.prefixes, self._store, self._cached, self._means = prefixes, store, cached, means

    def keep(self, function: object) -> None:
        """See :class:`Exchange`."""
        for b in range(len(self._cached.held)):
            self._keep(b, function)

    def _keep(self, b: int, function: object, needed: Collection[bytes] = ()) -> None:
        """Copies the whole chunks of a sequence. The chunks with the digests ``needed`` stay."""
        cached, chunk = self._cached, self._cached.chunk
        own = list(digests_of(cached.held[b][: cached.whole[b]], chunk, function, self._store))
        self.prefixes.use([*own, *needed])
        staying = {*own, *needed}
        for at, digest in enumerate(own):
            if not self.prefixes.put(digest, self._parts(b, at), staying):
                break
        self.prefixes.use(own)
        settle(self._store)

    def before(
        self,
        prompts: Sequence[Sequence[int]],
        starts: Sequence[int],
        function: object,
        now: object,
        features: Features | None,
    ) -> None:
        """See :class:`Exchange`."""
        cached, chunk = self._cached, self._cached.chunk

        def find() -> list[list[bytes]]:
            return [self._find(prompt, now) for prompt in prompts]

        # Once more afterwards: a prompt may begin with what another sequence holds.
        needed = [digest for found in find() for digest in found]
        for b, start in enumerate(starts):
            if start < cached.whole[b]:
                self._keep(b, function, needed)
        if function != now:
            cached.clear()
        for b, (prompt, start, found) in enumerate(zip(prompts, starts, find(), strict=True)):
            length = len(found) * chunk
            if length <= start:
                continue
            first = min(start, cached.whole[b]) // chunk
            for at, digest in enumerate(found[first:], first):
                for part, slots in zip(self._parts(b, at), self.prefixes.slots(digest), strict=True):
                    part.copy_(slots, non_blocking=True)
            cached.fed(b, prompt[: length + 1], first * chunk)
            self._store.fed(b, length)
            self._means.lost(b, first * chunk)
            if features is not None:
                features.begin(b, 0)

    def _find(self, prompt: Sequence[int], function: object) -> list[bytes]:
        """Returns the digests of the kept chunks that a prompt begins with, its last token excluded."""
        own = digests_of(prompt[:-1], self._cached.chunk, function, self._store)
        found = list(takewhile(self.prefixes.__contains__, own))
        self.prefixes.use(found)
        return found

    def _parts(self, b: int, at: int) -> list[Tensor]:
        """Returns the slots of a chunk of sequence b."""
        chunk = self._cached.chunk
        return chunk_parts(self._store.groups, b, at * chunk, (at + 1) * chunk)


def digests_of(tokens: Sequence[int], chunk: int, function: object, store: KVStore) -> Iterator[bytes]:
    """Returns the digest of each whole chunk: a hash of all tokens up to its end, the model and the slots."""
    shapes = [(group.layers, group.shape) for group in store.groups]
    digest = hashlib.sha256(repr((function, store.bits, store.dtype, chunk, shapes)).encode())
    for stop in range(chunk, len(tokens) + 1, chunk):
        digest.update(array("q", tokens[stop - chunk : stop]).tobytes())
        yield digest.digest()


def chunk_parts(groups: Sequence[KVGroup], b: int, start: int, stop: int) -> list[Tensor]:
    """Returns slots of sequence b, by layer: ``[H_kv, stop - start, D]``."""
    return [layer[b, :, start:stop] for group in groups for part in group.parts for layer in part]


def settle(store: KVStore) -> None:
    """Waits for copies: other streams may overwrite the slots, and copies may be dropped."""
    if store.device.type == "cuda":
        torch.cuda.synchronize(store.device)

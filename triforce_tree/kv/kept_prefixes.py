"""Keys, values and states of earlier texts, in host memory: what a later prompt may begin with.

A text is kept as *blocks* of equally many tokens, each under a digest of all tokens up to its end, so that
texts which begin alike share their blocks (as in vLLM's prefix cache), and as *ends*: positions where it can
be continued. An end has the tokens after the last whole block, and copies of what layers with a window,
recurrent layers and drafters need there. Ends lie where a prompt or a reply ended, and where two texts
diverged.
"""

import hashlib
import logging
from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triforce_tree.kv.cached_tokens import common_prefix
from triforce_tree.kv.offload.layout import BlockLayout
from triforce_tree.kv.offload.pinned import HostMemory, HostMemoryError

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """Holds a block, or an end of a text.

    Attributes:
        digest: its own, see :func:`digests_of` and :func:`end_of`.
        base: digest of the tokens before it.
        tokens: its tokens.
        slots: their KV slots in host memory, ``[H_kv, n, D]`` of each part of each layer that keeps all
            positions.
        states: of an end, what the other layers need to continue after it; None for a block.
        features: of an end, hidden states for a drafter; empty if there are none.
        memory: the host memory of all tensors.
    """

    digest: bytes
    base: bytes
    tokens: list[int]
    slots: list[Tensor]
    states: list[Tensor] | None
    features: list[Tensor]
    memory: HostMemory


@dataclass(frozen=True)
class Found:
    """Says what is kept of a prompt.

    Attributes:
        length: tokens that need not be computed.
        entries: they hold these tokens in order; of the last one maybe only the first tokens are used.
        end: the end at ``length``, or None.
        alike: tokens that a kept text and the prompt share, at least ``length``. It cannot be continued
            there if ``length`` is less.
    """

    length: int
    entries: list[Entry]
    end: Entry | None
    alike: int


class KeptPrefixes:
    """Keeps blocks and ends of texts; the least recently used are dropped beyond the limit.

    Attributes:
        limit: the most bytes of host memory.
        taken: the bytes of host memory in use.
    """

    def __init__(self) -> None:
        self.limit = self.taken = 0
        # The one used longest ago first; of a text its end before its beginning.
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        # The entries that follow each base.
        self._after: dict[bytes, dict[bytes, Entry]] = {}
        self._warned = False

    def bound(self, limit: int) -> None:
        """Sets the most bytes of host memory, and drops what exceeds it."""
        self.limit = limit
        while self.taken > self.limit:
            self._drop(next(iter(self._entries)))

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._entries

    def put(
        self,
        digest: bytes,
        base: bytes,
        tokens: list[int],
        slots: Sequence[Tensor],
        states: Sequence[Tensor] | None = None,
        features: Sequence[Tensor] = (),
        staying: Collection[bytes] = (),
    ) -> bool:
        """Copies an entry from the device if the limit and the machine allow it; returns whether it is kept.

        Args:
            digest, base, tokens, slots, states, features: see :class:`Entry`.
            staying: digests of entries that must not be dropped for it.
        """
        if digest in self._entries:
            return True
        parts = [*slots, *(states or ()), *features]
        layout = BlockLayout.of(parts)
        if not self._free_bytes(layout.bytes, staying):
            return False
        memory = HostMemory(any(part.is_cuda for part in parts), "prefix_cache", "lower prefix_cache")
        try:
            memory.check(layout.bytes)
            block = memory.take([layout.bytes], torch.uint8)
        except HostMemoryError as error:
            memory.release()
            if not self._warned:
                _LOG.warning("prefix_cache: earlier texts are not kept any more: %s", error)
            self._warned = True
            return False
        copies = layout.cut(block)
        for copy, part in zip(copies, parts, strict=True):
            copy.copy_(part, non_blocking=True)
        rest = iter(copies)
        kept = [[next(rest) for _ in given] for given in (slots, states or (), features)]
        entry = Entry(digest, base, tokens, kept[0], None if states is None else kept[1], kept[2], memory)
        self._entries[digest] = self._after.setdefault(base, {})[digest] = entry
        self.taken += memory.bytes
        return True

    def drop_within(self, base: bytes, tokens: Sequence[int]) -> None:
        """Drops ends without states after ``base`` whose tokens ``tokens`` begins with: it replaces them."""
        for digest, entry in list(self._after.get(base, {}).items()):
            count = len(entry.tokens)
            if entry.states == [] and count < len(tokens) and list(tokens[:count]) == entry.tokens:
                self._drop(digest)

    def find(self, digests: Sequence[bytes], tokens: Sequence[int], size: int, how: str) -> Found:
        """Returns what is kept of a text, and notes that it is used now.

        Args:
            digests: see :func:`digests_of`.
            size: tokens of a block.
            how: where texts can be continued: at the ``ends``, after whole ``blocks``, or ``anywhere``.
        """
        whole = 0
        while whole + 1 < len(digests) and digests[whole + 1] in self._entries:
            whole += 1
        rest = tokens[whole * size : (whole + 1) * size]
        last, part = None, 0
        for entry in self._after.get(digests[whole], {}).values():
            count = common_prefix(entry.tokens, rest)
            # If several entries share as much, one that ends there is preferred.
            if last is None or (count, count == len(entry.tokens)) > (part, part == len(last.tokens)):
                last, part = entry, count
        alike, end = whole * size + part, last
        if how == "ends":
            end = last = self._end(digests[: whole + 1], tokens, size)
            part = len(end.tokens) if end is not None else 0
            whole = digests.index(end.base) if end is not None else 0
        elif how == "blocks":
            end, part = None, 0
        elif last is not None and (part < len(last.tokens) or last.states is None):
            end = None
        entries = [self._entries[digest] for digest in digests[1 : whole + 1]]
        if last is not None and part:
            self._entries.move_to_end(last.digest)
            entries.append(last)
        self.use(digests)
        return Found(whole * size + part, entries, end, alike)

    def _end(self, digests: Sequence[bytes], tokens: Sequence[int], size: int) -> Entry | None:
        """Returns the last end that a text contains."""
        for whole in range(len(digests) - 1, -1, -1):
            rest = tokens[whole * size : (whole + 1) * size]
            ends = [
                entry
                for entry in self._after.get(digests[whole], {}).values()
                if entry.states is not None and list(rest[: len(entry.tokens)]) == entry.tokens
            ]
            if ends:
                return max(ends, key=lambda entry: len(entry.tokens))
        return None

    def use(self, digests: Sequence[bytes]) -> None:
        """Notes that these blocks of a text are used now. Its beginning is noted last, and dropped last."""
        for digest in reversed(digests):
            if digest in self._entries:
                self._entries.move_to_end(digest)

    def clear(self) -> None:
        """Releases all memory."""
        while self._entries:
            self._drop(next(iter(self._entries)))

    def _free_bytes(self, size: int, needed: Collection[bytes]) -> bool:
        """Drops entries until ``size`` more bytes fit; returns False if that would drop a needed one."""
        while self.taken + size > self.limit:
            oldest = next(iter(self._entries), b"")
            if oldest in needed or not self._entries:
                return False
            self._drop(oldest)
        return True

    def _drop(self, digest: bytes) -> None:
        entry = self._entries.pop(digest)
        siblings = self._after[entry.base]
        del siblings[digest]
        if not siblings:
            del self._after[entry.base]
        self.taken -= entry.memory.bytes
        if entry.memory.locked:
            torch.cuda.synchronize()
        entry.memory.release()


def digests_of(tokens: Sequence[int], size: int, layout: object) -> list[bytes]:
    """Returns the digest of the empty text, and of each whole block: a hash of all tokens up to its end.

    Args:
        size: tokens of a block.
        layout: the model that computed the slots, and their shapes.
    """
    digest = hashlib.sha256(repr((layout, size)).encode())
    found, ids = [digest.digest()], memoryview(array("q", tokens))
    for stop in range(size, len(ids) + 1, size):
        digest.update(ids[stop - size : stop])
        found.append(digest.digest())
    return found


def end_of(base: bytes, tokens: Sequence[int]) -> bytes:
    """Returns the digest of an end, whose tokens follow those of ``base``."""
    return hashlib.sha256(base + b"end" + array("q", tokens).tobytes()).digest()

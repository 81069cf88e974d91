"""Plans of attention whose sequences share prefixes, each of which is read once."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from triforce_tree.kernels.attention.plan import Heads, Plan
from triforce_tree.runtime.packed import Packed


class PrefixSegment(NamedTuple):
    """Describes ``length`` positions from ``start`` on that ``rows`` sequences from ``first`` on have in the
    same pages.
    """

    start: int
    length: int
    first: int
    rows: int


def segments_of(pages: Sequence[Sequence[int]], depth: int, page: int) -> Iterator[PrefixSegment]:
    """Yields the segments of sequences that begin with these pages, so that adjacent ones share segments.

    Args:
        pages: of each sequence, those that it may share. Equal pages come after equal pages.
        depth: most segments of a sequence. Where more would be needed, its last one is read for it alone.
        page: positions of a page.
    """

    def of(first: int, stop: int, start: int, left: int) -> Iterator[PrefixSegment]:
        # All these sequences have the same first ``start`` pages, and begin a segment there.
        lengths = [len(pages[b]) for b in range(first, stop)]
        equal = [_common(pages[b], pages[b + 1], start) for b in range(first, stop - 1)]
        common = min([*lengths, *equal])
        if left == 1 and stop - first > 1 and common < max(lengths):
            for b in range(first, stop):
                yield from of(b, b + 1, start, 1)
            return
        if common > start:
            yield PrefixSegment(start * page, (common - start) * page, first, stop - first)
            left -= 1
        begin = first
        for b, shared in enumerate([*equal, common], first):
            if shared == common:
                if stop - first > 1 and max(lengths[begin - first : b + 1 - first]) > common:
                    yield from of(begin, b + 1, common, left)
                begin = b + 1

    if pages:
        yield from of(0, len(pages), 0, depth)


def _common(a: Sequence[int], b: Sequence[int], start: int) -> int:
    """Returns how many pages two sequences have in common, at least ``start``."""
    while start < min(len(a), len(b)) and a[start] == b[start]:
        start += 1
    return start


class PrefixPlan:
    """Plans for T queries of each of B sequences with shared prefixes, which are read once.

    The sequences have page tables. A shared prefix is one segment, which the queries of its sequences see by
    the table of the first of them, and the remaining positions of each sequence are another segment (cascade
    inference; Hydragen, arXiv 2402.05099; DeFT-Flatten, arXiv 2404.00242, section 3.3). The outputs of a
    query are merged. There are two plans, because a segment of one sequence has few queries, and a launch
    with tiles for those of all sequences would leave most of the device without work. Captured graphs may
    hold both, whose buffers :meth:`set` changes in place.

    Args:
        heads: heads of the attention.
        mask: bool ``[T, N]`` over the last N positions of a sequence.
        batch: B.
        depth: largest number of shared prefixes of a sequence; there are ``depth * B`` segments for them.
        lengths: int32 ``[B]``; positions of each sequence between its prefixes and the tail.
        words: int64 ``[B * T, words]``, the mask words that the kernel reads.

    Attributes:
        own: plan of the last positions of each sequence.
        shared: plan of the shared prefixes; a query may be in none.
        batch, depth, count, tail: B, ``depth``, T and N.
        prefixes: those of the last :meth:`set`, on the host.
    """

    def __init__(
        self, heads: Heads, mask: Tensor, batch: int, depth: int, lengths: Tensor, words: Tensor
    ) -> None:
        self.batch, self.depth = batch, depth
        self.count, self.tail = mask.shape
        queries, segments, device, dtype = batch * self.count, depth * batch, lengths.device, torch.int32
        shapes = (6, batch), (6, segments), (segments,), (queries + 1,), (depth * queries,)
        self._packed = Packed(device, *((shape, dtype) for shape in shapes))
        own, shared, shared_lengths, owner_start, owners = self._packed.tensors
        self.own = Plan(
            heads, queries, lengths, own, words,
            owner_start=torch.arange(queries + 1, dtype=dtype, device=device),
            owners=torch.arange(batch, dtype=dtype, device=device).repeat_interleave(self.count),
            seen=queries, max_queries=self.count,
        )  # fmt: skip
        # The largest possible number of queries of segments gives the size of a backend's workspace.
        self.shared = Plan(
            heads, queries, shared_lengths, shared, words, owner_start, owners,
            seen=depth * queries, max_queries=queries,
        )  # fmt: skip
        self.prefixes: list[PrefixSegment] = []
        self.set((), [0] * batch)

    def set(self, prefixes: Sequence[PrefixSegment], ends: Sequence[int]) -> None:
        """Writes shared prefixes, at most ``depth`` of a sequence, and where those of each sequence end."""
        own, shared, lengths, owner_start, owners = self._packed.arrays
        b, count, used = np.arange(self.batch), self.count, len(prefixes)
        start, length, first, rows = np.array(prefixes, dtype=np.int32).reshape(-1, 4).T
        own[:] = np.broadcast_arrays(b, ends, self.tail, count * b, count, count * b)
        queries = count * rows
        earlier = queries.cumsum() - queries
        shared[:, :used] = np.broadcast_arrays(first, start, 0, count * first, queries, earlier)
        lengths[:used] = length
        shared[:, used:] = lengths[used:] = 0
        seen = (first <= b[:, None]) & (b[:, None] < first + rows)
        owner_start[1:] = seen.sum(1).repeat(count).cumsum()
        found = seen.repeat(count, 0).nonzero()[1]
        owners[: len(found)] = found
        self._packed.send()
        self.prefixes = [each for each in prefixes if each.length]

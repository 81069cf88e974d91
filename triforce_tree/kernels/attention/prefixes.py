"""Plans of attention whose sequences share prefixes, each of which is read once."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from triforce_tree.kernels.attention.plan import Heads, planned


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
        queries, device = batch * self.count, lengths.device
        owners = [b for b in range(batch) for _ in range(self.count)]
        columns = self._own_columns([0] * batch)
        made = planned(heads, columns, [0] * batch, owners, list(range(queries + 1)), words, device)
        self.own = replace(made, lengths=lengths)
        # The largest possible number of queries of segments gives the size of a backend's workspace.
        nominal = [PrefixSegment(0, 0, 0, batch)] * depth
        columns, zeros = self._shared_columns(nominal), [0] * (depth * batch)
        self.shared = planned(heads, columns, zeros, *self._owners(nominal), words, device)
        self.prefixes: list[PrefixSegment] = []
        self.set((), [0] * batch)

    def _own_columns(self, ends: Sequence[int]) -> list[list[int]]:
        count = self.count
        rows = [(b, end, self.tail, count * b, count, count * b) for b, end in enumerate(ends)]
        return [list(column) for column in zip(*rows, strict=True)]

    def _shared_columns(self, prefixes: Sequence[PrefixSegment]) -> list[list[int]]:
        count, earlier, rows = self.count, 0, list[tuple[int, ...]]()
        for start, _, first, sequences in prefixes:
            rows.append((first, start, 0, count * first, count * sequences, earlier))
            earlier += count * sequences
        rows += [(0,) * 6] * (self.depth * self.batch - len(rows))
        return [list(column) for column in zip(*rows, strict=True)]

    def _owners(self, prefixes: Sequence[PrefixSegment]) -> tuple[list[int], list[int]]:
        """Returns the shared segments of all queries, and the first entry of each query."""
        owners, starts = list[int](), [0]
        for b in range(self.batch):
            seen = [n for n, each in enumerate(prefixes) if 0 <= b - each.first < each.rows]
            for _ in range(self.count):
                owners += seen
                starts.append(len(owners))
        return owners, starts

    def set(self, prefixes: Sequence[PrefixSegment], ends: Sequence[int]) -> None:
        """Writes shared prefixes, at most ``depth`` of a sequence, and where those of each sequence end."""
        self.own.segments.copy_(torch.tensor(self._own_columns(ends), dtype=torch.int32, device="cpu"))
        shared, (owners, starts) = self.shared, self._owners(prefixes)
        shared.segments.copy_(torch.tensor(self._shared_columns(prefixes), dtype=torch.int32, device="cpu"))
        shared.owners[: len(owners)] = torch.tensor(owners, dtype=torch.int32, device="cpu")
        shared.owner_start.copy_(torch.tensor(starts, dtype=torch.int32, device="cpu"))
        lengths = torch.zeros(self.depth * self.batch, dtype=torch.int32, device="cpu")
        lengths[: len(prefixes)] = torch.tensor(
            [each.length for each in prefixes], dtype=torch.int32, device="cpu"
        )
        shared.lengths.copy_(lengths)
        self.prefixes = [each for each in prefixes if each.length]

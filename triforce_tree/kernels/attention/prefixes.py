"""Plans of attention whose sequences share prefixes, each of which is read once."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from triforce_tree.kernels.attention.plan import Heads, planned


class PrefixSegment(NamedTuple):
    """A shared prefix in ``length`` slots from ``place`` on; ``rows`` sequences from ``first`` on see it."""

    place: int
    length: int
    first: int
    rows: int


class PrefixPlan:
    """A plan for T queries of each of B sequences with shared prefixes, which are read once.

    Shared prefixes and the remaining slots of each sequence are runs of slots. A prefix is one segment, which
    the queries of its sequences see, and the own slots of each sequence are another segment (cascade
    inference; Hydragen, arXiv 2402.05099; DeFT-Flatten, arXiv 2404.00242, section 3.3). The kernel merges the
    partial outputs of a query. Captured graphs may hold ``plan``, whose buffers :meth:`set` changes in place.

    Args:
        heads: heads of the attention.
        mask: bool ``[T, N]`` over the last N positions of a sequence.
        batch: B.
        depth: largest number of shared prefixes of a sequence; the plan has ``depth * B`` segments for them.
        lengths: int32 ``[B + depth * B]``; positions of each sequence between its prefixes and the tail, then
            lengths of shared prefixes, which :meth:`set` writes.
        words: int64 ``[B * T, words]``, the mask words that the kernel reads.

    Attributes:
        plan: plan of all segments: the own slots of each sequence, then the shared prefixes.
        batch, depth, count, tail: B, ``depth``, T and N.
        prefixes, places: last arguments of :meth:`set`, on the host.
    """

    def __init__(
        self, heads: Heads, mask: Tensor, batch: int, depth: int, lengths: Tensor, words: Tensor
    ) -> None:
        self.batch, self.depth = batch, depth
        self.count, self.tail = mask.shape
        # The largest possible number of queries of segments gives the size of a backend's workspace.
        nominal = [PrefixSegment(0, 0, 0, batch)] * depth
        zeros, places = [0] * (batch + depth * batch), [0] * batch
        columns = self._columns(nominal, places)
        made = planned(heads, columns, zeros, *self._owners(nominal), words, lengths.device)
        self.plan = replace(made, lengths=lengths)
        self.prefixes: list[PrefixSegment] = []
        self.places = places
        self.set((), places)

    def _columns(self, prefixes: Sequence[PrefixSegment], own: Sequence[int]) -> list[list[int]]:
        batch, count = self.batch, self.count
        rows = [(0, place, self.tail, count * b, count, count * b) for b, place in enumerate(own)]
        earlier = batch * count
        for place, _, first, sequences in prefixes:
            rows.append((0, place, 0, count * first, count * sequences, earlier))
            earlier += count * sequences
        rows += [(0,) * 6] * (batch + self.depth * batch - len(rows))
        return [list(column) for column in zip(*rows, strict=True)]

    def _owners(self, prefixes: Sequence[PrefixSegment]) -> tuple[list[int], list[int]]:
        """Returns the segments of all queries, and the first entry of each query."""
        owners, starts = list[int](), [0]
        for b in range(self.batch):
            seen = [self.batch + n for n, each in enumerate(prefixes) if 0 <= b - each.first < each.rows]
            for _ in range(self.count):
                owners += [*seen, b]
                starts.append(len(owners))
        return owners, starts

    def set(self, prefixes: Sequence[PrefixSegment], own: Sequence[int]) -> None:
        """Writes the shared prefixes, at most ``depth`` of a sequence, and the first own slot of each."""
        plan, segments = self.plan, torch.tensor(self._columns(prefixes, own), dtype=torch.int32)
        plan.segments.copy_(segments)
        owners, starts = self._owners(prefixes)
        plan.owners[: len(owners)] = torch.tensor(owners, dtype=torch.int32)
        plan.owner_start.copy_(torch.tensor(starts, dtype=torch.int32))
        lengths = torch.zeros(self.depth * self.batch, dtype=torch.int32)
        lengths[: len(prefixes)] = torch.tensor([each.length for each in prefixes], dtype=torch.int32)
        plan.lengths[self.batch :].copy_(lengths)
        self.prefixes, self.places = [each for each in prefixes if each.length], list(own)

"""Plans of segments that change between forwards: nodes of a tree of texts, and shared prefixes.

Each node of a tree has its own pages of keys and values, which all texts of its subtree share. The queries
are in depth-first order, so that the queries which see a node are a range, and one call attends to all nodes
(DeFT-Flatten, arXiv 2404.00242, section 3.3).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from triforce_tree.kernels.attention import reference
from triforce_tree.kernels.attention.configs import config_for
from triforce_tree.kernels.attention.plan import (
    KV,
    AttentionParams,
    Heads,
    Plan,
    pack_mask,
    planned,
    unpack_mask,
)


class Segment(NamedTuple):
    """KV positions of one node and the range of queries that see them.

    Attributes:
        node: row of the page table, one for each node.
        length: number of positions, from the first of the node, that all these queries see.
        tail: number of positions after them, 0 or ``queries``; query ``first + i`` sees the first ``i + 1``.
        first, queries: first query and number of queries.
    """

    node: int
    length: int
    tail: int
    first: int
    queries: int


class NodePlan:
    """A plan with a largest number of queries and of segments; :meth:`set` describes one forward.

    Captured graphs may hold ``plan``: its buffers keep their addresses, and segments that a forward does not
    use are empty.

    Args:
        heads: heads of the attention.
        queries, segments: largest numbers in a forward.
        owners: largest number of pairs of a query and a segment that it sees.
        tail: largest number of positions of a segment's tail.
        device, dtype: of queries, keys and values.

    Attributes:
        plan: argument of a backend's ``segments``.
    """

    def __init__(
        self,
        heads: Heads,
        queries: int,
        segments: int,
        owners: int,
        tail: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        # A segment with more queries than a tile is divided into pieces, which run at the same time and share
        # KV through L2.
        block = config_for(queries * heads.group, heads, dtype, device).block_m
        self._most = max(1, min(queries, block // heads.group))
        # There are at least two, because the kernel reads a single segment as a whole sequence.
        count = max(2, segments + owners // self._most)
        sizes = (count, 6 * count, queries + 1, owners)
        ends = [0]
        for size in sizes:
            # Every part is aligned to 16 bytes, because Triton specialises kernels on the alignment of
            # pointers.
            ends.append(ends[-1] + -(-size // 4) * 4)
        self._host = torch.zeros(ends[-1], dtype=torch.int32)
        self._device = torch.zeros(ends[-1], dtype=torch.int32, device=device)
        self._parts = [slice(start, start + size) for start, size in zip(ends, sizes, strict=False)]
        lengths, columns, owner_start, owner = (self._device[part] for part in self._parts)
        self._tail = tail
        self.plan = Plan(
            heads=heads,
            queries=queries,
            lengths=lengths,
            segments=columns.view(6, count),
            mask=torch.zeros(queries, max(1, -(-tail // 64)), dtype=torch.int64, device=device),
            owner_start=owner_start,
            owners=owner,
            seen=owners,
            max_queries=self._most,
        )

    def set(self, segments: Sequence[Segment]) -> None:
        """Writes the segments of the next forward.

        Raises:
            ValueError: more segments, pairs of queries and segments, or tail positions than planned.
        """
        pieces = [
            (segment, first, min(first + self._most, segment.first + segment.queries))
            for segment in segments
            for first in range(segment.first, segment.first + segment.queries, self._most)
        ]
        queries, capacity = self.plan.queries, self.plan.lengths.shape[0]
        seen: list[list[int]] = [[] for _ in range(queries)]
        columns: list[list[int]] = [[] for _ in range(7)]
        earlier = 0
        for number, (segment, first, stop) in enumerate(pieces):
            row = (segment.length, segment.node, 0, segment.tail, first, stop - first, earlier)
            for column, value in zip(columns, row, strict=True):
                column.append(value)
            earlier += stop - first
            for query in range(first, stop):
                seen[query].append(number)
        tail = max((segment.tail for segment in segments), default=0)
        if len(pieces) > capacity or earlier > self.plan.owners.shape[0] or tail > self._tail:
            raise ValueError(
                f"{len(pieces)} segments, {earlier} pairs of a query and a segment, tails of {tail} exceed "
                f"the plan's {capacity}, {self.plan.owners.shape[0]} and {self._tail}; make a larger plan"
            )
        starts = [0]
        for own in seen:
            starts.append(starts[-1] + len(own))
        self._host.zero_()
        lengths, table, owner_start, owner = (self._host[part] for part in self._parts)
        lengths[: len(pieces)] = torch.tensor(columns[0], dtype=torch.int32)
        table.view(6, capacity)[:, : len(pieces)] = torch.tensor(columns[1:], dtype=torch.int32)
        owner_start.copy_(torch.tensor(starts, dtype=torch.int32))
        owner[:earlier] = torch.tensor([piece for own in seen for piece in own], dtype=torch.int32)
        self._device.copy_(self._host)
        for segment in segments:
            if segment.tail:
                causal = torch.ones(segment.queries, segment.tail, dtype=torch.bool).tril()
                words = pack_mask(causal, self.plan.mask.shape[1])
                self.plan.mask[segment.first : segment.first + segment.queries] = words.to(
                    self._device.device
                )


def definition(q: Tensor, kv: KV, made: Plan, params: AttentionParams) -> tuple[Tensor, Tensor]:
    """Computes the attention of a backend's ``segments`` in plain torch.

    It attends to each segment and merges the partial outputs (DeFT, section 3.2).
    """
    assert kv.table is not None
    page = kv.k.shape[2]
    out = q.new_zeros(*q.shape[:2], kv.v.shape[3], dtype=torch.float32)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    for length, (node, _, tail, first, count, _) in zip(
        made.lengths.tolist(), made.segments.T.tolist(), strict=True
    ):
        if not count or not length + tail:
            continue
        own, positions = slice(first, first + count), torch.arange(length + tail, device=q.device)
        slots = kv.table[node].long()[positions // page], slice(None), positions % page
        keys, values = (t[slots].transpose(0, 1)[None] for t in (kv.k, kv.v))
        mask = unpack_mask(made.mask[own])[:, :tail]
        part, part_lse = reference.tree_attention(
            q[own].transpose(0, 1)[None], keys, values, mask, scale=params.scale, softcap=params.softcap
        )
        outs = torch.stack([out[own], part[0].transpose(0, 1).float()])
        lses = torch.stack([lse[own], part_lse[0].transpose(0, 1)])
        out[own], lse[own] = reference.merge_states(outs, lses)
    if params.sinks is not None:
        total = torch.logaddexp(lse, params.sinks.float())
        out, lse = out * (lse - total).exp()[..., None], total
    return out.to(q.dtype), lse


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

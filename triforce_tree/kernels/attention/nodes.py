"""Attention over tree-shaped KV whose shape changes from step to step: a plan in fixed buffers, and its
definition in plain torch.

Each node of the tree keeps its keys and values in pages of its own, once for all texts that go through it.
The queries are in depth-first order, so that those which see a node are a range: DeFT-Flatten (arXiv
2404.00242, section 3.3) over all nodes in one call.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from triforce_tree.kernels.attention import reference
from triforce_tree.kernels.attention.plan import (
    Heads,
    Plan,
    _make,
    config_for,
    pack_mask,
    plan_trees,
    slices_for,
)
from triforce_tree.kernels.cpu.host import gathered_rows, tail_mask
from triforce_tree.kernels.cpu.host_nodes import node_attention
from triforce_tree.kernels.cpu.host_prefix import HostPrefixPlan, prefix_attention


class Segment(NamedTuple):
    """KV positions of one node, and the range of queries that sees them.

    Attributes:
        node: row of the page table.
        length: positions, from the node's first, that all these queries see.
        tail: positions after them; query ``first + i`` sees the first ``i + 1`` of them. 0, or ``queries``.
        first, queries: the range.
    """

    node: int
    length: int
    tail: int
    first: int
    queries: int


class NodePlan:
    """A plan for up to so many queries over up to so many segments; :meth:`set` describes one forward.

    Captured graphs may hold ``plan``: its buffers keep their addresses, and what a forward does not use is
    empty.

    Args:
        heads: of the attention.
        queries, segments: most of each in a forward.
        owners: most pairs of a query and a segment that it sees.
        tail: most positions of a segment's tail.
        device, dtype: of queries and KV.

    Attributes:
        plan: for ``launch.run``.
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
        config = config_for(queries * heads.group, heads, dtype, device)
        # A segment with more queries is cut into pieces, which run side by side and share KV through L2.
        self._most = max(1, min(queries, config.block_m // heads.group))
        # At least two: the kernel treats a single segment as a whole sequence.
        count = max(2, segments + owners // self._most)
        slices = slices_for(self._most * heads.group, device, config)
        sizes = (count, 6 * count, queries + 1, owners)
        ends = [0]
        for size in sizes:
            # Aligned to 16 bytes: Triton specialises kernels on the alignment of their pointers.
            ends.append(ends[-1] + -(-size // 4) * 4)
        self._host = torch.zeros(ends[-1], dtype=torch.int32)
        self._device = torch.zeros(ends[-1], dtype=torch.int32, device=device)
        self._parts = [slice(start, start + size) for start, size in zip(ends, sizes, strict=False)]
        lengths, columns, owner_start, owner = (self._device[part] for part in self._parts)
        pieces = (owners * heads.kv + slices * self._most) * heads.group
        exact = dtype == torch.float32
        self._tail = tail
        self.plan = Plan(
            heads=heads,
            config=config,
            queries=queries,
            lengths=lengths,
            segments=columns.view(6, count),
            mask=torch.zeros(queries, max(1, -(-tail // 64)), dtype=torch.int64, device=device),
            owner_start=owner_start,
            owners=owner,
            partial_out=torch.empty(pieces, heads.value_dim, dtype=torch.float32, device=device),
            partial_lse=torch.empty(pieces, dtype=torch.float64 if exact else torch.float32, device=device),
            bounds=torch.empty(count * heads.kv, 2, dtype=torch.int32, device=device),
            slices=slices,
            max_queries=self._most,
        )

    def set(self, segments: Sequence[Segment]) -> None:
        """Describe the coming forward.

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


def states(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: NodePlan,
    *,
    scale: float,
    table: Tensor,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of all queries over the nodes that they see: the Triton kernel on CUDA, else ``host_nodes``.

    Args:
        q: ``[T, H_q, D]``; T is the plan's number of queries, or less on the CPU.
        k, v: pages ``[pages, H_kv, page, D]`` and ``[pages, H_kv, page, D_v]``.
        table: int32 ``[nodes, pages of a node]``.
        scale, softcap, sinks: as for ``launch.run``.

    Returns:
        out ``[T, H_q, D_v]`` in q's dtype and natural-log lse fp32 ``[T, H_q]``; (0, -inf) for a query that
        sees nothing.
    """
    if q.is_cuda:
        from triforce_tree.kernels.attention import launch

        return launch.run(q, k, v, plan.plan, scale=scale, table=table, softcap=softcap, sinks=sinks)
    return node_attention(q, k, v, plan.plan, scale=scale, table=table, softcap=softcap, sinks=sinks)


def definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: NodePlan,
    *,
    scale: float,
    table: Tensor,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`states` in plain torch: attention over each segment, merged (DeFT, section 3.2)."""
    kv_heads, made = k.shape[1], plan.plan
    out = q.new_zeros(*q.shape[:2], v.shape[3], dtype=torch.float32)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    for length, (node, _, tail, first, count, _) in zip(
        made.lengths.tolist(), made.segments.T.tolist(), strict=True
    ):
        if not count or not length + tail:
            continue
        own, pages = slice(first, first + count), table[node].expand(kv_heads, -1)
        keys, values = (gathered_rows(t, pages, 0, length + tail) for t in (k, v))
        mask = tail_mask(made.mask[own], tail)
        queries = q[own].transpose(0, 1)[None]
        part, part_lse = reference.tree_attention(queries, keys, values, mask, scale=scale, softcap=softcap)
        outs = torch.stack([out[own], part[0].transpose(0, 1).float()])
        lses = torch.stack([lse[own], part_lse[0].transpose(0, 1)])
        out[own], lse[own] = reference.merge_states(outs, lses)
    if sinks is not None:
        total = torch.logaddexp(lse, sinks.float())
        out, lse = out * (lse - total).exp()[..., None], total
    return out.to(q.dtype), lse


class PrefixSegment(NamedTuple):
    """``length`` slots from ``place`` on, which all queries of ``rows`` sequences from ``first`` on see."""

    place: int
    length: int
    first: int
    rows: int


class PrefixPlan:
    """Attention of T queries of each of B sequences, several of which begin alike: their prefix is read once.

    Prefixes, and what each sequence has after them, are runs of slots. A prefix is one segment, seen by the
    queries of its sequences, and each sequence's own slots are another (cascade inference; Hydragen, arXiv
    2402.05099; DeFT-Flatten, arXiv 2404.00242, section 3.3), which the kernel merges as it merges slices.
    Captured graphs may hold ``plan``: :meth:`set` changes its buffers in place.

    Args:
        heads: of the attention.
        mask: bool ``[T, N]`` over the last N positions of a sequence.
        batch: B.
        depth: most prefixes of one sequence; ``depth * B`` segments are read once.
        lengths: int32 ``[B + depth * B]``, positions of each sequence between its prefixes and the tail, then
            of each segment, which :meth:`set` writes.
        words: int64 ``[B * T, words]``, the mask that is read.
        dtype, kv_dtype: of queries, and of keys and values.
    """

    def __init__(
        self,
        heads: Heads,
        mask: Tensor,
        batch: int,
        depth: int,
        lengths: Tensor,
        words: Tensor,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
    ) -> None:
        self._batch, self._depth = batch, depth
        (self._count, self._tail), device = mask.shape, lengths.device
        rows = batch * self._count
        config = config_for(rows * heads.group, heads, dtype, device, kv_dtype)
        # As many queries of segments as there can be, for the size of the workspace.
        nominal = [PrefixSegment(0, 0, 0, batch)] * depth
        zeros, own = [0] * (batch + depth * batch), [0] * batch
        columns = self._columns(nominal, own)
        made = _make(heads, columns, zeros, *self._owners(nominal), rows, device, dtype, config)
        self.plan = replace(made, lengths=lengths, mask=words)
        self._host: HostPrefixPlan | None = None
        if device.type == "cpu":
            alone = plan_trees(heads, [mask], [0], device=device, dtype=dtype)
            parts = zip(lengths[:batch].split(1), words.split(self._count), strict=True)
            self._host = HostPrefixPlan([replace(alone, lengths=one, mask=seen) for one, seen in parts])
        self.set((), own)

    def _columns(self, prefixes: Sequence[PrefixSegment], own: Sequence[int]) -> list[list[int]]:
        batch, count = self._batch, self._count
        rows = [(0, place, self._tail, count * b, count, count * b) for b, place in enumerate(own)]
        earlier = batch * count
        for place, _, first, sequences in prefixes:
            rows.append((0, place, 0, count * first, count * sequences, earlier))
            earlier += count * sequences
        rows += [(0,) * 6] * (batch + self._depth * batch - len(rows))
        return [list(column) for column in zip(*rows, strict=True)]

    def _owners(self, prefixes: Sequence[PrefixSegment]) -> tuple[list[int], list[int]]:
        """The segments of all queries, and where those of each begin."""
        owners, starts = list[int](), [0]
        for b in range(self._batch):
            seen = [self._batch + n for n, each in enumerate(prefixes) if 0 <= b - each.first < each.rows]
            for _ in range(self._count):
                owners += [*seen, b]
                starts.append(len(owners))
        return owners, starts

    def set(self, prefixes: Sequence[PrefixSegment], own: Sequence[int]) -> None:
        """Describe the prefixes, at most ``depth`` of a sequence; ``own``: its first slots after them."""
        plan, segments = self.plan, torch.tensor(self._columns(prefixes, own), dtype=torch.int32)
        plan.segments.copy_(segments)
        owners, starts = self._owners(prefixes)
        plan.owners[: len(owners)] = torch.tensor(owners, dtype=torch.int32)
        plan.owner_start.copy_(torch.tensor(starts, dtype=torch.int32))
        lengths = torch.zeros(self._depth * self._batch, dtype=torch.int32)
        lengths[: len(prefixes)] = torch.tensor([each.length for each in prefixes], dtype=torch.int32)
        plan.lengths[self._batch :].copy_(lengths)
        if self._host is not None:
            self._host.prefixes, self._host.places = [each for each in prefixes if each.length], list(own)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention with this plan; q may hold fewer queries a sequence than T on the CPU.

        Args:
            q: ``[B * T, H_q, D]``.
            k, v: ``[1, H_kv, S, D]``, D_v for D in v.
            scale, softcap, sinks, scales: as for ``launch.run``.

        Returns:
            out ``[B * T, H_q, D_v]`` and natural-log lse fp32 ``[B * T, H_q]``.
        """
        if q.is_cuda:
            from triforce_tree.kernels.attention import launch

            return launch.run(q, k, v, self.plan, scale=scale, softcap=softcap, sinks=sinks, scales=scales)
        assert self._host is not None
        stored = [k, v, *(scales or ())]
        return prefix_attention(q, stored, self._host, scale=scale, softcap=softcap, sinks=sinks)

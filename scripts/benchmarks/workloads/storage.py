"""Keys and values of a workload's nodes, and the layouts that ways of attending to them need."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from scripts.benchmarks.attention.problems import copies_of
from scripts.benchmarks.workloads.shapes import Workload
from triforce_tree.branching.layout import Feed, Layout, arranged
from triforce_tree.branching.node import Node
from triforce_tree.kernels.attention import reference
from triforce_tree.kernels.attention.plan import Heads


@dataclass(frozen=True)
class Problem:
    """One attention call over a workload.

    Attributes:
        page: KV slots of a page.
        device, dtype: of queries, keys and values.
    """

    workload: Workload
    heads: Heads
    page: int
    device: torch.device
    dtype: torch.dtype

    @property
    def scale(self) -> float:
        return float(self.heads.dim**-0.5)

    @property
    def slot_bytes(self) -> int:
        """Returns the bytes of one position's keys and values."""
        return self.heads.row * self.dtype.itemsize

    def bytes(self, positions: int) -> int:
        """Returns the bytes that are read and written if so many KV positions are read."""
        ends = self.workload.queries * self.heads.query * (self.heads.dim + self.heads.value_dim)
        return positions * self.slot_bytes + ends * self.dtype.itemsize

    @cached_property
    def layout(self) -> Layout:
        """Returns the engine's layout of a forward with one token at each node that asks."""
        made: list[Node] = []
        for parent, length in zip(self.workload.parents, self.workload.lengths, strict=True):
            node = Node(made[parent] if parent >= 0 else None, [0] * length)
            node.stored = length
            made.append(node)
        asking = [node for node, asks in zip(made, self.workload.asks, strict=True) if asks]
        return arranged([Feed(node, len(node.tokens) - 1, 1) for node in asking])

    @cached_property
    def lengths(self) -> list[int]:
        """Returns the number of positions of each of the layout's nodes."""
        return [len(node.tokens) for node in self.layout.nodes]

    @cached_property
    def starts(self) -> list[int]:
        """Returns the first row of each of the layout's nodes in :meth:`rows`."""
        return [0, *accumulate(self.lengths)][:-1]

    @cached_property
    def runs(self) -> list[Tensor]:
        """Returns the rows of each of the layout's nodes in :meth:`rows`, int64."""
        return [
            torch.arange(start, start + n, device=self.device)
            for start, n in zip(self.starts, self.lengths, strict=True)
        ]

    @cached_property
    def paths(self) -> list[Tensor]:
        """Returns the rows that each query sees, int64, in the layout's order of queries."""
        place = {node: number for number, node in enumerate(self.layout.nodes)}
        return [torch.cat([self.runs[place[node]] for node in feed.node.path]) for feed in self.layout.feeds]

    @cached_property
    def queries(self) -> Tensor:
        """Returns random queries ``[T, H_q, D]``."""
        shape = (self.workload.queries, self.heads.query, self.heads.dim)
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    @cached_property
    def expected(self) -> Tensor:
        """Returns attention over ``rows(0)`` in plain torch, ``[T, H_q, D_v]``."""
        k, v = self.rows(0)
        nothing = torch.ones(1, 0, dtype=torch.bool, device=self.device)
        outs = []
        for q, path in zip(self.queries, self.paths, strict=True):
            keys, values = k[None, :, path], v[None, :, path]
            out, _ = reference.tree_attention(q[None, :, None], keys, values, nothing, scale=self.scale)
            outs.append(out[0, :, 0])
        return torch.stack(outs)

    def copies(self, positions: int) -> int:
        """Returns how many copies of so many positions are larger than the L2 cache."""
        return copies_of(positions * self.slot_bytes, self.device)

    def rows(self, seed: int) -> tuple[Tensor, Tensor]:
        """Returns random K ``[H_kv, rows, D]`` and V ``[H_kv, rows, D_v]`` of all nodes, each once."""
        generator = torch.Generator(self.device).manual_seed(seed)

        def made(dim: int) -> Tensor:
            shape = (self.heads.kv, self.workload.stored, dim)
            return torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)

        return made(self.heads.dim), made(self.heads.value_dim)


def in_pages(source: Tensor, runs: Sequence[Tensor], page: int) -> Tensor:
    """Returns rows ``[H, rows, D]`` copied into pages ``[pages, H, page, D]``. Each run begins a page."""
    counts = [-(-len(run) // page) for run in runs]
    store = source.new_zeros(source.shape[0], sum(counts) * page, source.shape[2])
    firsts = [0, *accumulate(count * page for count in counts)]
    slots = torch.cat(
        [torch.arange(first, first + len(run)) for first, run in zip(firsts, runs, strict=False)]
    )
    slots, wanted = slots.to(source.device), torch.cat([*runs])
    # Head by head: no second copy of all heads is made.
    for own, given in zip(store, source, strict=True):
        own.index_copy_(0, slots, given[wanted])
    return store.view(source.shape[0], sum(counts), page, source.shape[2]).transpose(0, 1)


def page_table(lengths: Sequence[int], page: int, device: torch.device) -> Tensor:
    """Returns the page table of :func:`in_pages`, int32 ``[runs, pages of the longest]``."""
    counts = [-(-length // page) for length in lengths]
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    first = 0
    for row, count in zip(table, counts, strict=True):
        row[:count] = torch.arange(first, first + count)
        first += count
    return table.to(device)

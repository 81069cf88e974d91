"""Plans of attention to trees of texts by blocks of queries, in buffers that captured graphs may hold.

The queries are in depth-first order. A block holds the queries of neighbouring leaves that fill a tile. The
KV positions that any query of a block sees form one list of tiles: whole tiles of long nodes, and tiles that
gather the remaining positions of all nodes. The plan holds the range of queries that see each whole tile and
each gathered position. So a block has one softmax over all nodes on its paths, and short nodes share tiles,
as in DeFT-Flatten (arXiv 2404.00242, section 3.3). If several blocks see a node, each reads it, at about the
same time, through L2.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from triforce_tree.kernels.attention.configs import EDGE, KernelConfig, config_for, slices_for
from triforce_tree.kernels.attention.plan import Heads
from triforce_tree.runtime.devices import pinned

# The index of a query has 16 bits of a signed entry.
_MOST_QUERIES = 2**15 - 1
_COLUMNS = 4


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


class Schedule(NamedTuple):
    """Buffers of a plan that the kernels read; all are int32 except the last two.

    Attributes:
        shares: ``[slices + 1]``, first tile of each slice in the list of all (block, KV head, tile), and
            number of all tiles.
        begins: ``[slices]``, block in which each slice begins.
        columns: ``[4, blocks]``: first whole tile, number of whole tiles, first gathered tile, and number of
            tiles of all earlier blocks in one KV head.
        bounds: ``[blocks, H_kv, 2]``, first and last slice with tiles of this block and head.
        whole: int64 ``[tiles + 1]``, first slot of each whole tile and the range of queries that see it, as
            ``slot | first << 32 | stop << 48``. The kernel reads one entry ahead.
        gathered: int64, slot and range of queries of each gathered position, in the same format.
    """

    shares: Tensor
    begins: Tensor
    columns: Tensor
    bounds: Tensor
    whole: Tensor
    gathered: Tensor


class BlockPlan:
    """A plan with a largest number of queries and of segments; :meth:`set` describes one forward.

    Args:
        heads: heads of the attention.
        queries, segments: largest numbers in a forward; at most 32,767 queries.
        owners: largest number of pairs of a query and a segment that it sees.
        tail: largest number of positions of a segment's tail.
        pages, page: number of KV pages of all nodes, and slots of a page.
        device, dtype: of queries, keys and values.

    Attributes:
        config: tiles of the kernel.
        schedule: buffers whose addresses never change; entries that a forward does not use are empty.
        partial_out: fp32 ``[(slices + blocks * H_kv) * block_m, D_v]``, workspace for partial outputs.
        partial_lse: fp32 or fp64 ``[(slices + blocks * H_kv) * block_m]``, for their log-sum-exps.

    Raises:
        ValueError: too many queries.
    """

    def __init__(
        self,
        heads: Heads,
        queries: int,
        segments: int,
        owners: int,
        tail: int,
        pages: int,
        page: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        if queries > _MOST_QUERIES:
            raise ValueError(f"{queries} queries exceed {_MOST_QUERIES}, the most of one plan; make several")
        self.heads, self.queries, self.page = heads, queries, page
        self.config = _paged(config_for(queries * heads.group, heads, dtype, device), page)
        # A whole tile is within a page. If tiles do not divide a page, all positions are gathered.
        self._tile = self.config.block_n if page % self.config.block_n == 0 else 0
        self.blocks = -(-queries * heads.group // self.config.block_m)
        self.slices = slices_for(self.config.block_m, device, self.config)
        # At most w * group / block_m + 2 blocks see a segment of w queries.
        pairs = 2 * segments + owners * heads.group // self.config.block_m
        # A block has the pages of a node once, or twice if the node has its own queries.
        seen = 2 * self.blocks * pages
        self._most_whole = seen * (page // self._tile) if self._tile else 0
        rest = pairs * (self._tile + tail) if self._tile else seen * page
        self._most_gathered = (-(-rest // self.config.block_n) + self.blocks) * self.config.block_n
        self._most_segments = segments
        units = self.blocks * heads.kv
        sizes = (self.slices + 1, self.slices, _COLUMNS * self.blocks, 2 * units)
        # Every part is aligned to 16 bytes, because Triton specialises kernels on the alignment of pointers.
        ends = [0]
        for size in sizes:
            ends.append(ends[-1] + -(-size // 4) * 4)
        self._parts = [slice(start, start + size) for start, size in zip(ends, sizes, strict=False)]
        self._device = torch.zeros(ends[-1], dtype=torch.int32, device=device)
        shares, begins, columns, bounds = (self._device[part] for part in self._parts)
        self.schedule = Schedule(
            shares,
            begins,
            columns.view(_COLUMNS, self.blocks),
            bounds.view(self.blocks, heads.kv, 2),
            torch.zeros(self._most_whole + 1, dtype=torch.int64, device=device),
            torch.zeros(self._most_gathered, dtype=torch.int64, device=device),
        )
        pieces = (self.slices + units) * self.config.block_m
        exact = dtype == torch.float32
        self.partial_out = torch.empty(pieces, heads.value_dim, dtype=torch.float32, device=device)
        self.partial_lse = torch.empty(pieces, dtype=torch.float64 if exact else torch.float32, device=device)
        self._ahead: _Planned | None = None
        self.set([], [])

    def set(self, segments: Sequence[Segment], pages: Sequence[Sequence[int]]) -> None:
        """Writes the schedule of the next forward.

        Args:
            segments: what its queries see.
            pages: KV pages of each node in ``segments``.

        Raises:
            ValueError: more segments, or more positions of all blocks, than planned.
        """
        known, self._ahead = self._ahead, None
        if known is None or known.segments != segments or known.pages != [*map(tuple, pages)]:
            known = self._planned(segments, pages)
        self._device.copy_(known.head, non_blocking=True)
        for buffer, own in zip(self.schedule[4:], (known.whole, known.gathered), strict=True):
            if len(own):
                buffer[: len(own)].copy_(own, non_blocking=True)

    def prepare(self, segments: Sequence[Segment], pages: Sequence[Sequence[int]]) -> None:
        """Plans a probable forward; :meth:`set` uses the result if its arguments are the same."""
        self._ahead = self._planned(segments, pages)

    def _planned(self, segments: Sequence[Segment], pages: Sequence[Sequence[int]]) -> "_Planned":
        lists = _lists(segments, pages, self.page, self._tile, self.heads.group, self.config)
        if (
            len(segments) > self._most_segments
            or len(lists.whole) > self._most_whole
            or len(lists.gathered) > self._most_gathered
        ):
            raise ValueError(
                f"{len(segments)} segments with {len(lists.whole)} tiles and {len(lists.gathered)} gathered "
                f"positions exceed the plan's {self._most_segments}, {self._most_whole} and "
                f"{self._most_gathered}; make a larger plan"
            )
        head = np.zeros(self._device.shape[0], dtype=np.int32)
        shares, begins, bounds = self._divided(lists.tiles)
        columns = np.zeros((_COLUMNS, self.blocks), dtype=np.int64)
        known = lists.tiles.shape[1]
        whole, rest = lists.tiles
        columns[0, :known], columns[1, :known] = np.cumsum(whole) - whole, whole
        columns[2, :known] = np.cumsum(rest) - rest
        columns[3] = _before(lists.tiles.sum(0), self.blocks)
        for part, own in zip(self._parts, (shares, begins, columns, bounds), strict=True):
            head[part] = own.reshape(-1)
        parts = (head, lists.whole, lists.gathered)
        buffers = (pinned(torch.from_numpy(part), self._device.device) for part in parts)
        return _Planned(list(segments), [*map(tuple, pages)], *buffers)

    def _divided(self, tiles: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns ``shares``, ``begins`` and ``bounds`` of a schedule with these tiles, ``[2, blocks]``."""
        kv = self.heads.kv
        counts = np.zeros(self.blocks, dtype=np.int64)
        counts[: tiles.shape[1]] = tiles.sum(0)
        stops = np.cumsum(counts) * kv
        # Slices without tiles write no partial output, so they come after all others.
        total = int(counts.sum()) * kv
        used = max(1, min(self.slices, total))
        shares = np.minimum(np.arange(self.slices + 1), used) * total // used
        begins = np.minimum(np.searchsorted(stops, shares[:-1], "right"), self.blocks - 1)
        first = (stops - counts * kv)[:, None] + np.arange(kv) * counts[:, None]
        bounds = np.stack([first, first + counts[:, None] - 1], -1)
        bounds = np.searchsorted(shares, bounds, "right") - 1
        bounds[counts == 0] = 0, -1
        return shares, begins, bounds


class _Planned(NamedTuple):
    """Arguments of a forward, and the values of its device buffers."""

    segments: list[Segment]
    pages: list[tuple[int, ...]]
    head: Tensor
    whole: Tensor
    gathered: Tensor


class _Lists(NamedTuple):
    """``whole`` and ``gathered`` of a schedule, and their numbers of tiles in each block, ``[2, blocks]``."""

    whole: np.ndarray
    gathered: np.ndarray
    tiles: np.ndarray


def _lists(
    segments: Sequence[Segment],
    pages: Sequence[Sequence[int]],
    page: int,
    tile: int,
    group: int,
    config: KernelConfig,
) -> _Lists:
    """Returns the tiles of all blocks in the order of blocks."""
    table = np.array(segments, dtype=np.int64).reshape(-1, len(Segment._fields))
    node, length, tail, first, count = table[table[:, 4] > 0].T
    # ``pair`` and ``block`` are all pairs of a segment and a block that sees it, in the order of blocks.
    begin = first * group // config.block_m
    spans = ((first + count) * group - 1) // config.block_m + 1 - begin
    pair = np.repeat(np.arange(len(spans)), spans)
    block = _within(spans) + begin[pair]
    order = np.argsort(block, kind="stable")
    pair, block = pair[order], block[order]
    blocks = int(block[-1]) + 1 if len(block) else 0

    places = np.concatenate([np.empty(0, np.int64), *map(np.asarray, pages)]).astype(np.int64)
    starts = _before(np.array([len(own) for own in pages], dtype=np.int64), len(pages))

    def entries(which: np.ndarray, positions: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Returns the entries of positions in segments ``which``, whose tails begin at position ``after``."""
        slots = places[starts[node[which]] + positions // page] * page + positions % page
        seen = first[which] + np.maximum(positions - after, 0)
        return slots | seen << 32 | (first + count)[which] << 48

    full = length // tile if tile else length * 0
    own = np.repeat(pair, full[pair])
    whole = entries(own, _within(full[pair]) * tile, length[own])
    left = (length - full * tile + tail)[pair]
    own = np.repeat(pair, left)
    found = entries(own, _within(left) + full[own] * tile, length[own])
    positions = np.bincount(block, left, blocks).astype(np.int64)
    tiles = -(-positions // config.block_n)
    gathered = np.zeros(int(tiles.sum()) * config.block_n, dtype=np.int64)
    gathered[_within(positions) + np.repeat((np.cumsum(tiles) - tiles) * config.block_n, positions)] = found
    return _Lists(whole, gathered, np.stack([np.bincount(block, full[pair], blocks).astype(np.int64), tiles]))


def _within(counts: np.ndarray) -> np.ndarray:
    """Returns 0 ... n - 1 for each n of ``counts``, concatenated."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _before(counts: np.ndarray, size: int) -> np.ndarray:
    """Returns the exclusive cumulative sum of ``counts``, which is first padded with zeros to ``size``."""
    padded = np.zeros(size, dtype=np.int64)
    padded[: len(counts)] = counts
    return np.cumsum(padded) - padded


def _paged(config: KernelConfig, page: int) -> KernelConfig:
    """Returns the configuration with tiles at most as long as a page, and with more programs at once."""
    while config.block_n > max(page, EDGE):
        config = replace(config, block_n=config.block_n // 2, programs_per_sm=2 * config.programs_per_sm)
    return config

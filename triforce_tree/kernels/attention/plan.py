"""Attention plans: lengths, masks and workspace of a forward in device buffers that captured graphs read.

A *segment* is a range of KV positions with the queries that see it: ``length`` positions visible to all of
them, then ``tail`` positions under the mask. One long prefix with a token tree is one segment; a ragged
batch of such trees is one per sequence; tree-shaped KV (few-shot prompting, multi-step reasoning)
is one per node, with leaf queries in depth-first order, so that each node's queries are a range.
The kernel divides the list of all (segment, KV head, tile) evenly over its programs: DeFT-Flatten
(arXiv 2404.00242, section 3.3) with slices of the size of a multiprocessor's share rather than of 128 tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from triforce_tree.kernels.attention.configs import EDGE, MOST_VALUES, KernelConfig, choose
from triforce_tree.kernels.device import describe


@dataclass(frozen=True)
class Heads:
    """Numbers of query and KV heads, and the elements of a head.

    Attributes:
        query, kv: heads, ``query`` a multiple of ``kv``.
        dim: D, elements of a query and of a key, at most 512 (576 where values have less).
        value_dim: D_v, elements of a value; 0 becomes ``dim``. They differ in multi-head latent attention
            (DeepSeek-V2, arXiv 2405.04434, section 2.1), whose keys have a rotary part of their own.
    """

    query: int
    kv: int
    dim: int
    value_dim: int = 0

    def __post_init__(self) -> None:
        if not self.value_dim:
            object.__setattr__(self, "value_dim", self.dim)
        if self.kv < 1 or self.query % self.kv:
            raise ValueError(
                f"{self.query} query heads do not divide into {self.kv} KV heads; "
                "make the first a multiple of the second"
            )

    @property
    def group(self) -> int:
        return self.query // self.kv

    @property
    def row(self) -> int:
        """Elements of one token's keys and values."""
        return self.kv * (self.dim + self.value_dim)

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys ``[..., H_kv, D]`` and values ``[..., H_kv, D_v]`` of rows ``[..., row]``, without a copy.

        A row holds the keys of all heads of a token, then their values.
        """
        keys, values = rows.split((self.kv * self.dim, self.kv * self.value_dim), -1)
        return keys.unflatten(-1, (self.kv, self.dim)), values.unflatten(-1, (self.kv, self.value_dim))


@dataclass(frozen=True)
class Plan:
    """Device buffers for one topology. Their addresses never change, so a captured graph may hold them.

    Attributes:
        lengths: int32 ``[segments]``, unmasked positions of each segment. Write it in place as contexts
            grow.
        segments: int32 ``[6, segments]``: sequence, first KV position, length of the tail, first query,
            queries, and queries of all earlier segments.
        mask: int64 mask words ``[queries, words]``; bit j of word w says that the query sees tail position
            ``64 w + j``.
        owner_start, owners: int32; query i belongs to segments
            ``owners[owner_start[i] : owner_start[i + 1]]``.
        partial_out, partial_lse, bounds: workspace of the two kernels.
        slices: equal parts that the tile list is divided into.
        max_queries: the largest number of queries of one segment.
    """

    heads: Heads
    config: KernelConfig
    queries: int
    lengths: Tensor
    segments: Tensor
    mask: Tensor
    owner_start: Tensor
    owners: Tensor
    partial_out: Tensor
    partial_lse: Tensor
    bounds: Tensor
    slices: int
    max_queries: int


class FirstVisible(NamedTuple):
    """First visible KV positions under a sliding window: int32 buffers, rewritten before each forward.

    Attributes:
        first: ``[queries]``, the first visible position of each query, at most its segment's length.
        low, high: ``[segments]``, the minimum and maximum of ``first`` over a segment's queries.
    """

    first: Tensor
    low: Tensor
    high: Tensor


def pack_mask(mask: Tensor, words: int | None = None) -> Tensor:
    """Pack bool ``[T, N]`` into int64 mask words ``[T, words]`` on its device; ceil(N / 64) words if None."""
    queries, tail = mask.shape
    needed = max(1, -(-tail // 64))
    words = words or needed
    if words < needed:
        raise ValueError(
            f"a mask over {tail} tail positions does not fit {words} mask words of 64 bits; "
            f"plan for {needed} words"
        )
    bits = torch.zeros(queries, words * 64, dtype=torch.bool, device=mask.device)
    bits[:, :tail] = mask
    if mask.device.type == "cpu":
        import numpy

        packed = numpy.packbits(bits.numpy(), axis=1, bitorder="little").view(numpy.int64)
        return torch.from_numpy(packed)
    place = torch.arange(64, device=mask.device)
    return (bits.view(queries, words, 64).long() << place).sum(-1)


def unpack_mask(words: Tensor) -> Tensor:
    """The bits of int64 mask words ``[..., W]``: bool ``[..., 64 W]``."""
    return (words[..., None] >> torch.arange(64, device=words.device) & 1).flatten(-2).bool()


def plan_trees(
    heads: Heads,
    masks: Sequence[Tensor],
    lengths: Sequence[int] | Tensor,
    *,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    config: KernelConfig | None = None,
    slices: int | None = None,
    kv_dtype: torch.dtype | None = None,
    page: int = 0,
) -> Plan:
    """Plan a batch of token trees, each after a prefix of its own.

    Args:
        heads: of the attention.
        masks: per sequence, bool ``[T_b, N_b]`` over the sequence's last N_b positions (T_b may differ).
        lengths: ``[B]`` positions before the tail.
        device, dtype: of queries and KV.
        config: tile shapes; from the table when None.
        slices: equal parts that the list is divided into; one per program of the device when None.
        kv_dtype: of keys and values where it is not ``dtype``: int8.
        page: KV slots of a page, for which the tiles are chosen; 0 for none.
    """
    counts = [m.shape[0] for m in masks]
    config = config or config_for(max(counts) * heads.group, heads, dtype, device, kv_dtype, page)
    tails = [m.shape[1] for m in masks]
    total, words = sum(counts), max(1, -(-max(tails) // 64))
    packed = [pack_mask(m, words).to(device) for m in masks]
    firsts = _running(counts)
    columns = [list(range(len(counts))), [0] * len(counts), tails, firsts, counts, firsts]
    owners = [s for s, count in enumerate(counts) for _ in range(count)]
    starts = list(range(total + 1))
    made = _make(heads, columns, lengths, owners, starts, total, device, dtype, config, slices)
    return replace(made, mask=packed[0] if len(packed) == 1 else torch.cat(packed))


def plan_pieces(
    heads: Heads, queries: int, query_rows: int, most: int, *, device: torch.device | str, dtype: torch.dtype
) -> list[Plan]:
    """Plan 1 to ``most`` pieces of ``positions`` KV positions, each seen by its own copy of the queries.

    A piece gives the same bits whatever the number of pieces: the number of slices divides the tiles of a
    piece, so that no slice spans two pieces, and every piece is divided like the first.

    Args:
        heads: of the attention.
        queries: of each piece.
        device, dtype: of queries and KV.

    Returns:
        plans for 1, 2, ... pieces. They share one workspace, so they must run on one stream.
    """
    config = replace(config_for(queries * heads.group, heads, dtype, device), align=0)
    # The tiles that ``schedule.spans`` computes.
    full, ragged = divmod(query_rows, config.block_n)
    tiles = heads.kv * max(1, full + -(-ragged // EDGE))
    limit = min(tiles, slices_for(queries * heads.group, device, config))
    cuts = next(cuts for cuts in range(limit, 0, -1) if tiles % cuts == 0)
    masks = [torch.ones(queries, 0, dtype=torch.bool)] * most
    plan = plan_trees(
        heads, masks, [query_rows] * most, device=device, dtype=dtype, config=config, slices=most * cuts
    )
    return [
        replace(
            plan,
            queries=count * queries,
            lengths=plan.lengths[:count],
            segments=plan.segments[:, :count].contiguous(),
            slices=count * cuts,
        )
        for count in range(1, most + 1)
    ]


def _running(counts: Sequence[int]) -> list[int]:
    sums = [0]
    for count in counts[:-1]:
        sums.append(sums[-1] + count)
    return sums


def _make(
    heads: Heads,
    columns: list[list[int]],
    lengths: Sequence[int] | Tensor,
    owners: list[int],
    owner_start: list[int],
    queries: int,
    device: torch.device | str,
    dtype: torch.dtype,
    config: KernelConfig | None,
    slices: int | None = None,
) -> Plan:
    counts = columns[4]
    most = max(counts)
    query_rows = most * heads.group
    config = config or config_for(query_rows, heads, dtype, device)
    units = len(counts) * heads.kv
    slices = slices or slices_for(query_rows, device, config)
    pieces = (sum(counts) * heads.kv + slices * most) * heads.group

    # One transfer for all integers, so that a plan costs less than the launches that it saves.
    flat: list[int] = []
    spans = []
    known = [0] * len(counts) if isinstance(lengths, Tensor) else lengths
    for part in (known, [x for column in columns for x in column], owner_start, owners):
        spans.append(slice(len(flat), len(flat) + len(part)))
        # Aligned to 16 bytes: Triton specialises kernels on the alignment of their pointers.
        flat += [*part, *[0] * (-len(part) % 4)]
    table = torch.tensor(flat, dtype=torch.int32).to(device)
    device_lengths, segments, device_owner_start, device_owners = (table[span] for span in spans)
    if isinstance(lengths, Tensor):
        device_lengths.copy_(lengths)
    return Plan(
        heads=heads,
        config=config,
        queries=queries,
        lengths=device_lengths,
        segments=segments.view(6, len(counts)),
        mask=torch.zeros(queries, 1, dtype=torch.int64, device=device),
        owner_start=device_owner_start,
        owners=device_owners,
        partial_out=torch.empty(pieces, heads.value_dim, dtype=torch.float32, device=device),
        # For fp32 inputs a base-2 log-sum-exp in fp32 would lose more precision than the sum itself.
        partial_lse=torch.empty(
            pieces, dtype=torch.float64 if dtype == torch.float32 else torch.float32, device=device
        ),
        bounds=torch.empty(units, 2, dtype=torch.int32, device=device),
        slices=slices,
        max_queries=most,
    )


def config_for(
    query_rows: int,
    heads: Heads,
    dtype: torch.dtype,
    device: torch.device | str,
    kv_dtype: torch.dtype | None = None,
    page: int = 0,
) -> KernelConfig:
    """The configuration from the table; on the CPU, where plans hold one too, heads may exceed its limit."""
    dim, value_dim = heads.dim, heads.value_dim
    if torch.device(device).type == "cpu":
        dim, value_dim = min(dim, MOST_VALUES), min(value_dim, MOST_VALUES)
    kv_bytes = 1 if kv_dtype == torch.int8 else 0
    return choose(query_rows, dim, dtype.itemsize, describe(device), value_dim, kv_bytes, page)


def slices_for(query_rows: int, device: torch.device | str, config: KernelConfig) -> int:
    """One slice for each resident program of the device, divided by the sibling tiles of a slice."""
    programs = describe(device).processors * config.programs_per_sm
    return max(1, programs // -(-query_rows // config.block_m))

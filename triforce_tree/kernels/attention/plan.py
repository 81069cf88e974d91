"""Plans describe what the queries of a forward see, in device buffers that captured graphs read.

A *segment* is a range of KV positions with the queries that see it: ``length`` positions that all these
queries see, then ``tail`` positions under the mask. A prefix with a token tree is one segment. A ragged batch
of token trees has one segment per sequence. A tree of texts (few-shot prompting, multi-step reasoning) has
one per node, with the queries of its leaves in depth-first order, so that the queries of a node are a range.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from triforce_tree.runtime.packed import Packed


@dataclass(frozen=True)
class Heads:
    """Numbers of query and KV heads and of the elements of a head.

    Attributes:
        query, kv: H_q and H_kv, numbers of heads; ``query`` is a multiple of ``kv``.
        dim: D, elements of a query and of a key, at most 512 (576 where values have fewer elements).
        value_dim: D_v, elements of a value; 0 becomes ``dim``. D and D_v differ in multi-head latent
            attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), whose keys have an additional rotary part.
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

    @cached_property
    def group(self) -> int:
        return self.query // self.kv

    @cached_property
    def row(self) -> int:
        """Returns the number of elements of the keys and values of one token, in all KV heads."""
        return self.kv * (self.dim + self.value_dim)

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Splits ``[..., row]`` into keys ``[..., H_kv, D]`` and values ``[..., H_kv, D_v]`` without a copy.

        A row holds the keys of all heads of a token, then the values of all heads.
        """
        keys, values = rows.split((self.kv * self.dim, self.kv * self.value_dim), -1)
        return keys.unflatten(-1, (self.kv, self.dim)), values.unflatten(-1, (self.kv, self.value_dim))


@dataclass(frozen=True)
class Plan:
    """Segments and their queries in device buffers.

    The addresses of the buffers never change, so captured graphs may hold them.

    Attributes:
        queries: number of queries of all segments.
        lengths: int32 ``[segments]``, unmasked positions of each segment; written in place as contexts grow.
        segments: int32 ``[6, segments]``: batch index, first KV position, length of the tail, first query,
            number of queries, and number of queries of all earlier segments.
        mask: int64 mask words ``[queries, words]``; bit j of word w says that the query sees tail position
            ``64 w + j``.
        owner_start, owners: int32; query i belongs to segments
            ``owners[owner_start[i] : owner_start[i + 1]]``.
        seen: largest number of pairs of a query and a segment that it sees.
        max_queries: the largest number of queries of one segment.
    """

    heads: Heads
    queries: int
    lengths: Tensor
    segments: Tensor
    mask: Tensor
    owner_start: Tensor
    owners: Tensor
    seen: int
    max_queries: int

    @property
    def device(self) -> torch.device:
        return self.lengths.device

    def first(self, segments: int, queries: int) -> "Plan":
        """Returns the plan of only the first segments and their queries; it shares ``lengths``."""
        return replace(
            self,
            queries=queries,
            lengths=self.lengths[:segments],
            segments=self.segments[:, :segments].contiguous(),
        )


@dataclass(frozen=True)
class AttentionParams:
    """Parameters of the attention of one layer.

    Attributes:
        scale: positive factor on the raw scores.
        window: number of positions that a query sees, including its own; the query at position i sees the key
            at position j iff ``i - j < window``. None: it sees all earlier positions.
        softcap: scores become ``softcap * tanh(score / softcap)``; None leaves them as they are.
        sinks: ``[H_q]`` logits of a virtual key whose value is zero.
        chunked: the window does not slide: the query sees the key iff ``j // window == i // window`` and
            ``j <= i`` (chunked attention of Llama 4).
        selected: int32 ``[B, T, K]``, the only slots that each query attends to, the best first; those that
            it does not see are left out. None: a query attends to all that it sees.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    chunked: bool = False
    selected: Tensor | None = None


class KV(NamedTuple):
    """Keys and values of one layer.

    Attributes:
        k: ``[B, H_kv, S, D]``, or pages ``[pages, H_kv, page, D]`` with a ``table``; any strides, last
            dimension dense. Storage ``[S, H_kv, D]`` is passed as ``k.transpose(0, 1)[None]``.
        v: ``[B, H_kv, S, D_v]`` or ``[pages, H_kv, page, D_v]``.
        table: int32 ``[B, pages of a sequence]``, or ``[B, H_kv, pages]`` where every KV head has its own
            selection (a retrieval view). Position r is in slot ``r % page`` of page
            ``table[..., r // page]``.
        scales: scales of keys and of values in int8, each fp32 with the shape of ``k`` but one element for D;
            None for other dtypes.
    """

    k: Tensor
    v: Tensor
    table: Tensor | None = None
    scales: tuple[Tensor, Tensor] | None = None


class FirstVisible(NamedTuple):
    """First visible KV positions under a sliding window; int32 buffers that each forward rewrites.

    Attributes:
        first: ``[queries]``, the first position that each query sees, at most the length of its segment.
        low, high: ``[segments]``, the minimum and maximum of ``first`` over a segment's queries.
    """

    first: Tensor
    low: Tensor
    high: Tensor


def pack_mask(mask: Tensor, words: int | None = None) -> Tensor:
    """Packs bool ``[T, N]`` into int64 mask words ``[T, words]``; ``words`` None becomes ceil(N / 64)."""
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
        packed = np.packbits(bits.numpy(), axis=1, bitorder="little").view(np.int64)
        return torch.from_numpy(packed)
    place = torch.arange(64, device=mask.device)
    return (bits.view(queries, words, 64).long() << place).sum(-1)


def unpack_mask(words: Tensor) -> Tensor:
    """Unpacks int64 mask words ``[..., W]`` to bool ``[..., 64 W]``."""
    return (words[..., None] >> torch.arange(64, device=words.device) & 1).flatten(-2).bool()


def plan_trees(
    heads: Heads, masks: Sequence[Tensor], lengths: Sequence[int] | Tensor, *, device: torch.device | str
) -> Plan:
    """Returns the plan of a batch of token trees, each after its own prefix.

    Args:
        masks: bool ``[T_b, N_b]`` for each sequence b, over the last N_b positions of the sequence.
        lengths: ``[B]``, positions of each sequence before the tail.
    """
    counts, tails = ([mask.shape[dim] for mask in masks] for dim in (0, 1))
    words, device = max(1, -(-max(tails) // 64)), torch.device(device)
    packed = [pack_mask(mask, words).to(device) for mask in masks]
    segments, queries = len(counts), sum(counts)
    shapes = (segments,), (6, segments), (queries + 1,), (queries,)
    table = Packed(device, *((shape, torch.int32) for shape in shapes))
    known, columns, owner_start, owners = table.arrays
    numbers, firsts = np.arange(segments), np.cumsum(counts) - counts
    columns[:] = np.broadcast_arrays(numbers, 0, tails, firsts, counts, firsts)
    owner_start[:], owners[:] = np.arange(queries + 1), numbers.repeat(counts)
    if not isinstance(lengths, Tensor):
        known[:] = lengths
    table.send()
    device_lengths, device_segments, device_owner_start, device_owners = table.tensors
    if isinstance(lengths, Tensor):
        device_lengths.copy_(lengths)
    return Plan(
        heads=heads,
        queries=queries,
        lengths=device_lengths,
        segments=device_segments,
        mask=packed[0] if len(packed) == 1 else torch.cat(packed),
        owner_start=device_owner_start,
        owners=device_owners,
        seen=queries,
        max_queries=max(counts),
    )

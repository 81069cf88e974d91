"""The attention backend of FlashInfer: its prefill kernels, with custom masks, on a paged KV cache.

FlashInfer is optional, and serves 16-bit queries and KV on NVIDIA GPUs. Every KV slot is passed to it as a
page of its own, so that one description fits all layouts of KV slots: a request's page indices are its slots.

Without a window a call has two parts, since FlashInfer reads a custom mask for every pair of a query and a
position: the positions before the tail without a mask, and the tail with the tree's mask. Their results are
merged by log-sum-exp. Within a window it has one part, under a mask.

FlashInfer's ``plan`` runs on the host and reads the lengths there. So no CUDA graph can hold a forward, and
each forward waits for the device. Layers that have the same slots share a plan; those with a page table of
their own, as in the retrieval level, have one each.
"""

import math
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from triforce_tree.kernels.attention.backend import Attention, AttentionBackend, Capabilities
from triforce_tree.kernels.attention.plan import KV, AttentionParams, FirstVisible, Plan, unpack_mask
from triforce_tree.kernels.attention.reference import merge_states

# Bytes for partial results of long sequences: twice what FlashInfer recommends.
_WORKSPACE = 256 << 20


class FlashInferBackend(AttentionBackend):
    """See the module."""

    name = "flashinfer"
    can = Capabilities(devices=("cuda",), dtypes=(torch.bfloat16, torch.float16), head_dims=(64, 128, 256))

    def missing(self) -> str | None:
        if find_spec("flashinfer") is None:
            return "flashinfer is not installed; install flashinfer-python, or leave out attention_backend"
        return None

    def trees(
        self, plan: Plan, dtype: torch.dtype, kv_dtype: torch.dtype | None = None, page: int = 0
    ) -> Attention:
        return FlashInferAttention(plan, dtype)


class FlashInferAttention:
    """Attention with a plan from ``plan_trees``; see ``backend.Attention``."""

    def __init__(self, plan: Plan, dtype: torch.dtype) -> None:
        self.plan, self._dtype = plan, dtype
        # Tails, first queries and numbers of queries of all sequences, which never change.
        self._tails, self._firsts, self._counts = plan.segments[2:5].tolist()
        self._wrappers: dict[bool, Any] = {}
        self._planned_for: tuple[object, ...] | None = None
        self._parts: list[_Part] = []

    def over(self, plan: Plan) -> "FlashInferAttention":
        """See ``backend.Attention``."""
        return FlashInferAttention(plan, self._dtype)

    def begin(self) -> None:
        """Lengths and masks may have changed: the next call plans."""
        self._planned_for = None

    def run(self, q: Tensor, kv: KV, params: AttentionParams, first: FirstVisible | None = None) -> Tensor:
        """See ``backend.Attention``."""
        return self.states(q, kv, params, first)[0]

    def states(
        self, q: Tensor, kv: KV, params: AttentionParams, first: FirstVisible | None = None
    ) -> tuple[Tensor, Tensor]:
        """See ``backend.Attention``.

        Raises:
            ValueError: keys and values in int8, or laid out in different ways.
        """
        slots = single_slots(kv)
        table = 0 if kv.table is None else kv.table.data_ptr()
        wanted = (slots.apart, table, params.scale, params.softcap, first is None)
        if wanted != self._planned_for:
            self._plan_forward(slots, kv, params, first)
            self._planned_for = wanted
        by_head = slots.by_head
        grouped = self._by_head(q) if by_head else q
        results = [_state(part, grouped, slots) for part in self._parts]
        if len(results) == 1:
            [(out, lse)] = results
        else:
            outs, lses = zip(*results, strict=True)
            out, lse = merge_states(torch.stack(outs), torch.stack(lses))
        if by_head:
            out, lse = self._by_query(out), self._by_query(lse[..., None])[..., 0]
        if params.sinks is not None:
            total = torch.logaddexp(lse, params.sinks.float())
            out, lse = (out.float() * (lse - total).exp()[..., None]).to(q.dtype), total
        return out, lse

    def _by_head(self, q: Tensor) -> Tensor:
        """Queries ``[queries, H_q, D]`` as ``[queries * H_kv, group, D]``, by sequence, KV head and query."""
        heads = self.plan.heads
        parts = q.unflatten(1, (heads.kv, heads.group)).split(self._counts)
        return torch.cat([part.transpose(0, 1).flatten(0, 1) for part in parts])

    def _by_query(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`_by_head`, for any last dimension."""
        kv = self.plan.heads.kv
        parts = x.split([count * kv for count in self._counts])
        return torch.cat([part.unflatten(0, (kv, -1)).transpose(0, 1).flatten(1, 2) for part in parts])

    def _plan_forward(
        self, slots: "Slots", kv: KV, params: AttentionParams, first: FirstVisible | None
    ) -> None:
        """Plan the parts of a call over these slots."""
        lengths = self.plan.lengths.tolist()
        ends = [length + tail for length, tail in zip(lengths, self._tails, strict=True)]
        if first is not None:
            spans = [(first.low.tolist(), ends, True)]
        else:
            spans = [([0] * len(lengths), lengths, False), (lengths, ends, True)]
        self._parts = []
        for starts, stops, masked in spans:
            request = Requests(self, slots, kv.table, starts, stops, first if masked else None)
            # A call over nothing at all still has results.
            if request.sequences or (masked and not self._parts):
                self._parts.append(self._planned(request, slots, params, masked))

    def _planned(self, request: "Requests", slots: "Slots", params: AttentionParams, masked: bool) -> "_Part":
        rows = self.plan.queries * (self.plan.heads.kv if slots.by_head else 1)
        if not request.sequences:
            return _Part(None, rows, None, None)
        heads, mask = self.plan.heads, request.mask if masked else None
        if masked not in self._wrappers:
            self._wrappers[masked] = _wrapper(self.plan.device)
        wrapper = self._wrappers[masked]
        # The first four are on the device, so that FlashInfer copies them to the host. It thereby waits until
        # the wrapper's last plan has been read from page-locked memory, which the next one overwrites.
        wrapper.plan(
            request.query_start, request.slot_start, request.slots, request.last_page,
            heads.group if slots.by_head else heads.query, 1 if slots.by_head else heads.kv, heads.dim, 1,
            custom_mask=None if mask is None else mask.flat, causal=False, sm_scale=params.scale,
            logits_soft_cap=params.softcap, q_data_type=self._dtype, kv_data_type=self._dtype,
        )  # fmt: skip
        return _Part(wrapper, rows, request.rows, None if mask is None else mask.blind)


class Slots(NamedTuple):
    """Keys and values as pages of one slot each.

    Attributes:
        k, v: ``[n, H_kv, 1, D]``, views; with ``by_head`` ``[n, 1, 1, D]``, one page for a slot of each head.
        size: slots of a page of the table, or of a sequence where there is none.
        apart: pages of ``k`` from a page of the table to the next, from one KV head to the next (0 where
            heads are not pages), and from one slot to the next.
        by_head: whether every KV head has slots of its own.
    """

    k: Tensor
    v: Tensor
    size: int
    apart: tuple[int, int, int]
    by_head: bool


def single_slots(kv: KV) -> Slots:
    """Describe the slots of one layer.

    Raises:
        ValueError: keys and values in int8, or laid out in different ways.
    """
    if kv.scales is not None:
        raise ValueError("FlashInfer does not read keys and values in int8; use kv_bits=16")
    if kv.k.stride() != kv.v.stride() or kv.k.shape != kv.v.shape:
        raise ValueError(
            f"k has shape {tuple(kv.k.shape)} and strides {kv.k.stride()}, and v {tuple(kv.v.shape)} and "
            f"{kv.v.stride()}; FlashInfer needs the same of both"
        )
    by_head = kv.table is not None and kv.table.ndim == 3
    sizes, strides = kv.k.shape, kv.k.stride()
    # A dimension of one element may have any stride.
    steps = [
        stride if size > 1 and used else 0
        for size, stride, used in zip(sizes[:3], strides[:3], (True, by_head, True), strict=True)
    ]
    unit = math.gcd(*steps) or sizes[3]
    apart = (steps[0] // unit, steps[1] // unit, steps[2] // unit)
    count = 1 + sum((size - 1) * step for size, step in zip(sizes[:3], apart, strict=True))
    shape = (count, 1 if by_head else sizes[1], 1, sizes[3])
    pages = (unit, sizes[3] if by_head or sizes[1] == 1 else strides[1], sizes[3], 1)
    k, v = (t.as_strided(shape, pages, t.storage_offset()) for t in (kv.k, kv.v))
    return Slots(k, v, sizes[2], apart, by_head)


class Mask(NamedTuple):
    """The mask of all requests of a part.

    Attributes:
        flat: bool, the masks ``[queries, positions]`` of all requests, flattened one after another.
        blind: bool ``[rows]``, which rows see nothing; None where all of them see something.
    """

    flat: Tensor
    blind: Tensor | None


class Requests:
    """A part of a call as FlashInfer's requests: one for each sequence, or for each of its KV heads.

    Sequences without a position in this part are left out.

    Args:
        own: the attention.
        slots, table: of the layer.
        starts, stops: positions of each sequence.
        first: the first positions that queries see, if there is a window.

    Attributes:
        sequences: those that have positions.
        query_start, slot_start: int32 ``[requests + 1]``, where the rows and the slots of each begin.
        slots: int32, slots of all requests.
        last_page: int32 ``[requests]``, 1: a page has one slot.
        rows: int64, the rows of these requests among those of all; None for all of them.
        mask: what queries see of these positions.
    """

    def __init__(
        self,
        own: FlashInferAttention,
        slots: Slots,
        table: Tensor | None,
        starts: list[int],
        stops: list[int],
        first: FirstVisible | None,
    ) -> None:
        plan = own.plan
        heads, device = plan.heads.kv if slots.by_head else 1, plan.device
        self.sequences = [
            b for b, (start, stop) in enumerate(zip(starts, stops, strict=True)) if stop > start
        ]
        counts = [own._counts[b] for b in self.sequences for _ in range(heads)]
        sizes = [stops[b] - starts[b] for b in self.sequences for _ in range(heads)]
        self.query_start = _before(counts, device)
        self.slot_start = _before(sizes, device)
        self.last_page = torch.ones(len(counts), dtype=torch.int32, device=device)
        found = [_slots_of(slots, table, b, starts[b], stops[b], heads) for b in self.sequences]
        self.slots = torch.cat(found) if found else torch.zeros(0, dtype=torch.int32, device=device)
        self.rows: Tensor | None = None
        if len(self.sequences) < len(starts):
            ranges = [
                torch.arange(own._firsts[b] * heads, (own._firsts[b] + own._counts[b]) * heads)
                for b in self.sequences
            ]
            self.rows = torch.cat(ranges).to(device) if ranges else torch.zeros(0, dtype=torch.int64)
        self._own, self._starts, self._first, self._heads = own, starts, first, heads

    @property
    def mask(self) -> Mask:
        own, plan = self._own, self._own.plan
        lengths = plan.lengths.tolist()
        masks = []
        for b in self.sequences:
            rows = slice(own._firsts[b], own._firsts[b] + own._counts[b])
            tail = unpack_mask(plan.mask[rows])[:, : own._tails[b]]
            before = torch.arange(self._starts[b], lengths[b], device=plan.device)
            seen = before >= 0
            visible = seen.expand(len(tail), -1)
            if self._first is not None:
                visible = before >= self._first.first[rows, None]
            masks.append(torch.cat([visible, tail], 1))
        flat = torch.cat([each.flatten() for each in masks for _ in range(self._heads)])
        sees = torch.cat([each.any(1) for each in masks for _ in range(self._heads)])
        return Mask(flat, None if bool(sees.all()) else ~sees)


def _slots_of(slots: Slots, table: Tensor | None, b: int, start: int, stop: int, heads: int) -> Tensor:
    """int32: the slots of positions ``start`` to ``stop`` of a sequence, of one KV head after another."""
    page_step, head_step, slot_step = slots.apart
    device = slots.k.device
    positions = torch.arange(start, stop, device=device)
    if table is None:
        return (b * page_step + positions * slot_step).int()
    pages = table[b].reshape(-1, table.shape[-1])[:, positions // slots.size].long()
    first = torch.arange(heads, device=device)[:, None] * head_step
    return (first + pages * page_step + positions % slots.size * slot_step).flatten().int()


def _before(counts: list[int], device: torch.device) -> Tensor:
    """int32 ``[n + 1]``: the sum of all counts before each, and of all."""
    return torch.tensor([0, *counts]).cumsum(0).to(device, torch.int32)


@dataclass(frozen=True)
class _Part:
    """A part of a call that was planned.

    Attributes:
        wrapper: FlashInfer's; None for a part without any position.
        count: rows of all requests, those that were left out included.
        rows, blind: see :class:`Requests` and :class:`Mask`.
    """

    wrapper: Any
    count: int
    rows: Tensor | None
    blind: Tensor | None


def _state(part: _Part, q: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
    """Outputs ``[rows, heads, D]`` and natural-log lse fp32 ``[rows, heads]``; (0, -inf) for what sees
    nothing."""
    if part.wrapper is None:
        return torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    given = q if part.rows is None else q[part.rows]
    out, lse = part.wrapper.run(given.contiguous(), (slots.k, slots.v), return_lse=True)
    lse = lse * math.log(2)  # FlashInfer's is to base 2
    if part.blind is not None:
        out = out.masked_fill(part.blind[:, None, None], 0.0)
        lse = lse.masked_fill(part.blind[:, None], -torch.inf)
    if part.rows is None:
        return out, lse
    whole = torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    whole[0][part.rows], whole[1][part.rows] = out, lse
    return whole


def _wrapper(device: torch.device) -> Any:
    import flashinfer

    # "auto" may choose kernels that do not divide a long sequence, and take three times as long.
    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(device), "HND", backend="fa2")


@cache
def _workspace(device: torch.device) -> Tensor:
    """Returns the workspace of all plans of a device, whose calls follow each other on one stream."""
    return torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)

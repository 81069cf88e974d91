"""The attention backend of FlashInfer, which calls its prefill kernels with custom masks on a paged KV cache.

FlashInfer is optional. It supports 16-bit queries and KV on NVIDIA GPUs. Every KV slot is passed to it as a
page, so that one description fits all layouts of KV slots: the page indices of a request are its slots.

FlashInfer reads a custom mask for every pair of a query and a position. So without a window a call has two
parts: the positions before the tail without a mask, and the tail with the mask of the tree. Their outputs are
merged by log-sum-exp. With a window a call has one part with a mask.

FlashInfer's ``plan`` runs on the host and reads the lengths there. So a CUDA graph cannot capture a forward,
and each forward waits for the device. Layers with the same slots share a plan. Layers with their own page
tables, as in the retrieval level, have one plan each.
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

# Bytes of the workspace for partial outputs of long sequences, twice what FlashInfer recommends.
_WORKSPACE = 256 << 20


class FlashInferBackend(AttentionBackend):
    """The backend "flashinfer"; see the module."""

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
        # Lengths of the tails, first queries and numbers of queries of all sequences, which never change.
        self._tails, self._firsts, self._counts = plan.segments[2:5].tolist()
        self._wrappers: dict[bool, Any] = {}
        self._planned_for: tuple[object, ...] | None = None
        self._parts: list[_Part] = []

    def over(self, plan: Plan) -> "FlashInferAttention":
        """See ``backend.Attention``."""
        return FlashInferAttention(plan, self._dtype)

    def begin(self) -> None:
        """Lets the next call plan again, because lengths and masks may have changed."""
        self._planned_for = None

    def run(self, q: Tensor, kv: KV, params: AttentionParams, first: FirstVisible | None = None) -> Tensor:
        """See ``backend.Attention``."""
        return self.states(q, kv, params, first)[0]

    def states(
        self, q: Tensor, kv: KV, params: AttentionParams, first: FirstVisible | None = None
    ) -> tuple[Tensor, Tensor]:
        """See ``backend.Attention``.

        Raises:
            ValueError: keys and values are in int8, or differ in shape or strides.
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
        """Permutes queries ``[queries, H_q, D]`` to ``[queries * H_kv, group, D]``, KV heads first."""
        heads = self.plan.heads
        parts = q.unflatten(1, (heads.kv, heads.group)).split(self._counts)
        return torch.cat([part.transpose(0, 1).flatten(0, 1) for part in parts])

    def _by_query(self, x: Tensor) -> Tensor:
        """Inverts :meth:`_by_head`, with any last dimension."""
        kv = self.plan.heads.kv
        parts = x.split([count * kv for count in self._counts])
        return torch.cat([part.unflatten(0, (kv, -1)).transpose(0, 1).flatten(1, 2) for part in parts])

    def _plan_forward(
        self, slots: "Slots", kv: KV, params: AttentionParams, first: FirstVisible | None
    ) -> None:
        """Plans the parts of a call for these slots."""
        lengths = self.plan.lengths.tolist()
        ends = [length + tail for length, tail in zip(lengths, self._tails, strict=True)]
        if first is not None:
            spans = [(first.low.tolist(), ends, True)]
        else:
            spans = [([0] * len(lengths), lengths, False), (lengths, ends, True)]
        self._parts = []
        for starts, stops, masked in spans:
            request = Requests(self, slots, kv.table, starts, stops, first if masked else None)
            # A call without any position still has results, so it has one part.
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
        # The first four arguments are on the device, so FlashInfer waits for the device to copy them. By then
        # the device has read the wrapper's last plan from page-locked memory, which this plan overwrites.
        wrapper.plan(
            request.query_start, request.slot_start, request.slots, request.last_page,
            heads.group if slots.by_head else heads.query, 1 if slots.by_head else heads.kv, heads.dim, 1,
            custom_mask=None if mask is None else mask.flat, causal=False, sm_scale=params.scale,
            logits_soft_cap=params.softcap, q_data_type=self._dtype, kv_data_type=self._dtype,
        )  # fmt: skip
        return _Part(wrapper, rows, request.rows, None if mask is None else mask.blind)


class Slots(NamedTuple):
    """Keys and values as pages of one KV slot.

    Attributes:
        k, v: ``[n, H_kv, 1, D]``, views; with ``by_head`` ``[n, 1, 1, D]``, where the slots of a position in
            different heads are different pages.
        size: slots of a page of the table, or of a sequence if there is no table.
        apart: distances in pages of ``k``: between pages of the table, between KV heads (0 without
            ``by_head``), and between slots.
        by_head: whether every KV head has its own slots.
    """

    k: Tensor
    v: Tensor
    size: int
    apart: tuple[int, int, int]
    by_head: bool


def single_slots(kv: KV) -> Slots:
    """Returns the keys and values of a layer as pages of one KV slot.

    Raises:
        ValueError: keys and values are in int8, or differ in shape or strides.
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
    # The stride of a dimension of one element has no meaning.
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
    """Mask of all requests of a part.

    Attributes:
        flat: bool, the masks ``[queries, positions]`` of all requests, flattened one after another.
        blind: bool ``[rows]``, which query rows see no position; None if every row sees one.
    """

    flat: Tensor
    blind: Tensor | None


class Requests:
    """A part of a call as requests of FlashInfer, one for each sequence or for each of its KV heads.

    Sequences without a position in this part are left out.

    Args:
        own: the attention.
        slots, table: slots and page table of the layer.
        starts, stops: first and last position (exclusive) of each sequence in this part.
        first: first positions that queries see, if there is a window.

    Attributes:
        sequences: batch indices of the sequences that have positions in this part.
        query_start, slot_start: int32 ``[requests + 1]``, first query row and first slot of each request.
        slots: int32, slots of all requests.
        last_page: int32 ``[requests]``, slots of the last page of each request, always 1.
        rows: int64, query rows of these requests; None if no sequence is left out.
        mask: which of these positions each query sees.
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
                torch.arange(own._firsts[b] * heads, (own._firsts[b] + own._counts[b]) * heads, device="cpu")
                for b in self.sequences
            ]
            self.rows = (
                torch.cat(ranges).to(device) if ranges else torch.zeros(0, dtype=torch.int64, device="cpu")
            )
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
    """Returns the slots (int32) of positions ``start`` to ``stop`` of a sequence, ordered by KV head."""
    page_step, head_step, slot_step = slots.apart
    device = slots.k.device
    positions = torch.arange(start, stop, device=device)
    if table is None:
        return (b * page_step + positions * slot_step).int()
    pages = table[b].reshape(-1, table.shape[-1])[:, positions // slots.size].long()
    first = torch.arange(heads, device=device)[:, None] * head_step
    return (first + pages * page_step + positions % slots.size * slot_step).flatten().int()


def _before(counts: list[int], device: torch.device) -> Tensor:
    """Returns the cumulative sums of ``counts``, int32 ``[n + 1]``, beginning with 0."""
    return torch.tensor([0, *counts], device="cpu").cumsum(0).to(device, torch.int32)


@dataclass(frozen=True)
class _Part:
    """A planned part of a call.

    Attributes:
        wrapper: FlashInfer's wrapper; None for a part without any position.
        count: number of query rows, including the sequences that were left out.
        rows, blind: see :class:`Requests` and :class:`Mask`.
    """

    wrapper: Any
    count: int
    rows: Tensor | None
    blind: Tensor | None


def _state(part: _Part, q: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
    """Returns outputs ``[rows, heads, D]`` and log-sum-exps (natural logarithm), fp32 ``[rows, heads]``.

    A row that sees no position has the output 0 and the log-sum-exp -inf.
    """
    if part.wrapper is None:
        return torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    given = q if part.rows is None else q[part.rows]
    out, lse = part.wrapper.run(given.contiguous(), (slots.k, slots.v), return_lse=True)
    lse = lse * math.log(2)  # FlashInfer's log-sum-exp has base 2
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

    # "auto" may choose kernels that do not split a long sequence and take three times as long.
    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(device), "HND", backend="fa2")


@cache
def _workspace(device: torch.device) -> Tensor:
    """Returns the workspace of all plans of a device; their calls must run on one stream."""
    return torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)

"""Operators that write and move KV slots, and that compute mean keys of chunks."""

import torch
from torch import Tensor

from triforce_tree.kernels.operators import operator


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises keys or values to 8 bits; the scale of each vector depends only on its largest magnitude.

    ``x`` is rounded to ``scale * int8``, half to even, with an error up to ``scale / 2``. A vector that is
    not finite gets the scale NaN, so that the logits become NaN.

    Args:
        x: ``[..., D]``.

    Returns:
        int8 ``[..., D]`` from -127 to 127, and fp32 ``[..., 1]``, ``max |x| / 127``.
    """
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True)
    # The divisor is a tensor, because on a GPU torch multiplies by the reciprocal of a number, which rounds
    # twice.
    scale = largest / torch.full_like(largest, 127) + (x * 0).sum(-1, keepdim=True)
    # If the scale is 0 (even by underflow) or NaN, all elements are 0.
    rounded = torch.where(scale > 0, x / scale, 0.0).round_().clamp_(-127, 127)
    return rounded.to(torch.int8), scale


def dequantized(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns ``x * scale``, multiplied in fp32, in ``dtype``, for results of :func:`quantized`."""
    return torch.mul(x, scale, out=torch.empty(x.shape, dtype=dtype, device=x.device))


@operator(
    "append_kv",
    writes=("k_cache", "v_cache", "k_scale", "v_scale"),
    triton=".kv_slots_kernels",
    cpu="..cpu.step.operators",
)
def append_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    ring: int = 0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    table: Tensor | None = None,
    page: int = 0,
) -> None:
    """Writes new keys and values; token t of sequence b goes to position ``start[b] + t``.

    Args:
        k_cache, v_cache: ``[B, H, S, D]`` and ``[B, H, S, D_v]``, changed in place; any strides with the last
            dimension dense.
        k, v: ``[B, H, T, D]`` and ``[B, H, T, D_v]``, any strides with the last dimension dense. Tokens whose
            slot would be S or higher are dropped.
        start: int64 ``[B]``, not negative.
        ring: number of slots of a ring buffer, T to S, where position r is in slot ``r % ring`` and no token
            is dropped. With 0, position r is in slot r.
        k_scale, v_scale: fp32 ``[B, H, S, 1]``, written with the scales of caches in int8, see
            :func:`quantized`; None for caches in other dtypes.
        table: int32 ``[B, pages]``, dense, without a ring: position r is in slot ``r % page`` of page
            ``table[b, r // page]``. Tokens whose page is -1, or not in the table, are dropped.
        page: slots of a page of the table.
    """
    size = k_cache.shape[2]
    check_ring(ring, k.shape[2], size)
    if k_scale is not None and v_scale is not None:
        (k, k_scales), (v, v_scales) = quantized(k), quantized(v)
        append_kv.definition(k_scale, v_scale, k_scales, v_scales, start, ring, None, None, table, page)
    for sequence, first in enumerate(start.tolist()):
        positions = torch.arange(first, first + k.shape[2], device=k.device)
        slots = _slots_of(positions, sequence, size, ring, table, page)
        kept = slots >= 0
        for cache, new in ((k_cache, k), (v_cache, v)):
            cache[sequence, :, slots[kept]] = new[sequence][:, kept].to(cache.dtype)


def _slots_of(
    positions: Tensor, sequence: int, size: int, ring: int, table: Tensor | None, page: int
) -> Tensor:
    """Returns the slots of positions of a sequence, int64, as :func:`append_kv` says; -1 for none."""
    if ring:
        return positions % ring
    slots = positions
    if table is not None:
        pages = positions // page
        known = pages < table.shape[1]
        pages = table[sequence].long()[pages.where(known, 0)].where(known, -1)
        slots = torch.where(pages < 0, -1, pages * page + positions % page)
    return slots.where(slots < size, -1)


@operator("move_kv", writes=("k", "v"), triton=".kv_slots_kernels", cpu="..cpu.step.operators")
def move_kv(
    k: Tensor,
    v: Tensor,
    index: Tensor,
    start: Tensor,
    ring: int = 0,
    table: Tensor | None = None,
    page: int = 0,
) -> None:
    """Commits accepted paths in place by moving position ``start[b] + index[b, i]`` to ``start[b] + i``.

    All sources are read before any target is written, so sources and targets may overlap.

    Args:
        k, v: ``[L, B, H, S, D]`` and ``[L, B, H, S, D_v]``, any strides with the last dimension dense.
        index: int64 ``[B, R]``; an entry of -1, at any i, moves nothing.
        start: int64 ``[B]``, the committed lengths.
        ring: as in ``append_kv``; it has at least R slots, and more slots than any index.
        table, page: as in ``append_kv``.
    """
    size = k.shape[3]
    check_ring(ring, index.shape[1], size)
    for sequence, first in enumerate(start.tolist()):
        offsets = index[sequence]
        places = torch.arange(len(offsets), device=k.device)
        sources, targets = (
            _slots_of(each + first, sequence, size, ring, table, page)
            for each in (offsets.clamp_min(0), places)
        )
        moved = (offsets >= 0) & (sources >= 0) & (targets >= 0)
        for slots in (k, v):
            kept = slots[:, sequence].index_select(2, sources[moved])
            slots[:, sequence, :, targets[moved]] = kept


def check_ring(ring: int, count: int, size: int) -> None:
    """Raises ValueError if ``count`` tokens do not fit the ring, or the ring exceeds ``size`` slots."""
    if ring and not count <= ring <= size:
        raise ValueError(
            f"ring={ring} must be {count} (the tokens of a call) to {size} (the slots of the cache)"
        )


@operator("chunk_means", writes=("means",), triton=".kv_slots_kernels")
def chunk_means(
    means: Tensor,
    k: Tensor,
    first: Tensor,
    count: int,
    chunk: int,
    k_scale: Tensor | None = None,
    pages: Tensor | None = None,
) -> None:
    """Recomputes the mean keys of chunks ``first[b] ... first[b] + count - 1`` of every layer, in place.

    If ``means`` has 2 D columns, the second half receives the variances of the components.

    Chunks that are not completely inside S, or exceed the C chunks of ``means``, are not written.

    Args:
        means: ``[L, B, H, C, D]`` or ``[L, B, H, C, 2 D]``.
        k: keys ``[L, B, H, S, D]``. Both have any strides with the last dimension dense.
        first: int64 ``[B]``, not negative.
        count: number of chunks of each sequence.
        chunk: number of KV slots of a chunk.
        k_scale: fp32 ``[L, B, H, S, 1]``, the scales of keys in int8; None for other dtypes.
        pages: int32 ``[B, C]``, dense; the keys of chunk c of sequence b are in slots of chunk
            ``pages[b, c]``, which must be completely inside S, or the mean is not written. None: they are in
            the slots of chunk c.
    """
    inside, places = k.shape[3] // chunk, means.shape[3]
    whole = k[:, :, :, : inside * chunk].unflatten(3, (inside, chunk))
    scales = None if k_scale is None else k_scale[:, :, :, : inside * chunk].unflatten(3, (inside, chunk))
    for sequence, begin in enumerate(first.tolist()):
        end = min(begin + count, places if pages is not None else min(places, inside))
        if begin >= end:
            continue
        to: Tensor | slice = slice(begin, end)
        source: Tensor | slice = to
        if pages is not None:
            source = pages[sequence, begin:end].long()
            within = (source >= 0) & (source < inside)
            to, source = torch.arange(begin, end, device=k.device)[within], source[within]
        keys = whole[:, sequence][:, :, source].float()
        if scales is not None:
            keys = keys * scales[:, sequence][:, :, source]
        means[:, sequence, :, to] = key_moments(keys, 3, means.shape[4]).to(means.dtype)


def key_moments(keys: Tensor, dim: int, columns: int) -> Tensor:
    """Returns the mean of ``keys`` over ``dim``, followed by the variance if ``columns`` is 2 D."""
    mean = keys.mean(dim, dtype=torch.float32)
    if columns == keys.shape[-1]:
        return mean
    return torch.cat([mean, keys.float().var(dim, unbiased=False)], -1)

"""KV rows that one decoding step writes and moves, and the means of the chunks they are in."""

import torch
from torch import Tensor

from triforce_tree.kernels.operators import operator


@operator("append_rows", writes=("k_cache", "v_cache"), triton=".rows_kernels")
def append_rows(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor, ring: int = 0) -> None:
    """Write new rows behind the present ones: row t of sequence b goes to row ``start[b] + t``.

    Args:
        k_cache, v_cache: ``[B, H, S, D]``, changed in place; any strides with the last dimension dense.
        k, v: ``[B, H, T, D]``, likewise; rows that would land at S or beyond are dropped.
        start: int64 ``[B]``, not negative.
        ring: T to S slots that rows go round in: logical row r is slot ``r % ring``, and no row is dropped.
            0: row r is slot r.
    """
    size = k_cache.shape[2]
    check_ring(ring, k.shape[2], size)
    for sequence, first in enumerate(start.tolist()):
        if ring:
            slots = (torch.arange(k.shape[2], device=k.device) + first) % ring
            k_cache[sequence, :, slots] = k[sequence].to(k_cache.dtype)
            v_cache[sequence, :, slots] = v[sequence].to(v_cache.dtype)
            continue
        count = max(0, min(k.shape[2], size - first))
        k_cache[sequence, :, first : first + count] = k[sequence, :, :count].to(k_cache.dtype)
        v_cache[sequence, :, first : first + count] = v[sequence, :, :count].to(v_cache.dtype)


@operator("move_rows", writes=("rows",), triton=".rows_kernels")
def move_rows(rows: Tensor, index: Tensor, start: Tensor, ring: int = 0) -> None:
    """Commit accepted paths: row ``start[b] + index[b, i]`` moves to ``start[b] + i``, in place.

    All sources are read before any target is written, so the two may overlap.

    Args:
        rows: ``[P, B, H, S, D]`` (layers times K and V first), any strides with the last dimension dense.
        index: int64 ``[B, R]``; -1, anywhere, moves nothing for its place.
        start: int64 ``[B]``, the committed lengths.
        ring: as in ``append_rows``; of at least R slots, and more than any index.
    """
    size = rows.shape[3]
    check_ring(ring, index.shape[1], size)
    for sequence, first in enumerate(start.tolist()):
        sources = index[sequence] + first
        targets = torch.arange(index.shape[1], device=rows.device) + first
        if ring:
            sources, targets = sources % ring, targets % ring
        moved = (index[sequence] >= 0) & (sources < size) & (targets < size)
        values = rows[:, sequence].index_select(2, sources[moved])
        rows[:, sequence, :, targets[moved]] = values


def check_ring(ring: int, count: int, size: int) -> None:
    """Raise ValueError where ``count`` rows do not fit a ring, or the ring does not fit ``size`` slots."""
    if ring and not count <= ring <= size:
        raise ValueError(f"ring={ring} must hold the {count} rows of a call, and lie within {size} slots")


@operator("chunk_means", writes=("means",), triton=".rows_kernels")
def chunk_means(means: Tensor, k: Tensor, first: Tensor, count: int, chunk: int) -> None:
    """Recompute the means of chunks ``first[b] ... first[b] + count - 1`` of every layer, in place.

    Chunks that do not lie wholly inside S, or for which ``means`` has no place, are left alone.

    Args:
        means: ``[L, B, H, C, D]``.
        k: keys ``[L, B, H, S, D]``; both have any strides with the last dimension dense.
        first: int64 ``[B]``, not negative.
        count: chunks of each sequence.
        chunk: rows of a chunk.
    """
    places = min(means.shape[3], k.shape[3] // chunk)
    for sequence, begin in enumerate(first.tolist()):
        end = min(begin + count, places)
        if begin < end:
            rows = k[:, sequence, :, begin * chunk : end * chunk].unflatten(2, (end - begin, chunk))
            means[:, sequence, :, begin:end] = rows.float().mean(3).to(means.dtype)

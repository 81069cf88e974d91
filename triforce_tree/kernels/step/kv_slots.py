"""KV slots that a decoding step writes and moves, and the mean keys of the chunks they are in."""

import torch
from torch import Tensor

from triforce_tree.kernels.operators import operator


@operator("append_kv", writes=("k_cache", "v_cache"), triton=".kv_slots_kernels")
def append_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor, ring: int = 0) -> None:
    """Write new keys and values: token t of sequence b goes to position ``start[b] + t``.

    Args:
        k_cache, v_cache: ``[B, H, S, D]`` and ``[B, H, S, D_v]``, changed in place; any strides with the last
            dimension dense.
        k, v: ``[B, H, T, D]`` and ``[B, H, T, D_v]``, any strides likewise; tokens whose slot would be S or
            beyond are dropped.
        start: int64 ``[B]``, not negative.
        ring: slots of a ring buffer, T to S: position r is in slot ``r % ring``, and nothing is dropped.
            0: position r is in slot r.
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


@operator("move_kv", writes=("k", "v"), triton=".kv_slots_kernels")
def move_kv(k: Tensor, v: Tensor, index: Tensor, start: Tensor, ring: int = 0) -> None:
    """Commit accepted paths: position ``start[b] + index[b, i]`` moves to ``start[b] + i``, in place.

    All sources are read before any target is written, so the two may overlap.

    Args:
        k, v: ``[L, B, H, S, D]`` and ``[L, B, H, S, D_v]``, any strides with the last dimension dense.
        index: int64 ``[B, R]``; an entry of -1, at any i, moves nothing.
        start: int64 ``[B]``, the committed lengths.
        ring: as in ``append_kv``; of at least R slots, and more than any index.
    """
    size = k.shape[3]
    check_ring(ring, index.shape[1], size)
    for sequence, first in enumerate(start.tolist()):
        sources = index[sequence] + first
        targets = torch.arange(index.shape[1], device=k.device) + first
        if ring:
            sources, targets = sources % ring, targets % ring
        moved = (index[sequence] >= 0) & (sources < size) & (targets < size)
        for slots in (k, v):
            kept = slots[:, sequence].index_select(2, sources[moved])
            slots[:, sequence, :, targets[moved]] = kept


def check_ring(ring: int, count: int, size: int) -> None:
    """Raise ValueError where ``count`` tokens do not fit the ring, or the ring exceeds ``size`` slots."""
    if ring and not count <= ring <= size:
        raise ValueError(
            f"ring={ring} must be {count} (the tokens of a call) to {size} (the slots of the cache)"
        )


@operator("chunk_means", writes=("means",), triton=".kv_slots_kernels")
def chunk_means(means: Tensor, k: Tensor, first: Tensor, count: int, chunk: int) -> None:
    """Recompute the mean keys of chunks ``first[b] ... first[b] + count - 1`` of every layer, in place.

    Chunks that are not wholly inside S, or beyond the size of ``means``, are left alone.

    Args:
        means: ``[L, B, H, C, D]``.
        k: keys ``[L, B, H, S, D]``; both have any strides with the last dimension dense.
        first: int64 ``[B]``, not negative.
        count: chunks of each sequence.
        chunk: KV slots of a chunk.
    """
    places = min(means.shape[3], k.shape[3] // chunk)
    for sequence, begin in enumerate(first.tolist()):
        end = min(begin + count, places)
        if begin < end:
            keys = k[:, sequence, :, begin * chunk : end * chunk].unflatten(2, (end - begin, chunk))
            means[:, sequence, :, begin:end] = keys.float().mean(3).to(means.dtype)

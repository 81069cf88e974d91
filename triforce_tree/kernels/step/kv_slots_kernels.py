"""Triton kernels of ``kv_slots``: append keys and values, commit paths, compute mean keys of chunks.

The kernels read target slots from device buffers, so a captured graph serves any lengths. Every operator is
one launch, also for several layers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from triforce_tree.kernels.launching import launched_early, wait_for_previous
from triforce_tree.kernels.step.kv_slots import check_ring

# Elements of a tile, 64 for each thread of four warps.
_TILE = 8192


# Adding and then subtracting it rounds an fp32 up to 2^22 to an integer, half to even.
_ROUNDER = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def _quantized(x, there):
    """Computes ``kv_slots.quantized`` of the rows of a tile; columns not ``there`` are 0."""
    x = tl.where(there, x.to(tl.float32), 0.0)
    # On a GPU the operator ``/`` does not round correctly.
    scale = tl.div_rn(tl.max(tl.abs(x), 1), tl.full([x.shape[0]], 127.0, tl.float32)) + tl.sum(x * 0.0, 1)
    usable = (scale > 0.0)[:, None]
    divided = tl.div_rn(x, tl.where(usable, scale[:, None], 1.0) + tl.zeros_like(x))
    rounded = (tl.where(usable, divided, 0.0) + _ROUNDER) - _ROUNDER
    return tl.minimum(tl.maximum(rounded, -127.0), 127.0).to(tl.int8), scale


@triton.jit
def _paged_slot(position, table_ptr, sequence, pages, PAGE: tl.constexpr, inside):
    """Returns the slots of positions that are ``inside`` by a table ``[B, pages]``; -1 for none."""
    known = inside & (position >= 0) & (position < pages * PAGE)
    page = tl.load(table_ptr + sequence * pages + position // PAGE, mask=known, other=-1).to(tl.int64)
    return tl.where(page < 0, -1, page * PAGE + position % PAGE)


@triton.jit
def _append_kernel(
    k_cache_ptr,  # [B, H, S, D] with strides
    v_cache_ptr,  # [B, H, S, D_v]
    k_ptr,  # [B, H, T, D] with strides
    v_ptr,  # [B, H, T, D_v]
    start_ptr,  # int64 [B]
    k_scale_ptr,  # fp32 [B, H, S, 1] with strides where the caches are int8, else None
    v_scale_ptr,
    table_ptr,  # int32 [B, pages] if PAGE, else None
    k_cache_b,
    k_cache_h,
    k_cache_s,
    v_cache_b,
    v_cache_h,
    v_cache_s,
    k_b,
    k_h,
    k_t,
    v_b,
    v_h,
    v_t,
    scale_b,
    scale_h,
    scale_s,
    heads,
    size,
    count,
    ring,
    pages,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    RING: tl.constexpr,
    PAGE: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    pair = tl.program_id(0).to(tl.int64)
    sequence, head = pair // heads, pair % heads
    token = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column, v_column = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_V)[None, :]
    target = tl.load(start_ptr + sequence) + token
    if RING:
        target = target % ring
    if PAGE:
        target = _paged_slot(target, table_ptr, sequence, pages, PAGE, token < count)
    inside = (token < count) & (target >= 0) & (target < size)
    kept = inside[:, None]
    there, v_there = kept & (column < DIM), kept & (v_column < VALUE_DIM)
    k = tl.load(k_ptr + sequence * k_b + head * k_h + token[:, None] * k_t + column, mask=there)
    v = tl.load(v_ptr + sequence * v_b + head * v_h + token[:, None] * v_t + v_column, mask=v_there)
    k_at = k_cache_ptr + sequence * k_cache_b + head * k_cache_h + target[:, None] * k_cache_s + column
    v_at = v_cache_ptr + sequence * v_cache_b + head * v_cache_h + target[:, None] * v_cache_s + v_column
    if k_scale_ptr is not None:
        k, k_scale = _quantized(k, there)
        v, v_scale = _quantized(v, v_there)
        slot = sequence * scale_b + head * scale_h + target * scale_s
        tl.store(k_scale_ptr + slot, k_scale, mask=inside)
        tl.store(v_scale_ptr + slot, v_scale, mask=inside)
    tl.store(k_at, k.to(k_cache_ptr.dtype.element_ty), mask=there)
    tl.store(v_at, v.to(v_cache_ptr.dtype.element_ty), mask=v_there)


@triton.jit
def _move_kernel(
    k_ptr,  # [L, B, H, S, D] with strides, written
    v_ptr,  # [L, B, H, S, D_v]
    index_ptr,  # int64 [B, R], negative for no move
    start_ptr,  # int64 [B]
    table_ptr,  # int32 [B, pages] if PAGE, else None
    k_l,
    k_b,
    k_h,
    k_s,
    v_l,
    v_b,
    v_h,
    v_s,
    stride_index,
    layers,
    batch,
    heads,
    size,
    count,
    ring,
    pages,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RING: tl.constexpr,
    PAGE: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    layer, sequence, head = at // (batch * heads), at // heads % batch, at % heads
    place = tl.arange(0, BLOCK_R)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    index = tl.load(index_ptr + sequence * stride_index + place, mask=place < count, other=-1)
    start = tl.load(start_ptr + sequence)
    source, target = start + index, start + place
    if RING:
        source, target = source % ring, target % ring
    # Much of a path is often in place already, so slots that are their own targets are not copied.
    moved = (index >= 0) & (index != place)
    if PAGE:
        source = _paged_slot(source, table_ptr, sequence, pages, PAGE, moved)
        target = _paged_slot(target, table_ptr, sequence, pages, PAGE, moved)
        moved &= (source >= 0) & (target >= 0)
    moved &= (source < size) & (target < size)
    if layer < layers:
        base = k_ptr + layer * k_l + sequence * k_b + head * k_h
        _move(base, k_s, source, target, column, moved[:, None] & (column < DIM)[None, :])
    else:
        base = v_ptr + (layer - layers) * v_l + sequence * v_b + head * v_h
        _move(base, v_s, source, target, column, moved[:, None] & (column < VALUE_DIM)[None, :])


@triton.jit
def _move(base, stride, source, target, column, there):
    slots = tl.load(base + source[:, None] * stride + column[None, :], mask=there)
    # A slot may be the source of one thread and the target of another, so all threads read before any writes.
    tl.debug_barrier()
    tl.store(base + target[:, None] * stride + column[None, :], slots, mask=there)


@triton.jit
def _chunk_keys(chunk_start, k_s, scales, scale_s, position, inside, there):
    """Loads the key at ``position`` of each chunk as fp32."""
    keys = tl.load(chunk_start + position * k_s, mask=there, other=0.0).to(tl.float32)
    if scales is not None:
        keys *= tl.load(scales + position * scale_s, mask=inside, other=0.0)[:, None]
    return keys


@triton.jit
def _means_kernel(
    means_ptr,  # [L, B, H, C, D] with strides, written
    k_ptr,  # [L, B, H, S, D] with strides
    scale_ptr,  # fp32 [L, B, H, S, 1] with strides where the keys are int8, else None
    first_ptr,  # int64 [B]
    pages_ptr,  # int32 [B, C], chunk of slots that holds the keys of each chunk; or None
    means_l,
    means_b,
    means_h,
    means_c,
    k_l,
    k_b,
    k_h,
    k_s,
    scale_l,
    scale_b,
    scale_h,
    scale_s,
    batch,
    heads,
    chunks,
    places,
    count,
    CHUNK: tl.constexpr,
    DIM: tl.constexpr,
    VARIANCES: tl.constexpr,  # whether means_ptr has 2 D columns
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    layer, sequence, head = at // (batch * heads), at // heads % batch, at % heads
    offset = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    column = tl.arange(0, BLOCK_D)[None, :]
    chunk = tl.load(first_ptr + sequence) + offset
    place = chunk
    inside = (offset < count) & (place >= 0) & (place < places)
    if pages_ptr is not None:
        chunk = tl.load(pages_ptr + sequence * places + place, mask=inside, other=0).to(tl.int64)
    inside &= (chunk >= 0) & (chunk < chunks)
    there = inside[:, None] & (column < DIM)
    base = k_ptr + layer * k_l + sequence * k_b + head * k_h
    chunk_start = base + chunk[:, None] * CHUNK * k_s + column
    scales = scale_ptr
    if scale_ptr is not None:
        scales += layer * scale_l + sequence * scale_b + head * scale_h + chunk * CHUNK * scale_s
    total = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
    for position in tl.static_range(CHUNK):
        total += _chunk_keys(chunk_start, k_s, scales, scale_s, position, inside, there)
    mean = total / CHUNK
    out = (
        means_ptr + layer * means_l + sequence * means_b + head * means_h + place[:, None] * means_c + column
    )
    tl.store(out, mean.to(means_ptr.dtype.element_ty), mask=there)
    if VARIANCES:
        squares = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
        for position in tl.static_range(CHUNK):
            keys = _chunk_keys(chunk_start, k_s, scales, scale_s, position, inside, there) - mean
            squares += keys * keys
        tl.store(out + DIM, (squares / CHUNK).to(means_ptr.dtype.element_ty), mask=there)


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
    """See ``kv_slots.append_kv``."""
    (batch, heads, size, dim), value_dim = k_cache.shape, v_cache.shape[3]
    count = k.shape[2]
    new = (batch, heads, count)
    fit = k.shape == (*new, dim) and v.shape == (*new, value_dim) and v_cache.shape[:3] == k_cache.shape[:3]
    if not fit:
        raise ValueError(
            f"k {tuple(k.shape)} and v {tuple(v.shape)} do not fit caches of {tuple(k_cache.shape)} and "
            f"{tuple(v_cache.shape)}; they need equal batch, heads and head_dim"
        )
    check_ring(ring, count, size)
    scale_strides = _scale_strides((k_cache, k_scale), (v_cache, v_scale))
    block_d, block_v = triton.next_power_of_2(dim), triton.next_power_of_2(value_dim)
    block_t = max(1, min(triton.next_power_of_2(count), _TILE // 2 // max(block_d, block_v)))
    _append_kernel[(batch * heads, triton.cdiv(count, block_t))](
        k_cache, v_cache, k, v, start.contiguous(), k_scale, v_scale, table,
        *_strides(k_cache), *_strides(v_cache), *_strides(k), *_strides(v), *scale_strides,
        heads, size, count, ring, _pages(table),
        DIM=dim, VALUE_DIM=value_dim, BLOCK_T=block_t, BLOCK_D=block_d, BLOCK_V=block_v, RING=ring > 0,
        PAGE=0 if table is None else page,
        **launched_early(k.device),
    )  # fmt: skip


def _pages(table: Tensor | None) -> int:
    if table is None:
        return 0
    if not table.is_contiguous():
        raise ValueError("the page table must be dense; call .contiguous() first")
    return table.shape[1]


def move_kv(
    k: Tensor,
    v: Tensor,
    index: Tensor,
    start: Tensor,
    ring: int = 0,
    table: Tensor | None = None,
    page: int = 0,
) -> None:
    """See ``kv_slots.move_kv``; at most 1,024 entries of ``index`` for each sequence."""
    (layers, batch, heads, size, dim), value_dim = k.shape, v.shape[4]
    count = index.shape[1]
    if v.shape[:4] != k.shape[:4]:
        raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} may differ in their last dimension only")
    if count > 1024:
        raise ValueError(
            f"index has {count} entries per sequence, at most 1,024 fit a program; commit in parts"
        )
    check_ring(ring, count, size)
    if index.stride(1) != 1:
        index = index.contiguous()
    block_r = triton.next_power_of_2(count)
    widest = max(dim, value_dim)
    block_d = max(8, min(triton.next_power_of_2(widest), _TILE // block_r))
    _move_kernel[(2 * layers * batch * heads, triton.cdiv(widest, block_d))](
        k, v, index, start.contiguous(), table, *_strides(k), *_strides(v), index.stride(0),
        layers, batch, heads, size, count, ring, _pages(table),
        DIM=dim, VALUE_DIM=value_dim, BLOCK_R=block_r, BLOCK_D=block_d, RING=ring > 0,
        PAGE=0 if table is None else page,
    )  # fmt: skip


def chunk_means(
    means: Tensor,
    k: Tensor,
    first: Tensor,
    count: int,
    chunk: int,
    k_scale: Tensor | None = None,
    pages: Tensor | None = None,
) -> None:
    """See ``kv_slots.chunk_means``."""
    layers, batch, heads, size, dim = k.shape
    block_d = triton.next_power_of_2(dim)
    block_c = max(1, min(triton.next_power_of_2(count), 2048 // block_d))
    _means_kernel[(layers * batch * heads, triton.cdiv(count, block_c))](
        means, k, k_scale, first.contiguous(), pages,
        *_strides(means), *_strides(k), *_scale_strides((k, k_scale)), batch, heads, size // chunk,
        means.shape[3], count,
        CHUNK=chunk, DIM=dim, VARIANCES=means.shape[4] > dim, BLOCK_C=block_c, BLOCK_D=block_d,
    )  # fmt: skip


def _strides(kv: Tensor) -> tuple[int, ...]:
    """Returns all strides except the last, which must be 1."""
    if kv.stride(-1) != 1:
        raise ValueError("the last dimension of keys and values must be dense; call .contiguous() first")
    return kv.stride()[:-1]


def _scale_strides(*pairs: tuple[Tensor, Tensor | None]) -> tuple[int | None, ...]:
    """Returns all strides except the last of the scales of caches, or None for caches without scales."""
    strides = set[tuple[int | None, ...]]()
    for cache, own in pairs:
        if (cache.dtype == torch.int8) != (own is not None):
            raise ValueError(f"scales belong to int8, but keys and values are {cache.dtype}")
        if own is not None and own.shape != (*cache.shape[:-1], 1):
            raise ValueError(f"scales {tuple(own.shape)} do not fit a cache of {tuple(cache.shape)}")
        strides.add((None,) * (cache.ndim - 1) if own is None else own.stride()[:-1])
    if len(strides) > 1:
        raise ValueError("scales of keys and of values need the same strides; allocate them alike")
    return strides.pop()

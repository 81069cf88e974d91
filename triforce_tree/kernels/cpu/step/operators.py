"""Operators of a decoding step on the CPU, by the C code in ``fp32.c``.

Where the C code has no function, the operators' definitions are used.

The C functions are in ``fp32/attention.h`` (``append``) and in the headers of this folder, by subject.
"""

import struct

import torch
from torch import Tensor

from triforce_tree.kernels.cpu.fp32.library import run_with_work, usable
from triforce_tree.kernels.step import accept, grow, kv_slots, select, traversal
from triforce_tree.kernels.step.draws import FIRST_CHANCE, LATER_CHANCE

_APPEND = struct.Struct("27q")
_MOVE = struct.Struct("26q")
_SELECT = struct.Struct("21qdd")
_TRAVERSE = struct.Struct("25q")
_GREEDY = struct.Struct("12q")
_EXPAND = struct.Struct("12qff5q")
_PLACE = struct.Struct("19q")
_BEGIN = struct.Struct("16q")


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
    """See ``kernels.step.append_kv``; dtypes other than fp32 use the definition."""
    library = usable(k_cache, v_cache, k, v)
    if library is None or k_scale is not None or not start.is_contiguous():
        kv_slots.append_kv.definition(k_cache, v_cache, k, v, start, ring, k_scale, v_scale, table, page)
        return
    batch, heads, tokens, _ = k.shape
    size = k_cache.shape[2]
    if ring:
        kv_slots.check_ring(ring, tokens, size)
    request = _APPEND.pack(
        k.data_ptr(), *k.stride()[:3], k_cache.data_ptr(), *k_cache.stride()[:3], k.shape[3],
        v.data_ptr(), *v.stride()[:3], v_cache.data_ptr(), *v_cache.stride()[:3], v.shape[3],
        start.data_ptr(), batch, heads, tokens, size, ring, *_paged(table, page),
    )  # fmt: skip
    library.append(request)


def _paged(table: Tensor | None, page: int) -> tuple[int, int, int]:
    """Returns the address of a dense table ``[B, pages]``, its pages and their slots; zeros for None."""
    return (0, 0, 0) if table is None else (table.data_ptr(), table.shape[1], page)


def move_kv(
    k: Tensor,
    v: Tensor,
    index: Tensor,
    start: Tensor,
    ring: int = 0,
    table: Tensor | None = None,
    page: int = 0,
) -> None:
    """See ``kernels.step.move_kv``."""
    compiled = usable()
    if compiled is None or k.stride(4) != 1 or v.stride(4) != 1 or index.stride(1) != 1:
        kv_slots.move_kv.definition(k, v, index, start, ring, table, page)
        return
    (layers, batch, heads, size, _), places = k.shape, index.shape[1]
    kv_slots.check_ring(ring, places, size)
    slots = (
        field
        for t in (k, v)
        for field in (t.data_ptr(), *(n * t.itemsize for n in t.stride()[:4]), t.shape[4] * t.itemsize)
    )
    run_with_work(compiled.move_kv, _MOVE, (
        *slots, index.data_ptr(), start.data_ptr(), index.stride(0), layers, batch, heads, size, places, ring,
        *_paged(table, page),
    ))  # fmt: skip


def select_chunks(q: Tensor, means: Tensor, limit: Tensor, table: Tensor, slots: int, scale: float) -> None:
    """See ``kernels.step.select_chunks``."""
    compiled = usable(q, means)
    if compiled is None or table.stride(2) != 1:
        select.select_chunks.definition(q, means, limit, table, slots, scale)
        return
    (batch, heads, chunks, columns), dim = means.shape, q.shape[2]
    run_with_work(compiled.select_chunks, _SELECT, (
        q.data_ptr(), *q.stride()[:2], means.data_ptr(), *means.stride()[:3], limit.data_ptr(),
        table.data_ptr(), *table.stride()[:2], batch, heads, q.shape[1] // heads, dim, columns, chunks,
        slots, torch.get_num_threads(), scale, select.VARIANCE_WEIGHT * scale,
    ))  # fmt: skip


def traverse_tree(
    tokens: Tensor,
    parents: Tensor,
    p: Tensor,
    q: Tensor,
    q_rows: Tensor,
    uniforms: Tensor,
    exponential: Tensor,
    depth: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``kernels.step.traverse_tree``."""
    compiled = usable(p, q, uniforms, exponential)
    if compiled is None or any(x.stride(1) != 1 for x in (tokens, parents, q_rows)):
        return traversal.traverse_tree.definition(tokens, parents, p, q, q_rows, uniforms, exponential, depth)
    made = accept.empty_results(tokens, depth)
    batch, nodes, vocabulary = p.shape
    run_with_work(compiled.traverse_tree, _TRAVERSE, (
        tokens.data_ptr(), parents.data_ptr(), q_rows.data_ptr(), tokens.stride(0), parents.stride(0),
        q_rows.stride(0), p.data_ptr(), q.data_ptr(), *p.stride()[:2], *q.stride()[:2],
        uniforms.data_ptr(), exponential.data_ptr(), uniforms.stride(0), exponential.stride(0),
        *(x.data_ptr() for x in made), batch, nodes, vocabulary, depth,
    ))  # fmt: skip
    return made


def accept_greedy(tokens: Tensor, parents: Tensor, best: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """See ``kernels.step.accept_greedy``."""
    compiled, read = usable(), (tokens, parents, best)
    if compiled is None or any(x.stride(1) != 1 for x in read):
        return accept.accept_greedy.definition(tokens, parents, best, depth)
    made = accept.empty_results(tokens, depth)
    compiled.accept_greedy(
        _GREEDY.pack(
            *(x.data_ptr() for x in read), *(x.stride(0) for x in read), *(x.data_ptr() for x in made),
            *tokens.shape, depth,
        )
    )  # fmt: skip
    return made


def begin_tree(
    ids: Tensor,
    positions: Tensor,
    root: Tensor,
    at: Tensor,
    lengths: Tensor,
    tokens: Tensor,
    end: Tensor,
    dropped: Tensor,
    offsets: Tensor,
    ahead: Tensor,
) -> None:
    """See ``kernels.step.begin_tree``."""
    compiled = usable()
    if compiled is None or not _dense(ids, positions, at, lengths, end, dropped, offsets, ahead):
        grow.begin_tree.definition(ids, positions, root, at, lengths, tokens, end, dropped, offsets, ahead)
        return
    compiled.begin_tree(
        _BEGIN.pack(
            ids.data_ptr(), positions.data_ptr(), root.data_ptr(), at.data_ptr(), lengths.data_ptr(),
            tokens.data_ptr(), end.data_ptr(), dropped.data_ptr(), offsets.data_ptr(), ahead.data_ptr(),
            *ids.shape, positions.shape[1], at.shape[0], root.stride(0), tokens.stride(0),
        )
    )  # fmt: skip


def expand_nodes(
    logits: Tensor, temperature: Tensor | None, exponential: Tensor | None, probs: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """See ``kernels.step.expand_nodes``."""
    compiled = usable(logits, probs, *(() if exponential is None else (exponential,)))
    if compiled is None:
        return grow.expand_nodes.definition(logits, temperature, exponential, probs, count)
    draws, chances = grow.empty_draws(logits, count)
    noise = (0, 0, 0) if exponential is None else (exponential.data_ptr(), *exponential.stride()[:2])
    compiled.expand_nodes(
        _EXPAND.pack(
            logits.data_ptr(), *logits.stride()[:2], *noise, probs.data_ptr(), *probs.stride()[:2],
            0 if temperature is None else temperature.data_ptr(), draws.data_ptr(), chances.data_ptr(),
            FIRST_CHANCE, LATER_CHANCE, *logits.shape, count, torch.get_num_threads(),
        )
    )  # fmt: skip
    return draws, chances


def place_nodes(
    tokens: Tensor,
    parents: Tensor,
    mask_words: Tensor,
    path_chances: Tensor,
    ids: Tensor,
    mask: Tensor | None,
    draws: Tensor,
    chances: Tensor,
    pairs: Tensor | None,
    first: int,
    before: int,
) -> None:
    """See ``kernels.step.place_nodes``."""
    compiled = usable(path_chances, chances)
    maybe = [t for t in (mask, pairs) if t is not None]
    if compiled is None or not _dense(tokens, parents, mask_words, path_chances, ids, draws, chances, *maybe):
        grow.place_nodes.definition(
            tokens, parents, mask_words, path_chances, ids, mask, draws, chances, pairs, first, before
        )
        return
    batch, frontier, count = draws.shape
    compiled.place_nodes(
        _PLACE.pack(
            tokens.data_ptr(), parents.data_ptr(), mask_words.data_ptr(), path_chances.data_ptr(),
            ids.data_ptr(), 0 if mask is None else mask.data_ptr(), draws.data_ptr(), chances.data_ptr(),
            0 if pairs is None else pairs.data_ptr(), batch,
            tokens.shape[1], path_chances.shape[1], mask_words.shape[2], 0 if mask is None else mask.shape[1],
            frontier, count, ids.shape[1], first, before,
        )
    )  # fmt: skip


def _dense(*tensors: Tensor) -> bool:
    return all(x.is_contiguous() for x in tensors)

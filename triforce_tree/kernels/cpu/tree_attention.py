"""Tree attention on the CPU by torch, for what the C kernel of ``fp32/attention.py`` does not serve.

The torch version computes the same as ``reference.tree_attention``, but without the log-sum-exp. It applies
the scale to the queries, calls one fused softmax, and multiplies head by head with oneDNN if torch has it.
For a few query rows and tens of thousands of KV positions, torch's default matrix product repacks the cache
at each call. oneDNN reads it in place and takes about half the time (16 queries, 16,384 positions, 3 heads of
128).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from triforce_tree.kernels.attention import reference
from triforce_tree.kernels.attention.plan import KV, AttentionParams, FirstVisible, Plan, unpack_mask
from triforce_tree.kernels.cpu import onednn
from triforce_tree.kernels.step.kv_slots import dequantized

# With fewer KV positions, one batched product for all heads is faster than a call per head. At 1,580
# positions it takes three quarters of the time (AVX-512).
_ROWS_PER_HEAD_CALL = 4096
Product = Callable[[Tensor, Tensor], Tensor]


def planned_attention(
    q: Tensor, kv: KV, plan: Plan, params: AttentionParams, first: FirstVisible | None = None
) -> Tensor:
    """Computes attention with a plan from ``plan_trees``; see ``attention.backend.Attention.run``.

    Args:
        q: ``[queries, H_q, D]``, which may be only the first T queries of every sequence.
        kv: keys and values; int8 is converted to q's dtype.

    Returns:
        ``[queries, H_q, D_v]``, for the queries in ``q``.
    """
    how: dict[str, Any] = {"scale": params.scale, "softcap": params.softcap, "sinks": params.sinks}
    outs = [
        tree_attention(*tensors, first=own, **how)[0].transpose(0, 1)
        for *tensors, own in by_sequence(q, kv, plan, first)
    ]
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def by_sequence(
    q: Tensor, kv: KV, plan: Plan, first: FirstVisible | None
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]]:
    """Yields the arguments of ``reference.tree_attention`` for each sequence of a plan.

    Yields:
        q, k, v and mask of one sequence, and ``first`` or None.
    """
    _, begins, tails, firsts, counts, _ = plan.segments.tolist()
    stored = (kv.k, kv.v, *(kv.scales or ()))
    query_counts = _queries_per_sequence(q.shape[0], counts)
    for b, (queries, length) in enumerate(zip(q.split(query_counts), plan.lengths.tolist(), strict=True)):
        own = slice(firsts[b], firsts[b] + query_counts[b])
        # Each query that the call leaves out also shortens the tail by one position.
        mask = unpack_mask(plan.mask[own])[:, : tails[b] - counts[b] + query_counts[b]]
        hidden = 0 if first is None else int(first.low[b])
        start, stop = begins[b] + hidden, begins[b] + length + mask.shape[1]
        if kv.table is None:
            keys, values, *own_scales = (t[b : b + 1, :, start:stop] for t in stored)
        else:
            pages = kv.table[b] if kv.table.ndim == 3 else kv.table[b].expand(plan.heads.kv, -1)
            keys, values, *own_scales = (gathered_rows(t, pages, start, stop) for t in stored)
        if own_scales:
            pairs = zip((keys, values), own_scales, strict=True)
            keys, values = (dequantized(t, own, q.dtype) for t, own in pairs)
        visible = None if first is None else first.first[own] - hidden
        yield queries.transpose(0, 1)[None], keys, values, mask, visible


def _queries_per_sequence(queries: int, counts: Sequence[int]) -> list[int]:
    """Returns the number of queries of each sequence, which may be fewer than the planned ``counts``."""
    if queries == sum(counts):
        return list(counts)
    assert queries < sum(counts), f"{queries} queries, {sum(counts)} planned"
    assert queries % len(counts) == 0, f"{queries} queries of {len(counts)} sequences"
    return [queries // len(counts)] * len(counts)


def gathered_rows(pages: Tensor, table: Tensor, start: int, stop: int) -> Tensor:
    """Gathers positions ``start`` to ``stop`` (exclusive) by a page table.

    Args:
        pages: ``[P, H_kv, page, D]``.
        table: ``[H_kv, W]``.

    Returns:
        ``[1, H_kv, stop - start, D]``; a view if the pages are contiguous in memory.
    """
    size = pages.shape[2]
    skipped = start // size
    wanted = table[:, skipped : -(-stop // size)].long()
    count = wanted.shape[1]
    positions = slice(start - skipped * size, stop - skipped * size)
    if count and torch.equal(wanted, (wanted[0, 0] + torch.arange(count, device="cpu")).expand_as(wanted)):
        return pages[int(wanted[0, 0]) :][:count].transpose(0, 1).flatten(1, 2)[None, :, positions]
    # Whole pages are copied, which is several times faster than indexing single positions.
    whole = pages.flatten(2)
    out = pages.new_empty(*wanted.shape, whole.shape[2])
    for head, own in enumerate(wanted):
        torch.index_select(whole[:, head], 0, own, out=out[head])
    return out.view(1, len(wanted), -1, pages.shape[3])[:, :, positions]


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    *,
    scale: float,
    first: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes the output ``[B, H_q, T, D_v]`` of ``reference.tree_attention``, with its arguments.

    Every query must see at least one position (tree queries see themselves).
    """
    if softcap is not None or sinks is not None or q.dtype != torch.float32:
        return reference.tree_attention(
            q, k, v, mask, scale=scale, first=first, softcap=softcap, sinks=sinks
        )[0]
    batch, q_heads, queries, dim = q.shape
    kv_heads, positions = k.shape[1], k.shape[2]
    group, tail = q_heads // kv_heads, mask.shape[1]
    masked = ~mask
    before = None if first is None else torch.arange(positions, device="cpu") < first[:, None]

    def attend(x: Tensor, keys: Tensor, values: Tensor, product: Product) -> Tensor:
        scores = product(x, keys)
        per_query = scores.view(*scores.shape[:-2], group, queries, positions)
        per_query[..., positions - tail :].masked_fill_(masked, -torch.inf)
        if before is not None:
            per_query.masked_fill_(before, -torch.inf)
        return product(scores.softmax(-1), values.mT)

    packed = (q * scale).reshape(batch, kv_heads, group * queries, dim)
    # Torch does not repack the operands of a matrix-vector product.
    if not onednn.ONEDNN or positions < _ROWS_PER_HEAD_CALL or group * queries == 1:
        out = attend(packed, k, v, _batched)
    else:
        pairs = zip(packed.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), strict=True)
        out = torch.stack([attend(x, keys, values, onednn.linear) for x, keys, values in pairs])
    return out.view(batch, q_heads, queries, -1)


def _batched(x: Tensor, matrix: Tensor) -> Tensor:
    return x @ matrix.mT

"""Attention over tree-shaped KV on the CPU: ``segments.definition`` in few calls for many short nodes.

A tree has a few nodes with many rows or queries, and many leaves of a few rows with one query each. The
leaves are computed together, padded to the longest of them; all partial results are merged at once.
"""

import torch
from torch import Tensor

from triforce_tree.kernels.attention import reference
from triforce_tree.kernels.attention.plan import Plan
from triforce_tree.kernels.cpu.host import gathered_rows, tail_mask

# Most rows of a node that is computed together with others. What is padded costs time too.
_SHORT = 256

# Queries of a partial result, int64 [n]; outputs, fp32 [n, H_q, D_v]; log-sum-exps, fp32 [n, H_q].
_Part = tuple[Tensor, Tensor, Tensor]


def node_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *,
    scale: float,
    table: Tensor,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Arguments as of ``segments.definition``; q may hold fewer queries than planned."""
    parts: list[_Part] = []
    short: list[tuple[int, int, int]] = []
    for length, (node, _, tail, first, count, _) in zip(
        plan.lengths.tolist(), plan.segments.T.tolist(), strict=True
    ):
        if not count or not length + tail:
            continue
        if count == 1 and not tail and length <= _SHORT:
            short.append((node, length, first))
            continue
        own, pages = slice(first, first + count), table[node].expand(k.shape[1], -1)
        keys, values = (gathered_rows(t, pages, 0, length + tail) for t in (k, v))
        out, lse = reference.tree_attention(
            q[own].transpose(0, 1)[None], keys, values, tail_mask(plan.mask[own], tail),
            scale=scale, softcap=softcap,
        )  # fmt: skip
        rows = torch.arange(first, first + count)
        parts.append((rows, out[0].transpose(0, 1).float(), lse[0].transpose(0, 1)))
    if short:
        parts.append(_leaves(q, k, v, short, table, scale, softcap))
    out, lse = _merged(parts, q, v.shape[3])
    if sinks is not None:
        total = torch.logaddexp(lse, sinks.float())
        out, lse = out * (lse - total).exp()[..., None], total
    return out.to(q.dtype), lse


def _leaves(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: list[tuple[int, int, int]],
    table: Tensor,
    scale: float,
    softcap: float | None,
) -> _Part:
    """Nodes with one query each: (row of the table, rows, query)."""
    nodes, lengths, queries = (torch.tensor(column) for column in zip(*segments, strict=True))
    count = -(-int(lengths.max()) // k.shape[2])
    pages = table[nodes, :count].long()
    keys, values = (t[pages].transpose(1, 2).flatten(2, 3) for t in (k, v))  # [N, H_kv, rows, D]
    hidden = torch.arange(keys.shape[2]) >= lengths[:, None]
    # Slots after a node's rows may hold anything, NaN too, and 0 * NaN is NaN.
    values.masked_fill_(hidden[:, None, :, None], 0.0)
    own = q[queries]
    grouped = own.unflatten(1, (k.shape[1], -1))  # [N, H_kv, G, D]
    scores = (grouped @ keys.mT).float().mul_(scale)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores.masked_fill_(hidden[:, None, None], -torch.inf)
    lse = scores.logsumexp(-1)
    out = scores.sub_(lse[..., None]).exp_().to(values.dtype) @ values
    return queries, out.flatten(1, 2).float(), lse.flatten(1)


def _merged(parts: list[_Part], q: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    """``reference.merge_states`` of each query's partial results, fp32; (0, -inf) where there are none."""
    count, heads, _ = q.shape
    total = torch.zeros(count, heads, value_dim, dtype=torch.float32)
    top = torch.full((count, heads), -torch.inf, dtype=torch.float32)
    if not parts:
        return total, top
    queries, outs, lses = (torch.cat(column) for column in zip(*parts, strict=True))
    top.scatter_reduce_(0, queries[:, None].expand_as(lses), lses, "amax")
    weights = (lses - top[queries]).exp_()
    weight = torch.zeros(count, heads, dtype=torch.float32).index_add_(0, queries, weights)
    total.index_add_(0, queries, outs * weights[..., None])
    # Where there is no part both are 0.
    return total / weight.clamp_min(1e-30)[..., None], top + weight.log()

"""Defines tree attention in plain torch; the kernels are tested against this definition.

A forward over a token tree attends to two groups of KV positions. The *prefix* is committed, and every query
sees it. The *tail* holds the tree's tokens, of which a query sees itself and its ancestors. The mask
therefore covers only the tail and never grows with the context.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from triforce_tree.kernels.operators import fake, operator


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
) -> tuple[Tensor, Tensor]:
    """Computes the attention of T tree queries to S KV positions, of which the last N are the tail.

    Args:
        q: ``[B, H_q, T, D]`` rotated queries.
        k: ``[B, H_kv, S, D]`` keys, any strides; query head ``h`` reads KV head ``h // (H_q / H_kv)``.
        v: ``[B, H_kv, S, D_v]`` values; D_v may differ from D.
        mask: bool ``[T, N]``, N <= S; ``mask[t, j]`` says that query t sees position ``S - N + j``.
        scale: factor on the raw scores.
        first: int64 ``[T]`` or None; query t sees no position before ``first[t]`` (sliding windows).
        softcap: scores become ``softcap * tanh(score / softcap)`` (Gemma 2).
        sinks: ``[H_q]`` logits of a virtual key whose value is zero (gpt-oss).

    Returns:
        out ``[B, H_q, T, D_v]`` in q's dtype and lse fp32 ``[B, H_q, T]``, the log-sum-exp of the scores
        (natural logarithm, sinks included). A query that sees no position gets out 0 and lse -inf.
    """
    batch, q_heads, queries, dim = q.shape
    kv_heads, positions = k.shape[1], k.shape[2]
    group = q_heads // kv_heads
    packed = q.reshape(batch, kv_heads, group * queries, dim)
    scores = (packed @ k.transpose(-1, -2)).view(batch, kv_heads, group, queries, positions)
    scores = scores.float().mul_(scale)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    tail = mask.shape[1]
    scores[..., positions - tail :].masked_fill_(~mask, -torch.inf)
    if first is not None:
        before = torch.arange(positions, device=q.device) < first[:, None]
        scores.masked_fill_(before, -torch.inf)
    lse = scores.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.float().view(1, kv_heads, group, 1))
    weights = scores.sub_(lse.clamp_min(torch.finfo(lse.dtype).min)[..., None]).exp_()
    out = weights.to(v.dtype).view(batch, kv_heads, group * queries, positions) @ v
    return out.view(batch, q_heads, queries, -1), lse.view(batch, q_heads, queries)


@operator("merge_states", triton=".merge")
def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merges the attention to disjoint sets of KV positions (DeFT, arXiv 2404.00242, section 3.2).

    Args:
        outs: ``[P, ..., D]`` partial outputs.
        lses: ``[P, ...]`` their log-sum-exps (natural logarithm); -inf marks an empty part.

    Returns:
        out ``[..., D]`` and lse ``[...]`` of the union; (0, -inf) where every part is empty.
    """
    lse = lses.logsumexp(0)
    weights = (lses - lse.clamp_min(torch.finfo(lse.dtype).min)).exp()
    parts = torch.where(weights[..., None] > 0, outs.float(), 0.0)
    return (parts * weights[..., None]).sum(0).to(outs.dtype), lse


@fake("merge_states")
def _(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:], dtype=torch.float32)


def merge_pair(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merges two partial outputs ``[..., D]`` with log-sum-exps, fp32 ``[...]``: :func:`merge_states`."""
    total = torch.logaddexp(lse, other_lse)
    # Both are -inf where nothing is seen.
    finite = total.clamp_min(torch.finfo(total.dtype).min)
    weight, other_weight = ((each - finite).exp()[..., None] for each in (lse, other_lse))
    return (out * weight + other * other_weight).to(out.dtype), total


@operator("merge_parts", triton=".merge")
def merge_parts(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merges partial outputs like :func:`merge_states`, but from separate tensors, as prefill has them.

    Args:
        outs: ``[B, H, T, D]`` each. An output is copied unless its ``transpose(1, 2)`` is contiguous.
        lses: fp32 ``[B, H, T]`` each.

    Returns:
        out ``[B, H, T, D]``, a view of contiguous ``[B, T, H, D]``, and lse ``[B, H, T]``.
    """
    # The copies are faster in the order in which the outputs are in memory.
    parts = torch.stack([out.transpose(1, 2) for out in outs]), torch.stack([x.transpose(1, 2) for x in lses])
    out, lse = merge_states(*parts)
    return out.transpose(1, 2), lse.transpose(1, 2).contiguous()


@fake("merge_parts")
def _(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    like = torch.empty_like(outs[0].transpose(1, 2), memory_format=torch.contiguous_format)
    return like.transpose(1, 2), torch.empty_like(lses[0], memory_format=torch.contiguous_format)

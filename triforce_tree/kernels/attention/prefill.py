"""Attention of a causal chunk behind the rows that precede it: prefill."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from triforce_tree.kernels.attention.reference import tree_attention


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Query t of T sees rows 0 ... S - T + t of S; with a window, the last ``window`` of them.

    Args:
        q: ``[B, H_q, T, D]``.
        k, v: ``[B, H_kv, S, D]``; the chunk's own rows are the last T.

    Returns:
        ``[B, H_q, T, D]``.
    """
    queries, rows = q.shape[2], k.shape[2]
    if window is not None and rows > window + queries:
        skip = rows - window - queries
        k, v, rows = k[:, :, skip:], v[:, :, skip:], rows - skip
    if softcap is None and sinks is None:
        grouped = q.shape[1] != k.shape[1]
        if queries == rows and (window is None or window >= rows):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        bias = causal_lower_right(queries, rows) if window is None else _band(queries, rows, window, q)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=grouped)
    mask = torch.ones(queries, queries, dtype=torch.bool, device=q.device).tril_()
    first = None
    if window is not None:
        first = (torch.arange(queries, device=q.device) + rows - queries - window + 1).clamp_(0)
    out, _ = tree_attention(q, k, v, mask, scale=scale, first=first, softcap=softcap, sinks=sinks)
    return out


def _band(queries: int, rows: int, window: int, like: Tensor) -> Tensor:
    """bool ``[T, S]``: the causal band of ``window`` positions."""
    own = torch.arange(queries, device=like.device)[:, None] + rows - queries
    row = torch.arange(rows, device=like.device)
    return (row <= own) & (row > own - window)

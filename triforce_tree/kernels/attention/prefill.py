"""Causal attention of a prefill chunk over the preceding positions and itself."""

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
    """Query t of T attends to positions 0 ... S - T + t of S; with a window, to the last ``window`` of them.

    Args:
        q: ``[B, H_q, T, D]``.
        k, v: ``[B, H_kv, S, D]`` and ``[B, H_kv, S, D_v]``; the chunk's own keys and values are the last T.

    Returns:
        ``[B, H_q, T, D_v]``.
    """
    queries, positions = q.shape[2], k.shape[2]
    if k.shape[3] != v.shape[3] and softcap is None and sinks is None:
        return _of_equal_widths(q, k, v, scale, window)
    if window is not None and positions > window + queries:
        skip = positions - window - queries
        k, v, positions = k[:, :, skip:], v[:, :, skip:], positions - skip
    if softcap is None and sinks is None:
        grouped = q.shape[1] != k.shape[1]
        if queries == positions and (window is None or window >= positions):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        bias = (
            causal_lower_right(queries, positions) if window is None else _band(queries, positions, window, q)
        )
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=grouped)
    mask = torch.ones(queries, queries, dtype=torch.bool, device=q.device).tril_()
    first = None
    if window is not None:
        first = (torch.arange(queries, device=q.device) + positions - queries - window + 1).clamp_(0)
    out, _ = tree_attention(q, k, v, mask, scale=scale, first=first, softcap=softcap, sinks=sinks)
    return out


def _of_equal_widths(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """``causal_attention`` with zeros appended to the narrower of keys and values.

    Torch's flash attention needs equal widths; its fallback keeps the scores of a whole chunk in memory. The
    zeros change no score and no output.
    """
    value_dim, missing = v.shape[3], k.shape[3] - v.shape[3]
    if missing > 0:
        v = F.pad(v, (0, missing))
    else:
        q, k = (F.pad(t, (0, -missing)) for t in (q, k))
    return causal_attention(q, k, v, scale=scale, window=window)[..., :value_dim]


def _band(queries: int, positions: int, window: int, like: Tensor) -> Tensor:
    """bool ``[T, S]``: the causal band of ``window`` positions."""
    query_position = torch.arange(queries, device=like.device)[:, None] + positions - queries
    kv_position = torch.arange(positions, device=like.device)
    return (kv_position <= query_position) & (kv_position > query_position - window)

"""Attention to the slots that an indexer chooses, and the slots of its keys (``models/indexers.py``)."""

import torch
from torch import Tensor

from triforce_tree.kernels.attention.plan import AttentionParams, unpack_mask

# Most elements of the keys and values that are gathered at once.
_MOST_GATHERED = 1 << 26


def in_halves(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Returns an indexer's keys ``[B, T, D]`` as keys and values ``[B, 1, T, D / 2]`` of KV slots."""
    first = keys.shape[2] - keys.shape[2] // 2
    return keys[:, None, :, :first].contiguous(), keys[:, None, :, first:].contiguous()


def joined(k: Tensor, v: Tensor) -> Tensor:
    """Returns the keys ``[B, S, D]`` that :func:`in_halves` split."""
    return torch.cat([k[:, 0], v[:, 0]], -1)


def visible_slots(lengths: Tensor, mask: Tensor, queries: int, slots: int) -> Tensor:
    """Returns which slots queries see, bool ``[B, T, S]``: all before the tail, and some of the tail.

    Args:
        lengths: ``[B]``, slots before the tail.
        mask: int64 ``[B * N, words]``, see ``TreeAttentionView.mask``; the first ``queries`` of each N count.
    """
    tail = unpack_mask(mask).view(len(lengths), -1, 64 * mask.shape[1])[:, :queries]  # [B, T, 64 words]
    place = torch.arange(slots, device=mask.device) - lengths[:, None]  # [B, S], within the tail
    inside = (place >= 0) & (place < tail.shape[2])
    at = place.clamp(0, tail.shape[2] - 1).long()
    return (place < 0)[:, None] | (inside[:, None] & tail.gather(2, at[:, None].expand(-1, queries, -1)))


def selected_attention(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, visible: Tensor) -> Tensor:
    """Returns the attention of each query to its own slots, ``[B, T, H_q, D_v]`` in q's dtype.

    Args:
        q: ``[B, H_q, T, D]``.
        k, v: ``[B, H_kv, S, D]`` and ``[B, H_kv, S, D_v]``.
        params: with ``selected``, slots of which the first is one that the query sees, if it sees any.
        visible: bool ``[B, T, S]``, which slots a query sees; of the selected ones it attends to these.
    """
    assert params.selected is not None
    selected = params.selected.long()
    seen = visible.gather(2, selected)
    batch, heads, _, dim = k.shape
    count, chosen = selected.shape[1:]
    # Slots that are not seen may hold anything, NaN too, so the first one is read in their place.
    slots = torch.where(seen, selected, selected[..., :1])
    block = max(1, _MOST_GATHERED // (batch * heads * chosen * (dim + v.shape[3])))
    outs = []
    for first in range(0, count, block):
        part = slice(first, min(count, first + block))
        places = slots[:, part].flatten(1)[:, None, :, None].expand(-1, heads, -1, -1)
        keys, values = (
            x.gather(2, places.expand(-1, -1, -1, x.shape[3])).unflatten(2, (-1, chosen)) for x in (k, v)
        )
        grouped = q[:, :, part].unflatten(1, (heads, -1)).transpose(2, 3)  # [B, H_kv, T, G, D]
        scores = torch.matmul(grouped, keys.mT).float() * params.scale  # [B, H_kv, T, G, K]
        if params.softcap is not None:
            scores = (scores / params.softcap).tanh() * params.softcap
        scores.masked_fill_(~seen[:, None, part, None], torch.finfo(torch.float32).min)
        if params.sinks is not None:
            sinks = params.sinks.float().view(heads, 1, -1, 1)
            scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)
        probs = scores.softmax(-1)[..., :chosen].to(v.dtype)
        out = torch.matmul(probs, values)
        outs.append(out.permute(0, 2, 1, 3, 4).flatten(2, 3))
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1)

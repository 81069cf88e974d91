"""Which chunks of the context a retrieval view shows."""

import torch
from torch import Tensor

from triforce_tree.kernels.operators import operator


def chunk_interest(q: Tensor, means: Tensor, limit: Tensor, scale: float) -> Tensor:
    """How much each KV head wants each chunk, on a scale that only ranks.

    The largest logarithm of a softmax share over the candidates among the heads of the query group; for
    a group of one the raw score, which ranks alike. Logarithms do not underflow as shares do.

    Args:
        q: ``[B, H_q, D]``, one query a sequence.
        means: ``[B, H, C, D]``.
        limit: int64 ``[B]``; candidates are chunks ``0 ... limit[b] - 1``.
        scale: factor on the raw scores.

    Returns:
        fp32 ``[B, H, C]``; -inf for what is no candidate, or not a number.
    """
    batch, heads, chunks, dim = means.shape
    group = q.shape[1] // heads
    packed = q.reshape(batch, heads, group, dim).float()
    scores = (packed @ means.float().transpose(-1, -2)) * scale
    outside = torch.arange(chunks, device=q.device) >= limit[:, None]
    scores = scores.masked_fill(outside[:, None, None], -torch.inf)
    if group > 1:
        scores = scores.log_softmax(-1)
    return scores.amax(2).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


@operator("select_chunks", writes=("table",), triton=".select_kernels")
def select_chunks(q: Tensor, means: Tensor, limit: Tensor, table: Tensor, slots: int, scale: float) -> None:
    """Choose the chunks a retrieval view shows: chunk 0 and those of greatest interest, per KV head.

    Args:
        q, means, limit, scale: see ``chunk_interest``; ``limit >= slots``.
        table: int32 ``[B, H, W]``; its first ``slots`` columns receive the chosen chunks, ascending.
        slots: how many are chosen, chunk 0 included; equal interests go to the lower chunk.
    """
    interest = chunk_interest(q, means, limit, scale)
    outside = torch.arange(means.shape[2], device=q.device) >= limit[:, None]
    # -inf ranks below every score, yet a candidate of that score must come before what is none.
    order = interest.clamp_min(torch.finfo(torch.float32).min)
    order = order.masked_fill(outside[:, None], -torch.inf)
    order[..., 0] = torch.inf
    least = order.topk(slots, sorted=False).values.amin(-1, keepdim=True)
    chosen = order >= least
    if chosen.sum() > slots * chosen.shape[0] * chosen.shape[1]:
        above, equal = order > least, order == least
        chosen = above | (equal & (equal.cumsum(-1) <= slots - above.sum(-1, keepdim=True)))
    table[..., :slots] = chosen.nonzero()[:, 2].view(*chosen.shape[:2], slots)

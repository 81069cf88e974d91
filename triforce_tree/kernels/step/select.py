"""Selection of the context chunks that a retrieval view attends to."""

import torch
from torch import Tensor

from triforce_tree.kernels.operators import operator

VARIANCE_WEIGHT = 0.25
"""Weight of the variance term of a score. For keys k with a Gaussian distribution, the logarithm of the
mean of exp(q.k) has the weight 0.5. The mean over a few keys is usually lower (docs/retrieval.md)."""


def chunk_scores(q: Tensor, means: Tensor, limit: Tensor, scale: float) -> Tensor:
    """Returns the retrieval scores of chunks for each KV head; only their order matters.

    The score of a chunk for a query head estimates the attention that the chunk receives. It is
    ``scale * q.mean``, plus ``VARIANCE_WEIGHT * scale**2 * q**2.var`` with variances. The score for a KV head
    is the maximum over the query heads of its group of the log-softmax over the candidates. Logarithms are
    used because probabilities could underflow. With one query head the score is the raw score, which has the
    same order.

    Args:
        q: ``[B, H_q, D]``, one query per sequence.
        means: ``[B, H, C, D]``, the mean key of each chunk; or ``[B, H, C, 2 D]``, the mean key and the
            variances of its components.
        limit: int64 ``[B]``; candidates are chunks ``0 ... limit[b] - 1``.
        scale: factor on the raw scores.

    Returns:
        fp32 ``[B, H, C]``; -inf for chunks that are not candidates, and for NaN.
    """
    batch, heads, chunks, dim = means.shape
    group = q.shape[1] // heads
    packed = q.reshape(batch, heads, group, -1).float()
    if dim == 2 * packed.shape[-1]:
        packed = torch.cat([packed, VARIANCE_WEIGHT * scale * packed.square()], -1)
    scores = (packed @ means.float().transpose(-1, -2)) * scale
    outside = torch.arange(chunks, device=q.device) >= limit[:, None]
    scores = scores.masked_fill(outside[:, None, None], -torch.inf)
    if group > 1:
        scores = scores.log_softmax(-1)
    return scores.amax(2).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


@operator("select_chunks", writes=("table",), triton=".select_kernels", cpu="..cpu.step.operators")
def select_chunks(q: Tensor, means: Tensor, limit: Tensor, table: Tensor, slots: int, scale: float) -> None:
    """Selects the chunks of a retrieval view per KV head: chunk 0 and the chunks with the highest scores.

    Args:
        q, means, limit, scale: see ``chunk_scores``; ``limit >= slots``.
        table: int32 ``[B, H, W]``; its first ``slots`` columns receive the selected chunks, ascending.
        slots: number of selected chunks, including chunk 0; of equal scores, the lower chunk is selected.
    """
    scores = chunk_scores(q, means, limit, scale)
    outside = torch.arange(means.shape[2], device=q.device) >= limit[:, None]
    # A candidate with the score -inf must rank before chunks that are not candidates.
    ranking = scores.clamp_min(torch.finfo(torch.float32).min)
    ranking = ranking.masked_fill(outside[:, None], -torch.inf)
    ranking[..., 0] = torch.inf
    threshold = ranking.topk(slots, sorted=False).values.amin(-1, keepdim=True)
    chosen = ranking >= threshold
    if chosen.sum() > slots * chosen.shape[0] * chosen.shape[1]:
        above, equal = ranking > threshold, ranking == threshold
        chosen = above | (equal & (equal.cumsum(-1) <= slots - above.sum(-1, keepdim=True)))
    table[..., :slots] = chosen.nonzero()[:, 2].view(*chosen.shape[:2], slots)

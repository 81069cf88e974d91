"""Removal of improbable tokens by top-k, top-p and min-p, with options of each sequence's own."""

import torch
from torch import Tensor

from triforce_tree.kernels.operators import fake, operator


@operator("truncate_scores", triton=".truncation_kernels", cpu=".truncation_cpu")
def truncate_scores(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Sets the scores of improbable tokens to -inf, as transformers' TopKLogitsWarper, TopPLogitsWarper and
    MinPLogitsWarper do one after the other.

    Top-k keeps the k largest scores and their equals. Top-p removes tokens as long as they and all less
    probable ones have at most the probability 1 - p; at least one token stays. Min-p removes tokens that are
    less probable than ``min_p`` times the most probable one.

    Args:
        scores: fp32 ``[B, T, V]``.
        top_k: int64 ``[B]``; 0 keeps all tokens.
        top_p: fp64 ``[B]`` in [0, 1]; 1 keeps all tokens.
        min_p: fp64 ``[B]`` in [0, 1]; 0 keeps all tokens.

    Returns:
        fp32 ``[B, T, V]``. Which of several equal scores top-p keeps is not specified, except that the number
        of them is the same. NaN stays.
    """
    vocab = scores.shape[-1]
    rising, order = scores.sort(-1)
    removed = vocab - torch.where(top_k > 0, top_k.clamp_max(vocab), vocab)
    least = rising.gather(-1, removed[:, None, None].expand(*scores.shape[:2], 1))
    scores, rising = (each.masked_fill(each < least, -torch.inf) for each in (scores, rising))
    rest = torch.where(top_p < 1, (1 - top_p).to(scores.dtype), -1.0)[:, None, None]
    outside = rising.softmax(-1).cumsum(-1) <= rest
    outside[..., -1] = False
    scores = scores.masked_fill(torch.empty_like(outside).scatter_(-1, order, outside), -torch.inf)
    probs = scores.softmax(-1)
    least = min_p.to(scores.dtype)[:, None, None] * probs.amax(-1, keepdim=True)
    return scores.masked_fill(probs < least, -torch.inf)


@fake("truncate_scores")
def _(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    return scores.new_empty(scores.shape)

"""Attention of the layers of trained heads, and rotary embeddings."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import rotate_half

from triforce_tree.drafters.token_map import ABSENT

Attended = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""Stores keys and values, and returns the attention of the last queries, see ``PairNetwork.forward``."""


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary embeddings to queries or keys ``[B, H, T, D]``; cosines and sines are ``[B, T, D]``."""
    result: Tensor = x.float() * cos[:, None] + rotate_half(x.float()) * sin[:, None]
    return result.to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Returns attention outputs ``[B, H_q, T, D_v]``, finite even if the mask allows no slot.

    Args:
        q: ``[B, H_q, T, D]``, rotated.
        k, v: ``[B, H_kv, S, D]``, rotated, and ``[B, H_kv, S, D_v]``.
        mask: bool ``[B, T, S]``, True where attention is allowed.
    """
    groups = q.shape[1] // k.shape[1]
    # One product for all queries of a KV head; a broadcast one would copy the keys for each query head.
    rows = q.unflatten(1, (-1, groups)).flatten(2, 3)  # [B, H_kv, G T, D]
    scores = torch.matmul(rows, k.mT).unflatten(2, (groups, -1)).float() * scale
    probs = scores.masked_fill(~mask[:, None, None], ABSENT).softmax(-1).to(v.dtype)
    out: Tensor = torch.matmul(probs.flatten(2, 3), v).unflatten(2, (groups, -1)).flatten(1, 2)
    return out

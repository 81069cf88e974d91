"""Norms, rotary embeddings, gates and attention of the layers of trained drafters.

While decoding, each of the first three is one kernel on a GPU. Kernels have no gradients, so that training
computes the same in plain torch.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm, rotate_half

from triforce_tree.drafters.token_map import ABSENT
from triforce_tree.kernels.norm.reference import add_rms_norm, row_rms_norm
from triforce_tree.kernels.operators import Operator
from triforce_tree.kernels.pointwise.reference import gated, rotary

P = ParamSpec("P")
R = TypeVar("R")

Attended = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""Stores keys and values, and returns the attention of the last queries, see ``PairNetwork.forward``."""


def _or_plain(operator: Operator[P, R]) -> Callable[P, R]:
    """Returns the operator, or its definition in plain torch where gradients may be needed."""
    return operator.definition if torch.is_grad_enabled() else operator


class RmsNorm(LlamaRMSNorm):
    """An RMS norm as in Llama."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return _or_plain(row_rms_norm)(hidden_states, self.weight, self.variance_epsilon, 0.0, False)

    def added(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ``x + residual`` and its norm."""
        return _or_plain(add_rms_norm)(x, residual, self.weight, self.variance_epsilon, 0.0, False)


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Applies rotary embeddings to queries and keys ``[B, H, T, D]``; cosines and sines are fp32
    ``[B, T, D]``.
    """
    return _or_plain(rotary)(q, k, cos, sin)


def rotated_one(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary embeddings to queries or keys ``[..., B, H, T, D]`` alone."""
    result: Tensor = x.float() * cos[:, None] + rotate_half(x.float()) * sin[:, None]
    return result.to(x.dtype)


def silu_gated(gate: Tensor, up: Tensor) -> Tensor:
    """Returns ``silu(gate) * up``, ``[..., N]``."""
    return _or_plain(gated)(gate, up, "silu")


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

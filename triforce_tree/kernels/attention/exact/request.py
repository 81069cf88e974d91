"""The arguments of exact attention."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Near(NamedTuple):
    """What all layers of a forward on a GPU need to know of its tree.

    Attributes:
        positions: int32 ``[B * T]``, of the queries.
        slots: int32 ``[B * T, n]``, of the newest positions that a query sees, see ``positions.near_start``.
    """

    positions: Tensor
    slots: Tensor


@dataclass(frozen=True)
class ExactAttention:
    """Attention of T new tokens a sequence to the positions before them and their ancestors.

    Attributes:
        q: ``[B * T, H_q, D]``, rotated.
        k, v: ``[B, H_kv, S, D]`` and ``[B, H_kv, S, D_v]``, or pages ``[P, H_kv, page, D]`` with a ``table``.
        lengths: int32 ``[B]``, positions before the new tokens, whose slots come after them.
        mask: int64 ``[B, planned, words]``, planned at least T; bit j of word w of query t: it sees new token
            ``64 w + j``, which is itself or an ancestor; a token comes after its ancestors. The number of new
            tokens that a query sees is thus one more than its depth. Windows are not in the mask.
        scale: factor on the scores.
        table: int32 ``[B, pages]`` or ``[B, H_kv, pages]``, the page of each run of positions.
        window: positions that a query sees, its own included; 0 for all.
        chunked: the window does not slide, see ``AttentionParams``.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 leaves them.
        sinks: ``[H_q]`` logits of a virtual key whose value is zero.
        near: from ``launch.near``, once for all layers; None to compute it anew. Not read on the CPU.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: Tensor
    mask: Tensor
    scale: float
    table: Tensor | None = None
    window: int = 0
    chunked: bool = False
    softcap: float = 0.0
    sinks: Tensor | None = None
    near: Near | None = None

    @property
    def tokens(self) -> int:
        """T."""
        return self.q.shape[0] // self.lengths.shape[0]

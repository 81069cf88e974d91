"""The parameters of a layer's attention, the KV cache that a forward uses, and the shape of its entries."""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from triforce_tree.kernels.attention.plan import Heads


@dataclass(frozen=True)
class AttentionParams:
    """How one layer attends.

    Attributes:
        scale: factor on the raw scores.
        window: positions that a query sees, its own included; the key at position j is visible to the query
            at position i iff ``i - j < window``. None: all of them.
        softcap: scores become ``softcap * tanh(score / softcap)``; None leaves them as they are.
        sinks: ``[H_q]`` logits of a virtual key whose value is zero.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class KVCache(Protocol):
    """The cache of one forward: stores the new keys and values, and computes attention over them."""

    def positions(self, count: int) -> Tensor:
        """int64 ``[count]``: the positions of the next ``count`` tokens."""

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, how: AttentionParams) -> Tensor:
        """Store the new keys and values of one layer, and attend to everything that the queries may see.

        Args:
            layer: the attention module; ``layer.layer_idx`` numbers it.
            q, k, v: ``[B, H_q, T, D]``, ``[B, H_kv, T, D]`` and ``[B, H_kv, T, D_v]`` as the model passes
                them.

        Returns:
            ``[B, H_q, T, D_v]``.
        """

    def advance(self, count: int) -> None:
        """Called at the end of a forward: its ``count`` tokens are in the cache."""


@dataclass(frozen=True)
class KVShape:
    """Shape of one layer's keys and values: the attention heads, and the window (see ``AttentionParams``)."""

    heads: Heads
    window: int | None = None

    @property
    def elements(self) -> int:
        """Elements of one token's keys and values."""
        return self.heads.row

"""What the layers of a model ask of attention, and the shape of the keys and values that they keep."""

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
    """Where the new keys and values of one forward go, and what its queries attend to."""

    def positions(self, count: int) -> Tensor:
        """int64 ``[count]``: the positions of the next so many tokens."""

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, how: AttentionParams) -> Tensor:
        """Store the new keys and values of one layer, and attend to everything the queries may see.

        Args:
            layer: the attention module; ``layer.layer_idx`` numbers it.
            q, k, v: ``[B, H_q, T, D]`` and ``[B, H_kv, T, D]`` as the model hands them over.

        Returns:
            ``[B, H_q, T, D]``.
        """

    def advance(self, count: int) -> None:
        """The forward is over: its ``count`` tokens are there."""


@dataclass(frozen=True)
class KVShape:
    """Keys and values of one layer: the heads of its attention, and its window (``AttentionParams``)."""

    heads: Heads
    window: int | None = None

    @property
    def numbers(self) -> int:
        """Elements that one token takes."""
        return 2 * self.heads.kv * self.heads.dim

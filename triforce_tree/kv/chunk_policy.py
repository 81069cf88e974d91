"""Selects the chunks of a retrieval view, by default or by the user's own policy."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from triforce_tree.config import RetrievalConfig
from triforce_tree.kernels import step


class ChunkPolicy(Protocol):
    """A retrieval policy: a function that writes the selected chunks of one layer into a table.

    A plain function with these arguments is one. It may depend on committed tokens and on the query of the
    root, never on proposals (docs/losslessness.md); the views hand it nothing else.

    Attributes:
        capturable: whether a CUDA graph can hold a call, which then must not wait for the device or keep
            tensors between calls; True where it is missing.
        needs_context: whether it takes the keyword arguments ``layer`` and ``keys``; False where it is
            missing.
    """

    capturable: bool
    needs_context: bool

    def __call__(
        self, q: Tensor, means: Tensor, limit: Tensor, table: Tensor, slots: int, scale: float, **context: Any
    ) -> None:
        """Selects chunks; see ``kernels.step.select_chunks``.

        Args:
            q: ``[B, H_q, D]``, the query of each sequence's root.
            means: ``[B, H, C, D]``, the mean keys; ``[B, H, C, 2 D]`` with ``key_variance``, variances last.
            limit: int64 ``[B]``; candidates are chunks ``0 ... limit[b] - 1``, and ``limit >= slots``.
            table: int32 ``[B, H, W]``; its first ``slots`` columns receive the chunks, each only once,
                ascending.
            slots: how many are selected.
            scale: factor of query and key products.
            context: with ``needs_context``: ``layer``, the index of the layer; ``keys`` ``[B, H, S, D]``, all
                keys of the layer, S >= chunks * C.
        """


class BoundPolicy:
    """Applies the policy of some settings to one layer after the other.

    Args:
        config: the settings.

    Attributes:
        capturable, needs_context: see :class:`ChunkPolicy`.
    """

    def __init__(self, config: RetrievalConfig) -> None:
        self._policy = policy = config.select_chunks
        self.capturable: bool = getattr(policy, "capturable", True)
        self.needs_context: bool = getattr(policy, "needs_context", False)

    def __call__(self, layer: int, keys: Callable[[], Tensor]) -> Callable[..., None]:
        """Returns the function that selects the chunks of a layer.

        Args:
            layer: its index.
            keys: makes its keys.
        """
        if self._policy is None:
            return step.select_chunks
        return partial(self._policy, layer=layer, keys=keys()) if self.needs_context else self._policy

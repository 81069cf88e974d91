"""Defines KV views: they store the new keys and values of attention layers, and attend.

A view is made for T new tokens a sequence, the nodes of a token tree. ``begin`` sets their positions, each
attention layer then calls the view, and ``move`` keeps the accepted nodes. Views differ in which committed KV
slots a layer sees: all of them, a sliding window, the chunks that a retrieval policy selected, or slots in
host memory.
"""

from collections.abc import Sequence
from typing import Protocol, Self

from torch import Tensor

from triforce_tree.config import RetrievalConfig
from triforce_tree.kernels.attention.plan import AttentionParams
from triforce_tree.models.running_forward import IndexedPass, RecurrentPass
from triforce_tree.runtime.executor import Cuts


class KVView(Protocol):
    """Lets one kind of forward see and write the KV slots.

    Attributes:
        capturable: whether a CUDA graph can hold a forward over them: it never waits for the device. Or where
            not.
        resizable: whether a forward may bring fewer new tokens than the view was made for, its first ones.
        recurrent: the states of recurrent layers; None for models without any.
        indexed: stores the keys of indexers; None for models without any.
    """

    capturable: bool | Cuts
    resizable: bool

    @property
    def recurrent(self) -> RecurrentPass | None: ...

    @property
    def indexed(self) -> IndexedPass | None: ...

    def begin(self, start: Tensor, mask_words: Tensor | None = None) -> None:
        """Prepares the view for a forward; it is called before each one.

        Args:
            start: int64 ``[B]``, committed tokens of each sequence: the position of the first new one.
            mask_words: int64 ``[B, T, W]``; bit j of word w of query t: new token t sees new token
                ``64 w + j``. None where the mask never changes.
        """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        """Stores the new tokens' keys and values of one layer, and attends.

        Args:
            q, k, v: ``[B, H_q, T, D]``, ``[B, H_kv, T, D]`` and ``[B, H_kv, T, D_v]``; q and k rotated.

        Returns:
            ``[B, T, H_q, D_v]``.
        """

    def move(self, index: Tensor) -> None:
        """Keeps accepted nodes: new token ``index[b, i]`` is moved to the i-th new slot; -1 moves nothing.

        Args:
            index: int64 ``[B, R]``. What is not moved, the next forward overwrites.
        """


class RetrievalView(KVView, Protocol):
    """Is the view of the retrieval model, which selects chunks by their mean keys.

    Attributes:
        config: budget and recent window of the slots of this process.
        refreshing: whether the next forward selects chunks; set before its ``begin``.
    """

    config: RetrievalConfig
    refreshing: bool

    def refresh(self, root: Tensor, committed: Tensor) -> None:
        """Prepares a forward that selects chunks by its root's queries; called before ``begin``.

        Args:
            root: int64 ``[B]``, position of the root.
            committed: int64 ``[B]``, tokens whose keys may be selected.
        """

    def resized(self, queries: int, depths: Sequence[int]) -> Self:
        """Returns a view for another number of new tokens, with the same selection of chunks.

        Args:
            queries: T.
            depths: the depths of the T tokens in their tree.
        """

    def update_chunk_means(self, first: Tensor, count: int) -> None:
        """Recomputes the mean keys of chunks of the text; what lies beyond the KV slots is not read.

        Args:
            first: int64 ``[B]``, the first chunk of each sequence.
            count: chunks of each sequence.
        """

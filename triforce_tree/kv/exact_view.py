"""Is the view of a KV store for forwards whose results have the same bits in any batch."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from triforce_tree.kernels.attention.backend import Attention
from triforce_tree.kernels.attention.exact.attention import ExactAttention, Near
from triforce_tree.kernels.attention.plan import KV, AttentionParams
from triforce_tree.kv.store import KVStore
from triforce_tree.kv.tree_attention_view import TreeAttentionView
from triforce_tree.kv.window import Window

MOST_DEPTH = 64
"""Deepest token of a tree: positions so near to a query may be in any slots."""
MOST_ROWS = 128
"""Most new tokens of a sequence on a GPU, as many as compiled layers take."""


class ExactView(TreeAttentionView):
    """Is a :class:`TreeAttentionView` with exact attention; all slots of its tail are new tokens.

    Raises:
        ValueError: a tree is deeper than ``MOST_DEPTH``, or on a GPU larger than ``MOST_ROWS``.
    """

    def __init__(
        self, store: KVStore, queries: int, mask: Tensor | None = None, depths: Sequence[int] | None = None
    ) -> None:
        super().__init__(store, queries, mask=mask, depths=depths)
        self._near: Near | None = None
        if store.device.type == "cuda" and queries > MOST_ROWS:
            raise ValueError(
                f"exact=True verifies at most {MOST_ROWS} tokens at a time on a GPU, not {queries}; use a "
                "smaller tree or gamma"
            )
        deepest = max(depths) if depths is not None else queries - 1
        if deepest > MOST_DEPTH:
            raise ValueError(
                f"exact=True verifies at most {MOST_DEPTH} tokens in a line, not {deepest}; reduce "
                "gamma, the depth of tree, or lookup, or give tail_tree=False"
            )

    def _write(self, layer: int, k: Tensor, v: Tensor, params: AttentionParams) -> None:
        super()._write(layer, k, v, params)
        if layer == self._first_layer:
            # Not in ``begin``: buffers given to ``follow`` may be filled as late as before the first layer.
            mask = self.mask.view(self.store.batch, -1, self.mask.shape[1])
            self._near = self.store.attention.exact.near(self.lengths, mask, k.shape[2])

    def _packed_attention(
        self, q: Tensor, kv: KV, attention: Attention, params: AttentionParams, window: Window | None
    ) -> Tensor:
        """Computes the attention of packed queries by position; see :class:`TreeAttentionView`."""
        assert kv.scales is None, "8-bit keys and values are refused before"
        # A window that hides nothing of any sequence is none.
        size, chunked = (window.size, window.chunked) if window is not None else (None, False)
        params = replace(params, window=size, chunked=chunked)
        mask = self.mask.view(self.store.batch, -1, self.mask.shape[1])
        request = ExactAttention(q, kv, params, self.lengths, mask, self._near)
        out: Tensor = self.store.attention.exact.attention(request)
        return out

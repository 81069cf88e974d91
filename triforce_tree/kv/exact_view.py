"""The view of a KV store on the device for forwards whose rows have the same bits in any company."""

from collections.abc import Sequence

from torch import Tensor

from triforce_tree.kernels.attention.exact.attention import attention
from triforce_tree.kernels.attention.exact.request import ExactAttention
from triforce_tree.kernels.attention.plan import Plan
from triforce_tree.kv.store import KVStore
from triforce_tree.kv.tree_attention_view import TreeAttentionView
from triforce_tree.models.attention import AttentionParams, KVShape

MOST_DEPTH = 64
"""Deepest token of a tree: positions so near to a query may be in any slots."""


class ExactView(TreeAttentionView):
    """:class:`TreeAttentionView` by exact attention; arguments as there, for a tail that is all new.

    Raises:
        ValueError: a tree is deeper than ``MOST_DEPTH``.
    """

    def __init__(
        self, store: KVStore, queries: int, mask: Tensor | None = None, depths: Sequence[int] | None = None
    ) -> None:
        super().__init__(store, queries, mask=mask, depths=depths)
        if depths is not None and max(depths) > MOST_DEPTH:
            raise ValueError(
                f"exact=True verifies at most {MOST_DEPTH} tokens in a line, not {max(depths)}; reduce "
                "gamma, the depth of tree, or lookup"
            )

    def _attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: Plan,
        params: AttentionParams,
        shape: KVShape | None = None,
        table: Tensor | None = None,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        batch, heads, tokens, dim = q.shape
        assert scales is None, "8-bit keys and values are refused before"
        window = shape.window or 0 if shape is not None else 0
        request = ExactAttention(
            q.transpose(1, 2).reshape(batch * tokens, heads, dim), keys, values, self.lengths,
            self.mask.view(batch, -1, self.mask.shape[1]), params.scale, table, window,
            shape is not None and shape.chunked, params.softcap or 0.0, params.sinks,
        )  # fmt: skip
        out = attention(request)
        return out.view(batch, tokens, heads, -1)

"""Views of slots whose common prefixes are stored once: all their queries attend to each together."""

from collections.abc import Sequence

import torch
from torch import Tensor

from triforce_tree.config import RetrievalConfig
from triforce_tree.kernels import step
from triforce_tree.kernels.attention.backend import Attention
from triforce_tree.kernels.attention.plan import KV, Heads
from triforce_tree.kernels.attention.prefixes import PrefixPlan
from triforce_tree.kv.pool.store import PooledStore
from triforce_tree.kv.store import KVGroup, LayerSlots
from triforce_tree.kv.tree_attention_view import PagedRetrievalView, TreeAttentionView


class PooledView(TreeAttentionView):
    """Is a view of T new tokens per sequence, which see their prefixes, their sequence and ancestors.

    Args:
        store: the slots.
        queries, mask, depths: as for :class:`TreeAttentionView`.
    """

    store: PooledStore

    def __init__(
        self,
        store: PooledStore,
        queries: int,
        mask: Tensor | None,
        depths: Sequence[int] | None,
    ) -> None:
        # Of each sequence after its prefixes, then of the segments of prefixes.
        count = (1 + store.depth) * store.batch
        self._all_lengths = torch.zeros(count, dtype=torch.int32, device=store.device)
        # The store refers to them weakly.
        self._plans: list[PrefixPlan] = []
        super().__init__(store, queries, mask=mask, depths=depths)

    def _attention_of(self, heads: Heads, mask: Tensor, kv_dtype: torch.dtype, exact: bool) -> Attention:
        store = self.store
        self.lengths = self._all_lengths[: store.batch]
        plan = PrefixPlan(heads, mask, store.batch, store.depth, self._all_lengths, self.mask)
        store.keep_current(plan)
        self._plans.append(plan)
        return store.attention.prefixes(plan, store.dtype, kv_dtype)

    def begin(self, start: Tensor, mask_words: Tensor | None = None) -> None:
        """See :class:`TreeAttentionView`."""
        # An ended sequence may count as shorter than its prefixes.
        super().begin((start - self.store.prefix).clamp_min_(0), mask_words)
        self.at.add_(self.store.first)

    def _kv(self, slots: LayerSlots) -> KV:
        group, place = self.store.whole[slots.number], slots.place
        k, v, *scales = (part[place] for part in group.parts)
        return KV(k, v, scales=(scales[0], scales[1]) if scales else None)


class PooledExactView(TreeAttentionView):
    """Attends exactly, over the pages of each sequence, in whatever slots they are."""

    store: PooledStore

    def begin(self, start: Tensor, mask_words: Tensor | None = None) -> None:
        """See :class:`TreeAttentionView`."""
        super().begin(start, mask_words)
        self.at.sub_(self.store.prefix).clamp_(min=0).add_(self.store.first)

    def _kv(self, slots: LayerSlots) -> KV:
        return self.store.whole[slots.number].paged(slots.place, self.store.pages)


class PooledRetrievalView(PagedRetrievalView):
    """The retrieval view: each sequence selects among the chunks of its prefixes and its own.

    Each has its own means, those of prefixes too, so that chunks are selected as in a sequence alone.

    Args:
        store: the slots; their page is the chunk.
        queries, config, max_growth, depths: as for :class:`PagedRetrievalView`.
    """

    store: PooledStore

    def __init__(
        self,
        store: PooledStore,
        queries: int,
        config: RetrievalConfig,
        max_growth: int,
        depths: Sequence[int] | None = None,
    ) -> None:
        super().__init__(store, queries, config, max_growth, depths)
        count, apart = store.pages.shape
        self._first_in_pages = apart * torch.arange(count, device=store.device)[:, None, None]

    def begin(self, start: Tensor, mask_words: Tensor | None = None) -> None:
        """See :class:`TreeAttentionView`."""
        super().begin(start, mask_words)
        self.at.sub_(self.store.prefix).clamp_(min=0).add_(self.store.first)

    def _to_pages(self, chunks: Tensor, first_page: Tensor) -> None:
        chunks.copy_(self.store.pages.view(-1)[chunks + self._first_in_pages])

    @property
    def _groups(self) -> list[KVGroup]:
        return self.store.whole

    def _keys(self, slots: LayerSlots) -> Tensor:
        pages, own = self.store.whole[slots.number].paged(slots.place), self.store.pages.long()  # [B, pages]
        keys = pages.k[own]
        if pages.scales is not None:
            keys = (keys * pages.scales[0][own]).to(self.store.dtype)
        return keys.transpose(1, 2).flatten(2, 3)  # of [B, pages, H_kv, page, D]

    def update_chunk_means(self, first: Tensor, count: int) -> None:
        """See :class:`PagedRetrievalView`."""
        store = self.store
        for group, retrieved in zip(store.groups, self.retrieved, strict=True):
            assert retrieved is not None
            # As if each sequence had all slots; its pages say which it has.
            scale = None if group.scales is None else group.scales[0]
            step.chunk_means(retrieved.means, group.k, first, count, self.config.chunk, scale, store.pages)

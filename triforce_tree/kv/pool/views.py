"""Views of sequences in pages; all queries that see a common prefix attend to it together."""

from collections.abc import Sequence
from dataclasses import replace

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
    """Is a view whose queries read all positions of their sequence by its page table.

    Args:
        store: the slots.
        queries, mask, depths, exact: as for :class:`TreeAttentionView`.
    """

    store: PooledStore

    def __init__(
        self,
        store: PooledStore,
        queries: int,
        mask: Tensor | None,
        depths: Sequence[int] | None,
        exact: bool = False,
    ) -> None:
        self._page = store.page
        super().__init__(store, queries, mask=mask, depths=depths, exact=exact)

    def begin(self, start: Tensor, mask_words: Tensor | None = None) -> None:
        """See :class:`TreeAttentionView`."""
        self.store.update()
        super().begin(start, mask_words)

    def _kv(self, slots: LayerSlots) -> KV:
        return self.store.whole[slots.number].paged(slots.place, self.store.pages)


class SharingView(PooledView):
    """Is a view whose queries read each common prefix once, for an attention backend that can do so."""

    def __init__(
        self, store: PooledStore, queries: int, mask: Tensor | None, depths: Sequence[int] | None
    ) -> None:
        # The store refers to them weakly.
        self._plans: list[PrefixPlan] = []
        super().__init__(store, queries, mask, depths)

    def _attention_of(self, heads: Heads, mask: Tensor, kv_dtype: torch.dtype, exact: bool) -> Attention:
        store = self.store
        plan = PrefixPlan(heads, mask, store.batch, store.depth, self.lengths, self.mask)
        store.keep_current(plan)
        self._plans.append(plan)
        return store.attention.prefixes(plan, store.dtype, kv_dtype, store.page)

    def begin(self, start: Tensor, mask_words: Tensor | None = None) -> None:
        super().begin(start, mask_words)
        # An ended sequence may count as shorter than its prefixes.
        self.lengths.copy_((start - self.store.prefix).clamp_min_(0))


class PooledRetrievalView(PagedRetrievalView):
    """The retrieval view: each sequence selects among the chunks of its prefixes and its own.

    Each has its own means, those of prefixes too, so that chunks are selected as in a sequence alone.

    Args:
        store: the slots, in pages of whole chunks.
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
        count, apart = store.chunks.shape
        self._first_in_chunks = apart * torch.arange(count, device=store.device)[:, None, None]

    def _new_means(self, number: int, size: tuple[int, ...]) -> Tensor:
        """Stores for other numbers of sequences have the same memory: none of them is used at the same time,
        and means count as unknown where another takes over.
        """
        known, (_, batch, *_) = self.store.means.get(number), size
        if known is None or known.shape[1] < batch or known[:, :batch].shape != size:
            known = self.store.means[number] = super()._new_means(number, size)
        return known[:, :batch]

    def _to_pages(self, chunks: Tensor, first_page: Tensor) -> None:
        chunks.copy_(self.store.chunks.view(-1)[chunks + self._first_in_chunks])

    @property
    def _groups(self) -> list[KVGroup]:
        return [replace(group, page=self.config.chunk) for group in self.store.whole]

    def _keys(self, slots: LayerSlots) -> Tensor:
        pages, own = self.store.whole[slots.number].paged(slots.place), self.store.pages.long()  # [B, pages]
        keys = pages.k[own]
        if pages.scales is not None:
            keys = (keys * pages.scales[0][own]).to(self.store.dtype)
        return keys.transpose(1, 2).flatten(2, 3)  # of [B, pages, H_kv, page, D]

    def update_chunk_means(self, first: Tensor, count: int) -> None:
        store = self.store
        store.update()
        for group, retrieved in zip(store.groups, self.retrieved, strict=True):
            assert retrieved is not None
            # The tensors are passed as if each sequence had all slots; the table says which slots it has.
            scale = None if group.scales is None else group.scales[0]
            step.chunk_means(retrieved.means, group.k, first, count, self.config.chunk, scale, store.chunks)

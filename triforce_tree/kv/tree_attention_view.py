"""Defines views of a KV store on the device: all committed KV slots, or those that a retrieval selected.

A forward writes its keys and values after the committed slots. :meth:`TreeAttentionView.move` keeps the
accepted ones; the next forward overwrites the others.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from triforce_tree.config import RetrievalConfig
from triforce_tree.kernels import step
from triforce_tree.kernels.attention.backend import Attention
from triforce_tree.kernels.attention.exact.attention import ExactTrees, check_sizes
from triforce_tree.kernels.attention.plan import (
    KV,
    AttentionParams,
    FirstVisible,
    Heads,
    pack_mask,
    plan_trees,
)
from triforce_tree.kv.chunk_policy import BoundPolicy
from triforce_tree.kv.indexed import in_halves, joined, selected_attention, visible_slots
from triforce_tree.kv.store import KVGroup, KVStore, LayerSlots
from triforce_tree.kv.window import Window
from triforce_tree.models.running_forward import IndexedPass
from triforce_tree.runtime.executor import Cuts


@dataclass(frozen=True)
class _Layer:
    """Holds what every forward of a view uses in one layer."""

    slots: LayerSlots
    kv: KV
    attention: Attention
    first: FirstVisible | None


class TreeAttentionView:
    """Is a view of T new tokens per sequence, which see all tokens before the tail, and ancestors in it.

    Layers with a window see only the positions inside it.

    Args:
        store: holds the KV slots.
        queries: T.
        tail: N >= T, slots that the mask covers; the T new ones are the last of them.
        mask: bool ``[T, N]`` where it never changes.
        depths: position of each of the N tail tokens, counted from the tail's first. By default those of the
            mask's paths, or of a single token; where ``begin`` brings the mask and all of the tail is new,
            they are those of its paths.
        exact: whether the bits of a query's results depend neither on other queries nor on the slots.

    Attributes:
        at: int64 ``[B]``, the first of the new slots.
        lengths: int32 ``[B]``, tokens before the tail.
        mask: int64 ``[B * T, words]``; bit j of word w says that the query sees tail slot ``64 w + j``.
        capturable: whether a CUDA graph can hold a forward over them, or where not.
        resizable: whether a forward may bring fewer new tokens than T, the first ones of the plan.

    Raises:
        ValueError: layers have windows, and neither ``depths`` nor a mask gives the tail's depths.
    """

    capturable: bool | Cuts = True
    recurrent = None
    _page = 0  # of what most layers attend to
    _repeats = True  # what a subclass adds to a layer's work is the same in each forward

    def __init__(
        self,
        store: KVStore,
        queries: int,
        tail: int | None = None,
        mask: Tensor | None = None,
        depths: Sequence[int] | None = None,
        exact: bool = False,
    ) -> None:
        self.store = store
        if exact:
            check_sizes(store.device, queries, queries - 1 if depths is None else max(depths))
        tail = queries if tail is None else tail
        if depths is None:
            depths = _path_depths(queries, tail, mask)
        if mask is None:
            mask = torch.ones(queries, tail, dtype=torch.bool, device="cpu")
        batch, device = store.batch, store.device
        self.at = torch.zeros(batch, dtype=torch.int64, device=device)
        self.resizable = store.attention.can.fewer_queries
        self.capturable = store.attention.can.captures
        self.ahead = tail - queries
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.mask = pack_mask(mask).repeat(batch, 1).to(device)
        self._windows: dict[tuple[int, bool], Window] = {}
        by_heads: dict[Heads, Attention] = {}
        self._attentions: list[Attention] = []
        for group in store.groups:
            heads, window = group.shape.heads, group.shape.window
            if heads not in by_heads:
                by_heads[heads] = self._attention_of(heads, mask, group.k.dtype, exact)
            kind = (window or 0, group.shape.chunked)
            if window is not None and kind not in self._windows:
                if depths is None and tail > queries:
                    raise ValueError(
                        f"window={window} needs the depths of all {tail} tail tokens; pass depths"
                    )
                self._windows[kind] = Window(window, depths, queries, batch, device, group.shape.chunked)
            attention = by_heads[heads]
            if window is not None and not exact:
                masked = self._windows[kind].masked(self.mask)
                attention = attention.over(replace(attention.plan, mask=masked))
            self._attentions.append(attention)
        self._first_layer = min((group.layers[0] for group in store.groups), default=0)
        self._seen: Tensor | None = None
        self._layers: dict[int, _Layer] = {}

    @property
    def repeats(self) -> bool:
        """Returns whether all forwards over as many tokens do the same work on the same buffers, as far as
        Python sees it.
        """
        repeat = (getattr(each, "repeats", False) for each in self._attentions)
        return self._repeats and self.capturable is True and not self._windows and all(repeat)

    def _attention_of(self, heads: Heads, mask: Tensor, kv_dtype: torch.dtype, exact: bool) -> Attention:
        """Returns the attention of layers with such heads, over ``self.lengths`` and ``self.mask``."""
        batch, device, dtype = self.store.batch, self.store.device, self.store.dtype
        plan = plan_trees(heads, [mask] * batch, [0] * batch, device=device)
        plan = replace(plan, lengths=self.lengths, mask=self.mask)
        if exact:
            return ExactTrees(self.store.attention.exact, plan)
        return self.store.attention.trees(plan, dtype, kv_dtype, self._page)

    def begin(self, start: Tensor, mask_words: Tensor | None = None) -> None:
        """Sets the lengths and the mask of the coming forward.

        Args:
            start: int64 ``[B]``, tokens before the tail.
            mask_words: int64 ``[B, T, W]``, bit j of word w: query t sees tail slot ``64 w + j``. Fewer
                queries where the forward brings fewer tokens.
        """
        self._seen = None
        torch.add(start, self.ahead, out=self.at)
        self.lengths.copy_(start)
        if mask_words is not None:
            mask = self.mask.view(self.store.batch, -1, self.mask.shape[1])
            mask[:, : mask_words.shape[1], : mask_words.shape[2]] = mask_words

    def follow(self, at: Tensor, lengths: Tensor) -> None:
        """Reads the lengths from these buffers instead of ``begin``; their writer writes ``mask`` as well.

        Args:
            at: int64 ``[B]``, the first of the new slots.
            lengths: int32 ``[B]``, tokens before the tail.
        """
        self.at, self.lengths = at, lengths
        self._attentions = [each.over(replace(each.plan, lengths=lengths)) for each in self._attentions]
        self._layers.clear()

    def move(self, index: Tensor) -> None:
        """Moves new token ``index[b, i]``, int64 ``[B, R]``, to the i-th new slot; -1 moves nothing."""
        self.store.move(index, self.at)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        own = self._layers.get(layer) or self._bound(layer)
        params = self._append(own.slots, k, v, params)
        batch, heads, queries, dim = q.shape
        if params.selected is not None:
            return selected_attention(q, *own.slots.kv, params, self.visible(queries))
        packed = q.transpose(1, 2).reshape(batch * queries, heads, dim)
        return own.attention.run(packed, own.kv, params, own.first).view(batch, queries, heads, -1)

    @property
    def indexed(self) -> IndexedPass | None:
        return None if self.store.index_layers is None else self

    def visible(self, queries: int) -> Tensor:
        """See ``IndexedPass``."""
        if self._seen is None:
            self._seen = visible_slots(self.lengths, self.mask, queries, self.store.slots)
        return self._seen

    def index_keys(self, layer: int, new: Tensor, first: int) -> Tensor:
        """See ``IndexedPass``."""
        assert self.store.index_layers is not None
        slots = self.store.layers[self.store.index_layers + layer]
        step.append_kv(*slots.kv, *in_halves(new), self.at + first, 0, None, None)
        return joined(*slots.kv)

    def _append(self, slots: LayerSlots, k: Tensor, v: Tensor, params: AttentionParams) -> AttentionParams:
        """Stores the new keys and values of one layer, and returns how it attends."""
        params = slots.checked(params)
        if slots.layer == self._first_layer:
            # Windows are updated here and not in ``begin``, because the buffers that ``follow`` gets may be
            # filled just before the first layer.
            for window in self._windows.values():
                window.update(self.lengths, self.mask)
            for attention in self._attentions:
                attention.begin()
        store, (k_scale, v_scale) = self.store, slots.scales or (None, None)
        step.append_kv(*slots.kv, k, v, self.at, slots.ring, k_scale, v_scale, store.writable, store.page)
        return params

    def _bound(self, layer: int) -> _Layer:
        """Returns what is used in the forwards of a layer, which stays the same from now on."""
        slots = self.store.layers[layer]
        window = self._windows.get((slots.window or 0, slots.group.shape.chunked))
        first = window.first_visible if window is not None else None
        self._layers[layer] = _Layer(slots, self._kv(slots), self._attentions[slots.number], first)
        return self._layers[layer]

    def _kv(self, slots: LayerSlots) -> KV:
        """Returns the keys and values of a layer as its queries read them."""
        return slots.stored()


def _path_depths(queries: int, tail: int, mask: Tensor | None) -> list[int] | None:
    """Returns the depths of the tail's tokens by a mask of tree paths; None if it does not give them."""
    if mask is None:
        return [0] if tail == 1 else None
    return [count - 1 for count in mask.sum(1).tolist()] if queries == tail else None


@dataclass(frozen=True)
class _Retrieved:
    """Holds the retrieval of one group of layers.

    Attributes:
        table: int32 ``[layers, B, H_kv, pages]``: the selected chunks, ascending, then the recent ones.
        means: ``[layers, B, H_kv, C, D]``, the mean key of every chunk; ``2 D`` with ``key_variance``.
        first_page: int32 ``[B, 1, 1]``, the first page of each sequence.
    """

    table: Tensor
    means: Tensor
    first_page: Tensor


class PagedRetrievalView(TreeAttentionView):
    """Is the retrieval view of a cache on the device: new tokens see selected chunks and recent tokens.

    A table of chunks for each layer and KV head refers to slots of the full cache, and nothing is copied. New
    keys and values go to the next slots of the full cache; the target's next forward overwrites them. Layers
    with a window are not subject to retrieval: they see their whole window, as they do for the target.

    Args:
        store: the full cache; its page is the chunk.
        queries: T.
        config: budget, recent window (tokens).
        max_growth: most tokens by which the context grows between two refreshes.
        depths: as for ``TreeAttentionView``.

    Attributes:
        refreshing: whether the next forward selects chunks.
        slots: chunks that are selected.
        boundary: int64 ``[B]``, the first chunk that is always visible.
        retrieved: for each group of the store; None for layers with a window.
    """

    def __init__(
        self,
        store: KVStore,
        queries: int,
        config: RetrievalConfig,
        max_growth: int,
        depths: Sequence[int] | None = None,
    ) -> None:
        self.config, self._page = config, config.chunk
        super().__init__(store, queries, depths=depths)
        chunk, device = config.chunk, store.device
        self.slots = (config.budget - config.recent) // chunk
        self._policy = BoundPolicy(config)
        self.capturable = self.capturable and self._policy.capturable
        self.refreshing = False
        recent = -(-(config.recent + max_growth + queries) // chunk) + 2
        self._recent = torch.arange(recent, device=device)
        self._visible = torch.zeros_like(self.lengths)
        self.retrieved = [
            None if group.shape.window is not None else self._retrieved(number, self.slots + recent)
            for number, group in enumerate(store.groups)
        ]
        self._attend_to_tables()
        self.boundary = torch.zeros(store.batch, dtype=torch.int64, device=device)

    def _attend_to_tables(self) -> None:
        """Lets the layers that retrieve attend to as many slots of their tables as are visible."""
        for number, (attention, retrieved) in enumerate(zip(self._attentions, self.retrieved, strict=True)):
            if retrieved is not None:
                plan = replace(attention.plan, lengths=self._visible)
                self._attentions[number] = attention.over(plan)

    def _retrieved(self, number: int, pages: int) -> _Retrieved:
        group = self.store.groups[number]
        (layers, batch, heads, _, dim), device = group.k.shape, group.k.device
        return _Retrieved(
            table=torch.zeros(layers, batch, heads, pages, dtype=torch.int32, device=device),
            means=self._new_means(number, (layers, batch, heads, self.chunks, self.config.columns(dim))),
            first_page=(torch.arange(batch, device=device)[:, None, None] * group.pages_apart).int(),
        )

    def _new_means(self, number: int, size: tuple[int, ...]) -> Tensor:
        """Returns memory for the means of a group of layers."""
        return torch.zeros(size, device=self.store.device, dtype=self.store.dtype)

    def resized(self, queries: int, depths: Sequence[int]) -> Self:
        """Returns a view for another number of new tokens, with the same selection of chunks.

        Args:
            queries: T, at most as many as ``max_growth`` of this view allows for.
            depths: as for ``TreeAttentionView``.
        """
        other = copy.copy(self)
        TreeAttentionView.__init__(other, self.store, queries, depths=depths)
        other.capturable = self.capturable
        other._visible = torch.zeros_like(self._visible)
        other._attend_to_tables()
        return other

    @property
    def chunks(self) -> int:
        """Returns the number of chunks of a whole sequence."""
        return self.store.slots // self.config.chunk

    def refresh(self, root: Tensor, committed: Tensor) -> None:
        """Lets the next forward select chunks by the queries of its root.

        Candidates are the chunks before the recent window of ``root`` whose tokens are all ``committed``.
        """
        boundary = (root - self.config.recent).minimum(committed) // self.config.chunk
        # Where there are no more chunks than slots, all of them are selected and the table is the identity.
        self.boundary.copy_(boundary.clamp_min(self.slots))
        recent = (self.boundary[:, None] + self._recent).clamp_max(self.chunks - 1)
        for retrieved in self.retrieved:
            if retrieved is not None:
                shown = retrieved.table[..., self.slots :]
                shown.copy_(recent[:, None])
                self._to_pages(shown, retrieved.first_page)

    def begin(self, start: Tensor, mask_words: Tensor | None = None) -> None:
        super().begin(start, mask_words)
        # As many of the chunks before the boundary are visible as there are slots for them.
        self._visible.copy_(start + (self.slots - self.boundary) * self.config.chunk)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        if self.refreshing:
            slots = self.store.layers[layer]
            retrieved = self.retrieved[slots.number]
            if retrieved is not None:
                table = retrieved.table[slots.place]
                select = self._policy(layer, lambda: self._keys(slots))
                means = retrieved.means[slots.place]
                select(q[:, :, 0], means, self.boundary, table, self.slots, params.scale)
                self._to_pages(table[:, :, : self.slots], retrieved.first_page)
        return super().__call__(layer, q, k, v, params)

    def _kv(self, slots: LayerSlots) -> KV:
        retrieved = self.retrieved[slots.number]
        if retrieved is None:
            return super()._kv(slots)
        return self._groups[slots.number].paged(slots.place, retrieved.table[slots.place])

    def _to_pages(self, chunks: Tensor, first_page: Tensor) -> None:
        """Replaces chunks of the sequences, int32 ``[..., B, H_kv, n]``, by their pages."""
        if self.store.batch > 1:
            chunks += first_page

    @property
    def _groups(self) -> list[KVGroup]:
        """Returns the groups that have each page once."""
        return self.store.groups

    def _keys(self, slots: LayerSlots) -> Tensor:
        """Returns the layer's keys ``[B, H_kv, S, D]`` as numbers."""
        keys = slots.kv[0]
        return keys if slots.scales is None else (keys * slots.scales[0]).to(self.store.dtype)

    def update_chunk_means(self, first: Tensor, count: int) -> None:
        """Recomputes the mean keys of ``count`` chunks from chunk ``first[b]`` on, after a commit."""
        for group, retrieved in zip(self.store.groups, self.retrieved, strict=True):
            if retrieved is not None:
                scale = None if group.scales is None else group.scales[0]
                step.chunk_means(retrieved.means, group.k, first, count, self.config.chunk, scale)

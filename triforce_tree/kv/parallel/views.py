"""Attention over ranks: each attends to its own positions, and one collective a layer merges the results."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from triforce_tree.config import RetrievalConfig
from triforce_tree.kernels.attention.backend import Attention
from triforce_tree.kernels.attention.plan import KV, AttentionParams, FirstVisible, Plan
from triforce_tree.kernels.attention.prefill import attention_states
from triforce_tree.kernels.attention.reference import merge_states
from triforce_tree.kernels.ranks import merged_over_ranks
from triforce_tree.kv.parallel.store import SequenceSplit, SplitStore, share_of
from triforce_tree.kv.prefill import PromptCache
from triforce_tree.kv.recurrent_states import RecurrentStates
from triforce_tree.kv.tree_attention_view import PagedRetrievalView, TreeAttentionView
from triforce_tree.runtime.executor import Cuts


class _OverRanks:
    """Attends to this rank's slots, and merges the results of all ranks."""

    def __init__(self, own: Attention, split: SequenceSplit) -> None:
        self._own, self._split, self.plan = own, split, own.plan

    def over(self, plan: Plan) -> Self:
        return type(self)(self._own.over(plan), self._split)

    def begin(self) -> None:
        self._own.begin()

    def run(self, q: Tensor, kv: KV, params: AttentionParams, first: FirstVisible | None = None) -> Tensor:
        assert first is None, "layers with a window are not split"
        if not self._split.has_tail:
            params = replace(params, sinks=None)
        return merged_over_ranks(*self._own.states(q, kv, params), self._split.group)

    def states(
        self, q: Tensor, kv: KV, params: AttentionParams, first: FirstVisible | None = None
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("results of all ranks are not merged with others")


class _PartView(TreeAttentionView):
    """Is a view of this rank's slots, whose layers have no window; its lengths count these slots alone."""

    split: SequenceSplit

    def on(self, split: SequenceSplit) -> None:
        """Attends as one of several ranks: all store the new tokens, and one sees them."""
        self.split = split
        self._attentions = [_OverRanks(each, split) for each in self._attentions]
        if not split.has_tail:
            self.mask.zero_()

    def begin(self, start: Tensor, mask_words: Tensor | None = None) -> None:
        super().begin(self.split.counts(start), mask_words if self.split.has_tail else None)


class _PartRetrievalView(_PartView, PagedRetrievalView):
    """Is this rank's retrieval view, which selects among its own chunks."""


class SplitView:
    """Is a :class:`KVView` of T new tokens per sequence over slots that several ranks keep.

    Args:
        store: this rank's.
        queries, mask, depths: as for :class:`TreeAttentionView`.
    """

    capturable: bool | Cuts = True
    recurrent = indexed = None

    def __init__(
        self,
        store: SplitStore,
        queries: int,
        mask: Tensor | None,
        depths: Sequence[int] | None,
    ) -> None:
        self._take(store, _PartView(store.part, queries, mask=mask, depths=depths), queries, mask, depths)

    def _take(
        self,
        store: SplitStore,
        part: _PartView,
        queries: int,
        mask: Tensor | None,
        depths: Sequence[int] | None,
    ) -> None:
        self._slots, self._split, self._part = store, store.split, part
        part.on(store.split)
        self._whole = TreeAttentionView(store.whole, queries, mask=mask, depths=depths)
        self.resizable, self.capturable = part.resizable, part.capturable
        self._start = torch.zeros_like(part.at)

    def begin(self, start: Tensor, mask_words: Tensor | None = None) -> None:
        """See :class:`KVView`; ``start`` counts the tokens of all ranks."""
        self._start.copy_(start)
        self._part.begin(start, mask_words)
        self._whole.begin(start, mask_words)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        if self._slots.splits(layer):
            return self._part(layer, q, k, v, replace(params, window=None, chunked=False))
        return self._whole(layer, q, k, v, params)

    def move(self, index: Tensor) -> None:
        """See :class:`KVView`: each rank keeps its own positions of the accepted path."""
        self._part.move(self._split.kept(index, self._start))
        self._whole.move(index)


class SplitRetrievalView(SplitView):
    """The retrieval view of slots that several ranks keep.

    Each rank selects its share of the budget among its own chunks, which are every C-th of the text, and
    shows its share of the recent tokens: nothing is gathered but results of attention. All ranks see their
    first chunk, and layers with a window all of it.

    Args:
        store: this rank's, whose page is the chunk.
        queries, depths: as for :class:`TreeAttentionView`.
        config: the configuration of all ranks together.
        max_growth: most tokens by which the context grows between two refreshes.

    Attributes:
        config: this rank's share.
        refreshing: see :class:`RetrievalView`.
    """

    _part: _PartRetrievalView

    def __init__(
        self,
        store: SplitStore,
        queries: int,
        config: RetrievalConfig,
        max_growth: int,
        depths: Sequence[int] | None = None,
    ) -> None:
        self.config, self.refreshing = share_of(config, store.split.group.size), False
        part = _PartRetrievalView(store.part, queries, self.config, max_growth, depths)
        self._take(store, part, queries, None, depths)

    def begin(self, start: Tensor, mask_words: Tensor | None = None) -> None:
        self._part.refreshing = self.refreshing
        super().begin(start, mask_words)

    def refresh(self, root: Tensor, committed: Tensor) -> None:
        """See :class:`RetrievalView`."""
        self._part.refresh(self._split.counts(root), self._split.counts(committed))

    def resized(self, queries: int, depths: Sequence[int]) -> Self:
        """Returns this view for another number of new tokens, see :class:`PagedRetrievalView`."""
        other = copy.copy(self)
        other._take(self._slots, self._part.resized(queries, depths), queries, None, depths)
        return other

    def update_chunk_means(self, first: Tensor, count: int) -> None:
        """Recomputes the mean keys of this rank's chunks among ``count`` of all from ``first[b]`` on."""
        chunk = self.config.chunk
        self._part.update_chunk_means(self._split.counts(first * chunk) // chunk, count)


class SplitPromptCache(PromptCache):
    """Is the cache that a prefill writes into for one sequence of a :class:`SplitStore`.

    A chunk's queries see the positions before it on the ranks that keep them, without a mask, and the chunk
    itself on the rank of the tail; the results are merged as those of decoding.

    Args:
        slots: this rank's KV slots.
        sequence, states, length: as for :class:`PromptCache`.
    """

    def __init__(
        self,
        slots: SplitStore,
        sequence: int,
        states: RecurrentStates | None,
        length: int,
    ) -> None:
        super().__init__(slots.whole, sequence, states, length)
        self._slots = slots

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        count = k.shape[2]
        if not self._slots.splits(layer):
            return super().attend(layer, q, k, v, params)
        split, own = self._slots.split, slice(self.sequence, self.sequence + 1)
        before, after = split.count(self.length), split.count(self.length + count)
        mine = split.keeps(torch.arange(self.length, self.length + count, device=k.device))
        keys, values = (cached[own] for cached in self._slots.part.layers[layer].kv)
        keys[:, :, before:after] = k[:, :, mine]
        values[:, :, before:after] = v[:, :, mine]
        seen: list[tuple[Tensor, Tensor]] = []
        how: dict[str, Any] = {"scale": params.scale, "softcap": params.softcap}
        if before:
            prefix = keys[:, :, :before], values[:, :, :before]
            seen.append(attention_states(q, *prefix, causal=False, **how))
        if split.has_tail:
            seen.append(attention_states(q, k, v, causal=True, sinks=params.sinks, **how))
        if not seen:
            nothing = q.new_zeros(*q.shape[:3], v.shape[3])
            seen.append((nothing, q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)))
        out, lse = seen[0]
        if len(seen) > 1:
            outs, lses = (torch.stack(some) for some in zip(*seen, strict=True))
            out, lse = merge_states(outs, lses)
        return merged_over_ranks(out, lse, split.group).transpose(1, 2)

"""Prompts into slots that several ranks keep: all queries of a chunk go to each rank's own positions."""

from typing import Any

import torch
from torch import Tensor

from triforce_tree.kernels.attention.plan import AttentionParams
from triforce_tree.kernels.attention.prefill import attention_states
from triforce_tree.kernels.attention.reference import merge_states
from triforce_tree.kernels.ranks import merged_over_ranks
from triforce_tree.kv.parallel.store import SplitStore
from triforce_tree.kv.prefill import PromptCache
from triforce_tree.kv.recurrent_states import RecurrentStates


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
        states: RecurrentStates | None = None,
        length: int = 0,
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

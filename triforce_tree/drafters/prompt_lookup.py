"""Prompt lookup as a drafter: it proposes what followed an earlier occurrence of the newest tokens."""

from collections.abc import Sequence

import torch

from triforce_tree.drafters.base import TokenTree
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.shapes import Shape, chain_shape
from triforce_tree.verify.probs import Sampler


class PromptLookup:
    """A drafter without a model (as in transformers' ``prompt_lookup_num_tokens``).

    The search runs on the device, over all committed tokens. It takes the last occurrence of the sequence's
    suffix of ``ngram`` tokens, or of the longest shorter suffix that occurs.

    Args:
        length: most tokens to propose.
        ngram: longest suffix to look for.
    """

    name = "lookup"
    deterministic = True
    capturable = True
    features: tuple[int, ...] = ()

    def __init__(self, length: int = 8, ngram: int = 3) -> None:
        self.tree: str | Shape = chain_shape(length)
        self.length, self.ngram = length, ngram

    def bind(self, state: SequenceState) -> None:
        self._positions = torch.arange(state.capacity, device=state.device)
        self._offsets = torch.arange(self.length, device=state.device)

    def start(self, sequences: Sequence[Sequence[int]]) -> None: ...

    def prepare(self, sequences: Sequence[Sequence[int] | None], resumed: bool) -> None: ...

    def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        tokens, end, last = state.tokens, state.end[:, None], state.length[:, None]
        tree.tokens[:, 0] = state.newest
        # match[b, i]: the n tokens before position i equal the suffix of n tokens.
        # found: the last such position for the longest suffix, where its continuation begins; -1 for none.
        found = torch.full_like(end, -1)
        match = self._positions <= last
        for n in range(1, self.ngram + 1):
            token = tokens.gather(1, (end - n + 1).clamp_min(0))
            match = match & (tokens == token).roll(n, 1) & (self._positions >= n) & (end >= n - 1)
            latest = torch.where(match, self._positions, -1).amax(1, keepdim=True)
            found = torch.where(latest >= 0, latest, found)
        positions = found + self._offsets
        proposed = tokens.gather(1, positions.clamp(0, tokens.shape[1] - 1))
        tree.tokens[:, 1:] = torch.where((found >= 0) & (positions <= last), proposed, -1)

"""Prompt lookup as a drafter: propose what followed the newest tokens where they stood in the text before."""

from collections.abc import Sequence

import torch

from triforce_tree.drafters.base import TokenTree
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.shapes import Shape, chain_shape
from triforce_tree.verify.probs import Sampler


class PromptLookup:
    """A drafter without a model (as in transformers' ``prompt_lookup_num_tokens``).

    The search runs on the device, over all committed tokens: a suffix of ``ngram`` tokens of the text, or of
    fewer where there is no such place, and its last occurrence.

    Args:
        length: tokens to propose at most.
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
        self._places = torch.arange(state.capacity, device=state.device)
        self._ahead = torch.arange(self.length, device=state.device)

    def start(self, texts: Sequence[Sequence[int]]) -> None: ...

    def prepare(self, texts: Sequence[Sequence[int] | None], resumed: bool) -> None: ...

    def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        tokens, end, last = state.tokens, state.end[:, None], state.length[:, None]
        tree.tokens[:, 0] = state.newest
        # found: where the continuation of the longest suffix begins; places[i] continues tokens[i - 1].
        found = torch.full_like(end, -1)
        match = self._places <= last
        for n in range(1, self.ngram + 1):
            token = tokens.gather(1, (end - n + 1).clamp_min(0))
            match = match & (tokens == token).roll(n, 1) & (self._places >= n) & (end >= n - 1)
            place = torch.where(match, self._places, -1).amax(1, keepdim=True)
            found = torch.where(place >= 0, place, found)
        at = found + self._ahead
        proposed = tokens.gather(1, at.clamp(0, tokens.shape[1] - 1))
        tree.tokens[:, 1:] = torch.where((found >= 0) & (at <= last), proposed, -1)

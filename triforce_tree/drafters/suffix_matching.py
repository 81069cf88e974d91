"""A drafter by suffix matching: it proposes the tokens after an earlier occurrence of the newest ones.

Prompt lookup (Saxena 2023) searches for n-grams of one to three tokens. Like SuffixDecoding (Oliaro et al.,
arXiv 2411.04975) and SAM Decoding (Hu et al., arXiv 2411.10666), this drafter proposes more tokens after a
longer match. Those papers use a suffix tree or automaton; here n-grams of two lengths have an index.
"""

from collections.abc import Sequence

import torch

from triforce_tree.drafters.base import TokenTree
from triforce_tree.drafters.matching import MatchingDrafter
from triforce_tree.policy.matched_tokens import Match
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.device_shapes import PassLimits
from triforce_tree.trees.shapes import Lookup
from triforce_tree.verify.probs import Sampler

LENGTH = 15
"""The most tokens to propose in a round of three levels, and where nothing is chosen."""


class SuffixMatching(MatchingDrafter):
    """A drafter without a model. The time of a proposal hardly depends on the sequence's length.

    With three levels the later rounds of a pass follow a provisional chain, which is on the device. The host
    reads it before each of these rounds. Only occurrences in committed tokens are found.

    Args:
        lengths: most tokens to propose; each length is a shape of its own.
    """

    name = "lookup"
    deterministic = True

    def __init__(self, *lengths: int) -> None:
        super().__init__(*(lengths or (LENGTH,)))
        self.tree = f"chain:{self.lengths[0]}"
        self.shapes = tuple(map(Lookup, self.lengths))

    def buffer_bytes(self, batch: int, capacity: int, limits: PassLimits) -> dict[str, int]:
        return {"drafter's buffers": 8 * batch * max(self.lengths)}

    def bind(self, state: SequenceState) -> None:
        super().bind(state)
        self._new = torch.arange(1, state.max_draft_tokens + 1, device=state.device)
        self.capturable = not len(self._new)

    def start(self, sequences: Sequence[Sequence[int]]) -> None:
        super().start(sequences)
        if not self._state.made_up:
            self.take_likely(sequences)

    def prepare(self, sequences: Sequence[Sequence[int] | None], resumed: bool) -> None:
        self.take_likely(sequences)

    def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        # Captured and timed stages of made-up sequences verify a chain of full length.
        if len(self._new) and not (self._taken or state.made_up):
            self._take_after_chains(state)
        self._taken = False
        self._write(state, tree)

    def _take_after_chains(self, state: SequenceState) -> None:
        """Takes the tokens after a match of each sequence that has a provisional chain."""
        at = (state.length[:, None] + self._new).clamp_max(state.capacity - 1)
        chains = torch.cat([state.chain[:, None], state.tokens.gather(1, at)], 1).tolist()
        following = list(self._following)
        for b, (index, (count, *tokens)) in enumerate(zip(self._indices, chains, strict=True)):
            if count:
                with index.followed_by(tokens[:count]):
                    match = Match(*index.match(), index.matches)
                    following[b] = index.continuation(match.end, self._likely(match))
        self._follow(following)

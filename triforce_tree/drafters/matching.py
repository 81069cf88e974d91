"""Proposes chains of suffix-matched tokens.

Suffix-matched tokens are those that followed an earlier occurrence of the newest tokens of the sequence. They
are a function of the preceding tokens, and so honest without a distribution. Occurrences are found on the
host before the pass is chosen, so that their lengths can be taken into account (``policy/pass_policy.py``).
"""

from collections.abc import Sequence

import numpy as np
import torch

from triforce_tree.drafters.base import Drafter, TokenTree
from triforce_tree.drafters.suffix_index import SuffixIndex
from triforce_tree.policy.matched_tokens import FORCED, Match, MatchedTokens
from triforce_tree.runtime.devices import overwrite
from triforce_tree.runtime.sequence_state import SequenceState


class MatchingDrafter(Drafter):
    """A drafter whose passes of two levels may verify matched tokens: a chain in one of its shapes.

    Args:
        lengths: most matched tokens of a pass; each length is a shape of its own.
    """

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths
        # The indices of an earlier drafter, for the sequences that begin next.
        self._earlier: list[SuffixIndex] = []

    def take_over(self, earlier: Drafter) -> None:
        if isinstance(earlier, MatchingDrafter):
            self._earlier = earlier._indices

    def bind(self, state: SequenceState) -> None:
        self._state = state
        self._proposed = torch.full((state.batch, max(self.lengths)), -1, device=state.device)
        self._indices = [SuffixIndex(()) for _ in range(state.batch)]
        self._forced: list[Sequence[int]] = [()] * state.batch
        # The chains in ``_proposed``, and whether they follow committed tokens that no proposal followed yet.
        self._following: Sequence[Sequence[int]] = [()] * state.batch
        self._taken = False

    def start(self, sequences: Sequence[Sequence[int]]) -> None:
        if self._state.made_up:
            # What made-up sequences hold does not matter.
            sequences = [()] * len(sequences)
        known = {id(index): index for index in (*self._indices, *self._earlier)}
        for b, sequence in enumerate(sequences):
            found = next((index for index in known.values() if index.grows_to(sequence)), None)
            self._indices[b] = SuffixIndex(sequence) if found is None else known.pop(id(found))
            self._indices[b].begin()
        self._earlier = []
        self._forced = [()] * len(sequences)
        # Captured and timed stages verify a chain of full length.
        self._proposed.zero_()

    def start_one(self, b: int, sequences: Sequence[Sequence[int]]) -> None:
        if not self._indices[b].grows_to(sequences[b]):
            self._indices[b] = SuffixIndex(sequences[b])
        self._indices[b].begin()
        self._forced[b] = ()

    def force(self, tokens: Sequence[Sequence[int]]) -> None:
        self._forced = list(tokens)

    def match(self, sequences: Sequence[Sequence[int] | None]) -> list[Match | None]:
        """Returns an earlier occurrence of the last tokens of each sequence; None if that has ended.

        If a grammar forces other tokens than those after the occurrence, the forced ones take their place.
        """
        matches: list[Match | None] = []
        for index, forced, sequence in zip(self._indices, self._forced, sequences, strict=True):
            if sequence is None:
                matches.append(None)
                continue
            index.extend(sequence)
            end, common = index.match()
            match = Match(end, common, index.matches)
            if forced and (not common or index.continuation(end, len(forced)) != list(forced)):
                match = Match(end, FORCED, index.matches, forced)
            index.expected = match
            matches.append(match)
        return matches

    def take(self, matches: Sequence[Match | None], counts: Sequence[int]) -> None:
        """Sets the tokens after each match as the chain that the next ``propose`` writes.

        Args:
            counts: the number of tokens to propose for each sequence, at most the length of the pass's shape.
        """
        self._follow([
            [] if match is None else list(match.forced[:count]) or index.continuation(match.end, count)
            for index, match, count in zip(self._indices, matches, counts, strict=True)
        ])  # fmt: skip
        self._taken = True

    def take_likely(self, sequences: Sequence[Sequence[int] | None]) -> None:
        """Takes the tokens after a match of each sequence that are likely enough by what this sequence alone
        has shown, where nothing else decides on their number.
        """
        matches = self.match(sequences)
        for match in matches:
            if match is not None:
                match.text.learn()
        self.take(matches, [self._likely(match) for match in matches])

    def _likely(self, match: Match | None) -> int:
        """Returns how many tokens after a match are likely enough by what its text alone has shown."""
        return len(MatchedTokens().after(match, self.lengths[0])) - 1

    def _follow(self, chains: Sequence[Sequence[int]]) -> None:
        """Sets the chain of each sequence that the next ``propose`` writes."""
        self._following = chains
        padded = np.full(self._proposed.shape, -1)
        for row, chain in zip(padded, chains, strict=True):
            row[: len(chain)] = chain
        overwrite(self._proposed, torch.from_numpy(padded))

    def _write(self, state: SequenceState, tree: TokenTree) -> None:
        """Writes the chains that were taken."""
        tree.tokens[:, 0] = state.newest
        tree.tokens[:, 1:] = self._proposed[:, : tree.nodes - 1]
        tree.probs_rows.fill_(-1)

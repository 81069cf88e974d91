"""Adds chains of suffix-matched tokens to a drafter; a pass proposes either a tree or such a chain.

Matched tokens are those that followed an earlier occurrence of the newest tokens of the sequence.
(``merged.py`` verifies a tree and a chain in the same pass instead.) Matches are found on the host
(``suffix_index.py``) before the pass is chosen, so that their lengths can be taken into account
(``policy/pass_policy.py``). Matched tokens are a function of the preceding tokens, so they are
honest without a distribution.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from triforce_tree.drafters.base import CountsBytes, Drafter, TokenTree, shapes_of, start_one
from triforce_tree.drafters.suffix_index import SuffixIndex
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.device_shapes import PassLimits
from triforce_tree.trees.shapes import Lookup, Shape
from triforce_tree.verify.probs import Sampler


class Match(NamedTuple):
    """An earlier occurrence of the last tokens of a sequence.

    Attributes:
        end: the position after the occurrence.
        common: the number of tokens before ``end`` that equal the end of the sequence; 0 without an
            occurrence.
    """

    end: int
    common: int


class WithLookup:
    """Proposes the trees of ``drafter`` or chains of matched tokens, which are the last of its ``shapes``.

    Args:
        drafter: grows the trees. After passes with a chain it is called with ``prepare(resumed=True)``.
        lengths: most matched tokens of a pass; each length is a shape of its own.
    """

    deterministic = False

    def __init__(self, drafter: Drafter, *lengths: int) -> None:
        self.drafter, self.lengths = drafter, lengths
        self.name, self.features, self.capturable = drafter.name, drafter.features, drafter.capturable
        grown = shapes_of(drafter)
        self.shapes: tuple[str | Shape, ...] = (*grown, *map(Lookup, lengths))
        self.tree: str | Shape = grown[0]
        self._lookup = len(grown)

    @property
    def weight_bytes(self) -> int:
        return self.drafter.weight_bytes if isinstance(self.drafter, CountsBytes) else 0

    def buffer_bytes(self, batch: int, capacity: int, limits: PassLimits) -> dict[str, int]:
        if not isinstance(self.drafter, CountsBytes):
            return {}
        return self.drafter.buffer_bytes(batch, capacity, limits)

    def bind(self, state: SequenceState) -> None:
        self.drafter.bind(state)
        self._proposed = torch.full((state.batch, max(self.lengths)), -1, device=state.device)
        self._indices = [SuffixIndex(()) for _ in range(state.batch)]

    def start(self, sequences: Sequence[Sequence[int]]) -> None:
        self.drafter.start(sequences)
        for b, sequence in enumerate(sequences):
            self._index(b, sequence)
        # Captured and timed stages verify a chain of full length.
        self._proposed.zero_()

    def start_one(self, b: int, sequences: Sequence[Sequence[int]]) -> None:
        start_one(self.drafter, b, sequences)
        self._index(b, sequences[b])

    def _index(self, b: int, sequence: Sequence[int]) -> None:
        """Indexes a text, unless it continues the indexed one: ``match`` then adds the new tokens."""
        if not self._indices[b].begins(sequence):
            self._indices[b] = SuffixIndex(sequence)

    def prepare(self, sequences: Sequence[Sequence[int] | None], resumed: bool) -> None:
        self.drafter.prepare(sequences, resumed)

    def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        if tree.shape < self._lookup:
            self.drafter.propose(state, tree, sampler)
            return
        tree.tokens[:, 0] = state.newest
        tree.tokens[:, 1:] = self._proposed[:, : tree.nodes - 1]
        tree.probs_rows.fill_(-1)

    def match(self, sequences: Sequence[Sequence[int] | None]) -> list[Match | None]:
        """Returns an earlier occurrence of the last tokens of each sequence; None if that has ended."""
        matches: list[Match | None] = []
        for index, sequence in zip(self._indices, sequences, strict=True):
            if sequence is None:
                matches.append(None)
                continue
            index.extend(sequence)
            matches.append(Match(*index.match()))
        return matches

    def take(self, matches: Sequence[Match | None], counts: Sequence[int]) -> None:
        """Sets the tokens after each match as the chain that the next ``propose`` writes.

        Args:
            counts: the number of tokens to propose for each sequence, at most the length of the pass's shape.
        """
        chains = [[-1] * max(self.lengths) for _ in matches]
        for chain, index, match, count in zip(chains, self._indices, matches, counts, strict=True):
            if match is not None and count:
                chain[:count] = index.continuation(match.end, count)
        self._proposed.copy_(torch.tensor(chains))

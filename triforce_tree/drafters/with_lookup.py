"""A drafter's trees, and in their place, where the text repeats itself, what followed its end before.

``merged.py`` proposes matched tokens beside each tree; here a pass proposes one or the other. Matches are
found on the host (``suffix_index.py``) before the pass is chosen, so that the choice knows how long they are
(``policy/pass_policy.py``). They are a function of the tokens before them: honest without a
distribution.
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
    """An earlier occurrence of a sequence's end.

    Attributes:
        end: the position after it.
        common: tokens that both have in common; 0 without an occurrence.
    """

    end: int
    common: int


class WithLookup:
    """Grows ``drafter``'s trees, and as its last shapes chains of matched tokens.

    Args:
        drafter: of the trees; it catches up in ``prepare(resumed=True)`` with tokens of other passes.
        lengths: most matched tokens of a pass, for each of these shapes.
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
        # Where stages are captured or timed, they verify a whole chain.
        self._proposed.zero_()

    def start_one(self, b: int, sequences: Sequence[Sequence[int]]) -> None:
        start_one(self.drafter, b, sequences)
        self._index(b, sequences[b])

    def _index(self, b: int, sequence: Sequence[int]) -> None:
        """Index a text; the next turn of a session only extends what is known."""
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
        """Where each sequence's end occurs earlier in it; None for one that has ended."""
        found: list[Match | None] = []
        for index, sequence in zip(self._indices, sequences, strict=True):
            if sequence is None:
                found.append(None)
                continue
            index.extend(sequence)
            found.append(Match(*index.match()))
        return found

    def take(self, matches: Sequence[Match | None], counts: Sequence[int]) -> None:
        """Propose, as the next chain of each sequence, so many tokens after its match.

        Args:
            counts: at most as many as the pass's shape has.
        """
        rows = [[-1] * max(self.lengths) for _ in matches]
        for row, index, match, count in zip(rows, self._indices, matches, counts, strict=True):
            if match is not None and count:
                row[:count] = index.continuation(match.end, count)
        self._proposed.copy_(torch.tensor(rows))

"""Adds chains of suffix-matched tokens to a drafter; a pass proposes either a tree or such a chain."""

from collections.abc import Sequence

from triforce_tree.drafters.base import Drafter, TokenTree, shapes_of
from triforce_tree.drafters.matching import MatchingDrafter
from triforce_tree.kv.store import KVStore
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.device_shapes import PassLimits
from triforce_tree.trees.shapes import Lookup
from triforce_tree.verify.probs import Sampler


class WithLookup(MatchingDrafter):
    """Proposes the trees of ``drafter`` or chains of matched tokens, which are the last of its ``shapes``.

    Args:
        drafter: grows the trees. After passes with a chain it is called with ``prepare(resumed=True)``.
        lengths: see :class:`MatchingDrafter`.
    """

    def __init__(self, drafter: Drafter, *lengths: int) -> None:
        super().__init__(*lengths)
        self.drafter, grown = drafter, shapes_of(drafter)
        self.shapes = (*grown, *map(Lookup, lengths))
        self.tree = grown[0]
        self._lookup = len(grown)
        self.name, self.deterministic = drafter.name, drafter.deterministic
        self.capturable, self.weight_bytes = drafter.capturable, drafter.weight_bytes
        self.features, self.feature_window = drafter.features, drafter.feature_window
        self.reads_slots = drafter.reads_slots

    def buffer_bytes(self, batch: int, capacity: int, limits: PassLimits) -> dict[str, int]:
        return self.drafter.buffer_bytes(batch, capacity, limits)

    def read(self, store: KVStore) -> None:
        self.drafter.read(store)

    def take_over(self, earlier: Drafter) -> None:
        super().take_over(earlier)
        self.drafter.take_over(earlier.drafter if isinstance(earlier, WithLookup) else earlier)

    def bind(self, state: SequenceState) -> None:
        self.drafter.bind(state)
        super().bind(state)

    def start(self, sequences: Sequence[Sequence[int]]) -> None:
        self.drafter.start(sequences)
        super().start(sequences)

    def start_one(self, b: int, sequences: Sequence[Sequence[int]]) -> None:
        self.drafter.start_one(b, sequences)
        super().start_one(b, sequences)

    def prepare(self, sequences: Sequence[Sequence[int] | None], resumed: bool) -> None:
        self.drafter.prepare(sequences, resumed)

    def force(self, tokens: Sequence[Sequence[int]]) -> None:
        self.drafter.force(tokens)
        super().force(tokens)

    def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        if tree.shape < self._lookup:
            self.drafter.propose(state, tree, sampler)
        else:
            self._write(state, tree)

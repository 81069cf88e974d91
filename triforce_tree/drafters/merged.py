"""A drafter's trees with a chain of suffix-matched tokens beside them, verified in the same forward."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from triforce_tree.drafters.base import (
    CountsBytes,
    Drafter,
    TokenTree,
    grown_shapes,
    shapes_of,
    start_one,
)
from triforce_tree.drafters.suffix_matching import SuffixMatching
from triforce_tree.kernels.suffix import graft_chain
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.device_shapes import PassLimits
from triforce_tree.trees.shapes import Shape, with_chain
from triforce_tree.verify.probs import Sampler


class Merged:
    """Proposes what ``drafter`` does, and what followed an earlier occurrence of the newest tokens.

    The chain shares the nodes of the tree as long as these have its tokens, and leaves it where they do not
    (``kernels.suffix.graft_chain``). At the node where it does, its token is the last sibling: it is judged
    when all drawn ones were rejected, so that a path of the tree is accepted as often as without the chain.
    Whether the token is there depends on the draws of its siblings, but one that was drawn and rejected has
    no probability in what is left of the target's distribution: the chain's token is never accepted then
    either, and the output follows the target's distribution.

    Args:
        drafter: whose trees have no chain beside them.
        matcher: proposes the chain.
    """

    def __init__(self, drafter: Drafter, matcher: SuffixMatching) -> None:
        self.drafter, self.matcher = drafter, matcher
        self.name, self.features = drafter.name, drafter.features
        self.deterministic = drafter.deterministic
        self.capturable = drafter.capturable and matcher.capturable
        self.shapes: tuple[str | Shape, ...] = tuple(
            with_chain(shape, matcher.length) for shape in shapes_of(drafter)
        )
        self.tree: str | Shape = self.shapes[0]

    @property
    def weight_bytes(self) -> int:
        return self.drafter.weight_bytes if isinstance(self.drafter, CountsBytes) else 0

    def buffer_bytes(self, batch: int, capacity: int, limits: PassLimits) -> dict[str, int]:
        parts = [part for part in (self.drafter, self.matcher) if isinstance(part, CountsBytes)]
        found: Counter[str] = Counter()
        for part in parts:
            found.update(part.buffer_bytes(batch, capacity, limits))
        return dict(found)

    def bind(self, state: SequenceState) -> None:
        self.drafter.bind(state)
        self.matcher.bind(state)
        self._own = [
            TokenTree.of(shape, state.batch, 0, state.device, number)
            for number, shape in enumerate(grown_shapes(self.drafter))
        ]
        for own in self._own if not self.deterministic else ():
            own.probs_rows.copy_(torch.arange(own.nodes))

    def start(self, sequences: Sequence[Sequence[int]]) -> None:
        self.drafter.start(sequences)
        self.matcher.start(sequences)

    def start_one(self, b: int, sequences: Sequence[Sequence[int]]) -> None:
        start_one(self.drafter, b, sequences)
        self.matcher.start_one(b, sequences)

    def prepare(self, sequences: Sequence[Sequence[int] | None], resumed: bool) -> None:
        self.drafter.prepare(sequences, resumed)
        self.matcher.prepare(sequences, resumed)

    def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        own = replace(self._own[tree.shape], probs=tree.probs)
        self.drafter.propose(state, own, sampler)
        graft_chain(
            tree.tokens, tree.parents, tree.mask_words, tree.probs_rows,
            own.tokens, own.parents, own.mask_words, own.probs_rows, self.matcher.chain(state),
        )  # fmt: skip

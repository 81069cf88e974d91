"""Combines a drafter's tree with a chain of suffix-matched tokens; one forward verifies both."""

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
    """Proposes the tree of ``drafter``, and a chain of tokens that followed the newest ones earlier.

    The chain uses nodes of the tree as long as the tree contains its tokens, and branches off after that
    (``kernels.suffix.graft_chain``). Where it branches off, the chain's token is the last sibling: it is
    tested only after all drawn siblings were rejected, so paths of the tree are accepted as often as without
    the chain. The chain branches off at a node only if none of the drawn siblings equals its token, so the
    existence of this node depends on the draws. This does not bias the output: a sibling with the chain's
    token that was drawn and rejected has no probability left in the residual distribution, so a chain node
    with that token would be rejected as well.

    Args:
        drafter: proposes the trees.
        matcher: proposes the chains.
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
        total: Counter[str] = Counter()
        for part in parts:
            total.update(part.buffer_bytes(batch, capacity, limits))
        return dict(total)

    def bind(self, state: SequenceState) -> None:
        self.drafter.bind(state)
        self.matcher.bind(state)
        self._grown = [
            TokenTree.of(shape, state.batch, 0, state.device, number)
            for number, shape in enumerate(grown_shapes(self.drafter))
        ]
        for grown in self._grown if not self.deterministic else ():
            grown.probs_rows.copy_(torch.arange(grown.nodes))

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
        grown = replace(self._grown[tree.shape], probs=tree.probs)
        self.drafter.propose(state, grown, sampler)
        graft_chain(
            tree.tokens, tree.parents, tree.mask_words, tree.probs_rows,
            grown.tokens, grown.parents, grown.mask_words, grown.probs_rows, self.matcher.chain(state),
        )  # fmt: skip

"""Drafters of a user's own, by the contract of ``drafters.base.Drafter`` alone: no model is asked."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch

from triforce_tree.drafters.base import TokenTree
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.device_shapes import device_tree_shape
from triforce_tree.trees.shapes import Shape, parse_shape
from triforce_tree.verify.probs import Sampler


class OwnDrafter:
    """What the drafters here share.

    Args:
        tree: a static shape.
        vocabulary: tokens.
    """

    name = "own"
    deterministic = False
    capturable = False
    features: tuple[int, ...] = ()

    def __init__(self, tree: str, vocabulary: int) -> None:
        self.tree: str | Shape = tree
        self.vocabulary = vocabulary
        self.shape = device_tree_shape(parse_shape(tree))
        assert self.shape.places is not None
        starts = [0, *accumulate(self.shape.widths, initial=1)]
        self.frontiers = [slice(a, b) for a, b in pairwise(starts)]
        # Any logits of the next token, by the one before it.
        self.table = torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(5))

    def bind(self, state: SequenceState) -> None: ...

    def start(self, texts: Sequence[Sequence[int]]) -> None: ...

    def prepare(self, texts: Sequence[Sequence[int] | None], resumed: bool) -> None: ...

    def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        tree.tokens[:, 0] = state.newest
        for depth in range(len(self.shape.widths)):
            self.expand(depth, state, tree, sampler)

    def expand(self, depth: int, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        """Write the nodes at ``depth + 1``."""
        raise NotImplementedError

    def fixed(self, depth: int, tree: TokenTree) -> None:
        """Children that follow from the tokens above them; one of them may stand there twice."""
        above, below = self.frontiers[depth : depth + 2]
        tree.probs_rows[:, above] = -1
        for child, (slot, rank) in enumerate(self.shape.places[depth], below.start):
            parent = tree.tokens[:, above.start + slot]
            tree.tokens[:, child] = (2 * parent + rank // 2 + rank) % self.vocabulary

    def drawn(self, depth: int, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        """Children drawn by the table."""
        above, below = self.frontiers[depth : depth + 2]
        parents = tree.tokens[:, above]
        tree.probs_rows[:, above] = torch.arange(above.start, above.stop)
        paths = partial(tree.paths, state, state.end, above)
        draws, _ = sampler.children(
            self.table[parents.clamp_min(0)],
            tree.probs[:, above],
            self.shape.siblings(depth),
            above,
            paths,
        )
        for child, (slot, rank) in enumerate(self.shape.places[depth], below.start):
            tree.tokens[:, child] = torch.where(parents[:, slot] >= 0, draws[:, slot, rank], -1)


class FixedSiblings(OwnDrafter):
    """Several tokens behind one node, none of them drawn."""

    name = "fixed"
    deterministic = True

    def expand(self, depth: int, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        self.fixed(depth, tree)


class TableDraws(OwnDrafter):
    """Reports distributions of its own and draws from them."""

    name = "table"

    def expand(self, depth: int, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        self.drawn(depth, state, tree, sampler)


class FixedThenDrawn(OwnDrafter):
    """Deterministic children of the root, and drawn ones below them."""

    name = "mixed"

    def expand(self, depth: int, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        if depth == 0:
            self.fixed(depth, tree)
        else:
            self.drawn(depth, state, tree, sampler)

"""Custom drafters without a model, which use nothing but ``drafters.base.Drafter``."""

from itertools import accumulate, pairwise

import torch

from triforce_tree.drafters.base import Drafter, TokenTree
from triforce_tree.kernels.step.accept import FIXED
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.device_shapes import device_tree_shape
from triforce_tree.trees.shapes import parse_shape
from triforce_tree.verify.probs import Sampler


class OwnDrafter(Drafter):
    """The base of the drafters here: fills the tree depth by depth.

    Args:
        tree: a static shape.
        vocabulary: number of tokens.
    """

    name = "own"
    deterministic = False

    def __init__(self, tree: str, vocabulary: int) -> None:
        self.tree = tree
        self.vocabulary = vocabulary
        self.shape = device_tree_shape(parse_shape(tree))
        assert self.shape.places is not None
        starts = [0, *accumulate(self.shape.widths, initial=1)]
        self.frontiers = [slice(a, b) for a, b in pairwise(starts)]
        # Arbitrary logits of the next token, by the one before it.
        self.table = torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(5))

    def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        tree.tokens[:, 0] = state.newest
        for depth in range(len(self.shape.widths)):
            self.expand(depth, state, tree, sampler)

    def expand(self, depth: int, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        """Writes the nodes at ``depth + 1``."""
        raise NotImplementedError

    def write_fixed(self, depth: int, tree: TokenTree) -> None:
        """Writes children that are a function of their parent's token; two siblings may be equal."""
        frontier, below = self.frontiers[depth : depth + 2]
        tree.probs_rows[:, frontier] = -1
        for child, (slot, rank) in enumerate(self.shape.places[depth], below.start):
            parent = tree.tokens[:, frontier.start + slot]
            tree.tokens[:, child] = (2 * parent + rank // 2 + rank) % self.vocabulary

    def write_drawn(self, depth: int, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        """Writes children that are drawn by the table."""
        frontier, below = self.frontiers[depth : depth + 2]
        parents = tree.tokens[:, frontier]
        tree.probs_rows[:, frontier] = torch.arange(frontier.start, frontier.stop)
        paths = tree.paths(state, state.end, frontier)
        self.table = self.table.to(parents.device)
        draws, _ = sampler.children(
            self.table[parents.clamp_min(0)],
            tree.probs[:, frontier],
            self.shape.siblings(depth),
            frontier,
            paths,
        )
        for child, (slot, rank) in enumerate(self.shape.places[depth], below.start):
            tree.tokens[:, child] = torch.where(parents[:, slot] >= 0, draws[:, slot, rank], -1)


class FixedSiblings(OwnDrafter):
    """Deterministic children, several per node."""

    name = "fixed"
    deterministic = True

    def expand(self, depth: int, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        self.write_fixed(depth, tree)


class TableDraws(OwnDrafter):
    """Draws from its table and reports these distributions."""

    name = "table"

    def expand(self, depth: int, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        self.write_drawn(depth, state, tree, sampler)


class DrawnThenFixed(TableDraws):
    """Draws from its table, but the last child of the root is a function of the root."""

    def expand(self, depth: int, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        super().expand(depth, state, tree, sampler)
        last = self.shape.widths[0]
        if depth == 0:
            tree.tokens[:, last] = (2 * tree.tokens[:, 0] + 1) % self.vocabulary
        # Each depth sets the rows of all nodes above it.
        tree.probs_rows[:, last] = FIXED


class FixedThenDrawn(OwnDrafter):
    """Deterministic children of the root, and drawn nodes below them."""

    name = "mixed"

    def expand(self, depth: int, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        if depth == 0:
            self.write_fixed(depth, tree)
        else:
            self.write_drawn(depth, state, tree, sampler)

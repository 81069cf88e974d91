"""Grows token trees from logits, one depth after the other."""

from itertools import accumulate, pairwise

import torch
from torch import Tensor

from triforce_tree.drafters.base import TokenTree
from triforce_tree.kernels import step
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.device_shapes import device_tree_shape
from triforce_tree.trees.shapes import Shape, tree_shape
from triforce_tree.verify.probs import Sampler


class TreeGrowth:
    """Adds the nodes of a tree shape depth by depth.

    Args:
        tree: the shape.

    Attributes:
        depth: D, the depth of the deepest node; the root has depth 0.
        frontiers: for each depth d < D, the slice of node indices at depth d, which get children.
        ids: for each depth d < D, int64 ``[B, W]``: the tokens at depth d + 1, 0 for unused nodes.
    """

    def __init__(self, tree: str | Shape) -> None:
        self.shape = device_tree_shape(tree_shape(tree))
        self.depth = len(self.shape.widths)
        starts = [0, *accumulate(self.shape.widths, initial=1)]
        self.nodes = starts[-1]
        self.frontiers = [slice(a, b) for a, b in pairwise(starts[:-1])]

    def buffer_bytes(self, batch: int) -> int:
        """Returns the bytes that :meth:`bind` allocates."""
        tokens, pairs = sum(self.shape.widths), sum(map(len, self.shape.places or ()))
        return batch * (8 * tokens + 4 * self.nodes) + 16 * pairs

    def bind(self, batch: int, device: torch.device) -> None:
        shape = self.shape
        self.ids = [torch.zeros(batch, w, dtype=torch.int64, device=device) for w in shape.widths]
        self._path_probs = torch.ones(batch, self.nodes, dtype=torch.float32, device=device)
        self._pairs = [
            None if shape.places is None else torch.tensor(shape.places[d], device=device).T.contiguous()
            for d in range(self.depth)
        ]

    def begin(self, state: SequenceState, tree: TokenTree) -> None:
        """Writes the root."""
        tree.tokens[:, 0] = state.newest

    def place(self, d: int, logits: Tensor, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        """Draws children of the F nodes at depth ``d``, and writes those that the shape has.

        Args:
            logits: ``[B, F, V]``, logits of the token after each of these nodes.
        """
        nodes = self.frontiers[d]
        probs, paths = tree.probs[:, nodes], tree.paths(state, state.end, nodes)
        draws, by_rank = sampler.children(logits, probs, self.shape.siblings(d), nodes, paths)
        step.place_nodes(
            tree.tokens, tree.parents, tree.mask_words, self._path_probs, self.ids[d], None,
            draws, by_rank, probs, self._pairs[d], nodes.start, 0,
        )  # fmt: skip

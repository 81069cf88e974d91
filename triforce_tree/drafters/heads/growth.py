"""Grows token trees from logits, one depth after the other."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from triforce_tree.drafters.base import Drafter, TokenTree
from triforce_tree.drafters.default_trees import DEFAULT_TREES
from triforce_tree.kernels import step
from triforce_tree.models.hf_model import HFModel
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.device_shapes import PassLimits, device_tree_shape
from triforce_tree.trees.shapes import Shape, other_shapes, tree_shape
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
        self.depth, self.nodes = self.shape.depth, self.shape.nodes
        starts = [0, *accumulate(self.shape.widths, initial=1)]
        self.frontiers = [slice(a, b) for a, b in pairwise(starts[:-1])]

    def buffer_bytes(self, batch: int) -> int:
        """Returns the bytes that :meth:`bind` allocates."""
        tokens, pairs = sum(self.shape.widths), sum(map(len, self.shape.places or ()))
        return batch * (8 * tokens + 4 * self.nodes) + 16 * pairs

    def bind(self, batch: int, device: torch.device) -> None:
        shape = self.shape
        self.ids = [torch.zeros(batch, w, dtype=torch.int64, device=device) for w in shape.widths]
        self._path_chances = torch.ones(batch, self.nodes, dtype=torch.float32, device=device)
        self._pairs = [
            None if shape.places is None else torch.tensor(shape.places[d], device=device).T.contiguous()
            for d in range(self.depth)
        ]

    def place(
        self, d: int, logits: Tensor, state: SequenceState, tree: TokenTree, sampler: Sampler,
        mask: Tensor | None = None, before: int = 0,
    ) -> None:  # fmt: skip
        """Draws children of the F nodes at depth ``d``, and writes those that the shape has.

        Args:
            logits: ``[B, F, V]``, logits of the token after each of these nodes.
            mask, before: receives the attention mask of the children, see ``step.place_nodes``.
        """
        nodes = self.frontiers[d]
        probs, paths = tree.probs[:, nodes], tree.paths(state, state.end, nodes)
        draws, chances = sampler.children(logits, probs, self.shape.siblings(d), nodes, paths)
        step.place_nodes(
            tree.tokens, tree.parents, tree.mask_words, self._path_chances, self.ids[d], mask,
            draws, chances, self._pairs[d], nodes.start, before,
        )  # fmt: skip

    def place_all(self, logits: Tensor, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        """Draws all nodes, where all nodes of a depth have one distribution and draw from it independently.

        Args:
            logits: ``[B, D, V]``, logits of the token after each depth; further ones are not read.
        """
        for depth, nodes in enumerate(self.frontiers):
            shared = logits[:, depth : depth + 1].expand(-1, nodes.stop - nodes.start, -1)
            self.place(depth, shared, state, tree, sampler)


class GrowingDrafter(Drafter):
    """A trained drafter that grows trees from logits.

    Args:
        name: the drafter's name in statistics and in ``DEFAULT_TREES``.
        tree: a shape or its name.
        other_trees: at most two further shapes; decoding chooses one for each pass. Without ``tree`` and
            ``other_trees`` the shapes are those of ``DEFAULT_TREES``.
        deepest: the most depths that the drafter predicts; None for any number.
        source: what predicts them, for messages.

    Raises:
        ValueError: a tree is no shape or too deep, or there are too many.
    """

    deterministic = False

    def __init__(
        self,
        name: str,
        tree: str | Shape | None,
        other_trees: str | Sequence[str | Shape] | None,
        deepest: int | None = None,
        source: str = "",
    ) -> None:
        self.name, self._deepest, self._given = name, deepest, (tree, other_trees)
        self._choose(branching=True, largest_first=True)
        if deepest is not None and self._depth > deepest:
            raise ValueError(
                f"the tree has {self._depth} depths, and {source} predicts {deepest} tokens; use a tree of "
                f"at most {deepest}"
            )

    def _choose(self, branching: bool, largest_first: bool) -> None:
        tree, others = self._given
        if tree is None:
            default = DEFAULT_TREES[self.name].shapes(self._deepest, branching)
            tree, *further = default if largest_first else default[::-1]
            others = further if others is None else others
        shapes = (tree, *other_shapes(others or ()))
        if shapes == self.shapes:
            # The shapes do not change, so the buffers of an attached drafter stay.
            return
        self.tree, self.shapes = tree, shapes
        self._growths = [TreeGrowth(shape) for shape in self.shapes]
        self._depth = max(growth.depth for growth in self._growths)
        self._nodes = max(growth.nodes for growth in self._growths)

    def attach(self, target: HFModel) -> None:
        """Chooses the default shapes for the target. The first one, whose stages are made and timed at once,
        is the largest on a GPU and the smallest on a CPU.
        """
        self._choose(target.states is None, target.device.type == "cuda")

    def buffer_bytes(self, batch: int, capacity: int, limits: PassLimits) -> dict[str, int]:
        return {"drafter's buffers": sum(growth.buffer_bytes(batch) for growth in self._growths)}

    def bind(self, state: SequenceState) -> None:
        self._state = state
        for growth in self._growths:
            growth.bind(state.batch, state.device)

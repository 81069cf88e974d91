"""Compares the distributions that a drafter reports at nodes of its trees with a reference."""

from collections.abc import Callable

import torch
from torch import Tensor

from triforce_tree.drafters.base import Drafter, TokenTree
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.verify.probs import Sampler


def compare_nodes(drafter: Drafter, logits: Callable[[Tensor, list[int]], Tensor]) -> list[TokenTree]:
    """Makes a drafter compare the distributions at its trees' root, last node, and one more with a reference.

    Args:
        logits: returns the reference's logits ``[V]`` after a sequence and the tokens of a path in the tree.

    Returns:
        the trees that were compared, to which each proposal adds one.
    """
    trees, propose = list[TokenTree](), drafter.propose

    def checked(state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        propose(state, tree, sampler)
        trees.append(tree)
        count = tree.probs.shape[1]
        for b in range(state.batch):
            tokens = state.sequence(b)
            for node in {0, len(trees) % count, count - 1}:
                path: list[int] = []
                ancestor = node
                while ancestor > 0:
                    path.insert(0, int(tree.tokens[b, ancestor]))
                    ancestor = int(tree.parents[b, ancestor])
                expected = logits(tokens, path).softmax(-1)
                torch.testing.assert_close(tree.probs[b, node], expected, rtol=2e-3, atol=1e-4)

    drafter.propose = checked  # type: ignore[method-assign]
    return trees

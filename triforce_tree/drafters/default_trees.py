"""The shapes of trees that trained drafters propose if the user names none.

Each kind of drafter has a tree, a small tree and a chain. Every pass takes the one that is expected to be the
fastest by measured times and acceptance (``policy/pass_policy.py``). The tree is for a GPU, where verifying
64 tokens costs little more than verifying 16. The small tree and the chain are for a CPU and for mixtures of
experts, where each verified token has its price, and for texts of which few tokens are accepted.
"""

from typing import NamedTuple


class DefaultTrees(NamedTuple):
    """The shapes of one kind of drafter.

    Attributes:
        tree, small: the most nodes at each depth of the tree and of the small tree, whose topology follows
            the drafter's probabilities.
        chain: the length of the chain.
        chains: the lengths of the chains for targets with recurrent layers, on which trees that branch were
            not timed.
    """

    tree: tuple[int, ...]
    small: tuple[int, ...]
    chain: int
    chains: tuple[int, ...]

    def shapes(self, deepest: int | None, branching: bool) -> tuple[str, ...]:
        """Returns the names of the shapes, the largest first, cut to ``deepest`` depths.

        Args:
            deepest: the most depths that the drafter predicts; None for any number.
            branching: whether trees may branch.
        """
        widths = [self.tree, self.small] if branching else []
        lengths = [self.chain] if branching else [*self.chains]
        found = ["best-first:" + ",".join(map(str, each[:deepest])) for each in widths]
        found += [f"chain:{min(length, deepest or length)}" for length in lengths]
        return tuple(dict.fromkeys(found))


# The drafter runs once for each depth.
_BY_DEPTH = DefaultTrees(tree=(6, 6, 5, 4, 3), small=(2, 2, 1), chain=3, chains=(3, 2))
DEFAULT_TREES = {
    "eagle3": _BY_DEPTH,
    "mtp": _BY_DEPTH,
    # One run predicts all depths. Heads are trained for eight of them unless they name another number.
    "p-eagle": DefaultTrees(
        tree=(8, 8, 8, 7, 6, 5, 4, 3), small=(2, 2, 2, 2, 1, 1), chain=4, chains=(7, 4)
    ),
    # Each run reads keys and values of the whole text, so there are fewer of them.
    "gemma4": _BY_DEPTH._replace(tree=(4, 4, 4, 3)),
    # There are as many nodes at each depth as in the tree of 63 nodes that Medusa's authors chose for
    # Vicuna-7B (mc_sim_7b_63).
    "medusa": _BY_DEPTH._replace(tree=(10, 28, 23, 2)),
    # One run predicts all depths, so that deep trees cost no drafting. The tree has 62 nodes, so that its
    # masks fit into words of 64 bits.
    "block": DefaultTrees(
        tree=(8, 8, 8, 7, 6, 5, 4, 3, 3, 2, 2, 2, 2, 1, 1), small=(2, 2, 2, 2, 1, 1, 1, 1), chain=4,
        chains=(15, 7, 4),
    ),
}  # fmt: skip
"""The default shapes by the name of the drafter."""

"""Accepting a token tree: pure functions of the target's laws and the drafter's.

Both rules walk down from the root, and at every node emit one token that follows exactly the target's
law there: either a child is accepted and the walk goes on, or the emitted token is the last one.
Proof: ``docs/losslessness.md``.
"""

from dataclasses import dataclass

from torch import Tensor

from triforce_tree import sampling
from triforce_tree.sampling import Random
from triforce_tree.token_tree import TokenTree


@dataclass(frozen=True)
class Accepted:
    """``path``: accepted nodes from the root (included) on; ``next_token``: the one emitted after them.

    ``next_token`` is a residual sample where a child was refused, the bonus where there was none.
    """

    path: list[int]
    next_token: int


def accept_greedy(tree: TokenTree, best: list[int]) -> Accepted:
    """Follow the target's own choice as long as it was proposed.

    Args:
        tree: N nodes.
        best: the target's most probable token at each node.
    """
    path = [0]
    while True:
        token = best[path[-1]]
        match = [c for c in tree.children[path[-1]] if tree.tokens[c] == token]
        if not match:
            return Accepted(path, token)
        path.append(match[0])


def accept_sampling(tree: TokenTree, laws: Tensor, random: Random) -> Accepted:
    """Recursive rejection over siblings (SpecInfer; Sequoia, algorithm 2).

    At a node with target law p, the i-th child x, drawn from q_i (the node's draft law without the
    earlier siblings), is accepted with probability min(1, p_i(x) / q_i(x)); refused, it leaves
    p_{i+1} = norm(max(p_i - q_i, 0)). A deterministic child is the case q_i(x) = 1. With no child left,
    the emitted token is drawn from the last p_i.

    Args:
        tree: N nodes; every child was drawn from the law the tree reports.
        laws: fp32 ``[N, V]``, the target's law at each node.
        random: fresh draws.
    """
    path = [0]
    while True:
        node = path[-1]
        p = laws[node]
        q = tree.law(node) if tree.children[node] else None
        accepted = None
        for child in tree.children[node]:
            token = tree.tokens[child]
            chance = float(p[token] / q[token]) if q is not None else float(p[token])
            if random.accept(chance):
                accepted = child
                break
            if q is not None:
                p = sampling.residual(p, q)
                q = sampling.without(q, token)
            else:
                p = _refused(p, token)
        if accepted is None:
            return Accepted(path, random.choose(p))
        path.append(accepted)


def _refused(p: Tensor, token: int) -> Tensor:
    """The residual after a deterministic proposal was refused."""
    left = sampling.without(p, token)
    return p if left is None else left

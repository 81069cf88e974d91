"""Expected numbers of accepted tokens of given trees, without sampling the decisions.

Both functions take the arguments of ``kernels.step.traverse_tree`` up to ``q_rows``, and the largest depth.
They return fp32 ``[B]``: the mean, over the random decisions, of the accepted nodes below the root.
"""

import torch
from torch import Tensor

from triforce_tree.kernels.step.accept import refused
from triforce_tree.kernels.step.traversal import traverse_drawn


class _Rejections:
    """Draws that reject every node, and keep the probability that each is the last accepted one."""

    def __init__(self, batch: int, nodes: int) -> None:
        self.last, self._left = torch.zeros(batch, nodes), torch.ones(batch)

    def accept(self, chance: Tensor, *place: int) -> bool:
        b, node = place
        accepted = self._left[b] * float(chance.clamp(0, 1))
        self.last[b, node] = accepted
        self._left[b] -= accepted
        return False

    def choose(self, weights: Tensor, *place: int) -> Tensor:
        return torch.zeros((), dtype=torch.int64)

    def choose_distinct(self, probs: Tensor, count: int) -> Tensor:
        raise NotImplementedError("trees were drawn before they are verified")


def traversal(tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor, rows: Tensor, depth: int) -> Tensor:
    """Of traversal verification; of chains, block verification."""
    draws = _Rejections(*tokens.shape)
    traverse_drawn(draws, tokens, parents, p, q, rows, depth)
    levels = torch.zeros_like(tokens)
    for node in range(1, tokens.shape[1]):
        levels[:, node] = levels.gather(1, parents[:, node, None].clamp_min(0))[:, 0] + 1
    return (draws.last * levels).sum(1)


def node_by_node(tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor, rows: Tensor, depth: int) -> Tensor:
    """Of recursive rejection sampling from the root on; of chains, verification token by token."""
    trees = zip(tokens.tolist(), parents.tolist(), p, q, rows.tolist(), strict=True)
    return torch.tensor([_below(0, depth, *tree) for tree in trees])


def _below(
    node: int, depth: int, tokens: list[int], parents: list[int], p: Tensor, q: Tensor, rows: list[int]
) -> float:
    """Expected number of accepted nodes below ``node``, if it is accepted."""
    children = [n for n in range(1, len(tokens)) if parents[n] == node and tokens[n] >= 0]
    if not children or depth == 0:
        return 0.0
    fixed, target, reached, total = rows[node] < 0, p[node], 1.0, 0.0
    draft = torch.ones_like(target) if fixed else q[rows[node]]
    for child in children:
        x = tokens[child]
        if not draft[x] > 0:
            continue
        chance = float((target[x] / draft[x]).clamp(max=1))
        total += reached * chance * (1 + _below(child, depth - 1, tokens, parents, p, q, rows))
        reached *= 1 - chance
        target, draft = refused(target, draft, x, fixed)
    return total

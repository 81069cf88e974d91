"""Expected numbers of accepted tokens of given trees, without sampling the decisions.

Both functions take the arguments of ``kernels.step.traverse_tree`` up to ``q_rows``, and the largest depth.
They return fp32 ``[B]``. On average over honest trees these are the mean numbers of accepted nodes below the
root; each node counts by what is known before the nodes below it are drawn.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from triforce_tree.kernels.step.traversal import residual, without

Rejected = Callable[[float, Tensor, Tensor, int, bool], tuple[float, Tensor, Tensor]]
"""(weight, p, q) of a node after the rejection of a child, from these, its token and whether it was fixed."""


def traversal(tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor, rows: Tensor, depth: int) -> Tensor:
    """Of traversal verification: of a chain, the sum of its nodes' weights."""

    def rejected(
        weight: float, target: Tensor, draft: Tensor, token: int, fixed: bool
    ) -> tuple[float, Tensor, Tensor]:
        after, left = residual(torch.tensor(weight), target, draft, token, fixed)
        return float(after), left, without(draft, token)

    return _expected(tokens, parents, p, q, rows, depth, rejected, weighted=True)


def node_by_node(tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor, rows: Tensor, depth: int) -> Tensor:
    """Of recursive rejection sampling from the root on: of a chain, sums of products of min(1, p / q)."""

    def rejected(
        weight: float, target: Tensor, draft: Tensor, token: int, fixed: bool
    ) -> tuple[float, Tensor, Tensor]:
        return 1.0, *_refused(target, draft, token, fixed)

    return _expected(tokens, parents, p, q, rows, depth, rejected, weighted=False)


def _refused(target: Tensor, draft: Tensor, token: int, fixed: bool) -> tuple[Tensor, Tensor]:
    """norm(max(p - q, 0)), and q without the token, renormalised; a ``fixed`` child has q = 1."""
    out = torch.tensor(token, device=draft.device)
    left = target.index_fill(0, out, 0.0) if fixed else (target - draft).clamp_min(0)
    total = left.sum()
    others = draft.index_fill(0, out, 0.0) if fixed else without(draft, token)
    return left / total if total > 0 else target, others


def _expected(
    tokens: Tensor,
    parents: Tensor,
    p: Tensor,
    q: Tensor,
    rows: Tensor,
    depth: int,
    rejected: Rejected,
    weighted: bool,
) -> Tensor:
    """``weighted``: children are judged by their parent's weight, and reached where nothing to the left of
    them is accepted; else by p alone, and reached where their parent is accepted.
    """

    all_tokens, all_parents, all_rows = tokens.tolist(), parents.tolist(), rows.tolist()

    def below(b: int, node: int, weight: float, level: int) -> float:
        token, parent, row = all_tokens[b], all_parents[b], all_rows[b]
        children = [n for n in range(1, len(token)) if parent[n] == node and token[n] >= 0]
        if not children or level == depth:
            return 0.0
        fixed, target, reached, total = row[node] < 0, p[b, node], 1.0, 0.0
        draft = torch.ones_like(target) if fixed else q[b, row[node]]
        for child in children:
            x = token[child]
            proposed = 1.0 if fixed and draft[x] > 0 else float(draft[x])
            if not proposed > 0:
                continue
            chance = min(1.0, weight * float(target[x]) / proposed)
            inner = below(b, child, chance if weighted else 1.0, level + 1)
            total += reached * (chance + inner if weighted else chance * (1 + inner))
            reached *= 1 - chance
            weight, target, draft = rejected(weight, target, draft, x, fixed)
        return total

    return torch.tensor([below(b, 0, 1.0, 0) for b in range(len(tokens))])

"""Traversal verification of token trees, which decides on nodes from the leaves to the root."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from triforce_tree.kernels.operators import fake, operator
from triforce_tree.kernels.step.accept import FIXED, empty_results
from triforce_tree.kernels.step.draws import Draws, NoiseDraws


@operator("traverse_tree", triton=".traversal_kernels", cpu="..cpu.step.operators")
def traverse_tree(
    tokens: Tensor,
    parents: Tensor,
    p: Tensor,
    q: Tensor,
    q_rows: Tensor,
    uniforms: Tensor,
    exponential: Tensor,
    depth: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Verifies a tree by traversal (Weng et al., arXiv 2505.12398).

    On a chain this is block verification (Sun et al., arXiv 2403.10444).

    At a node u, p denotes the target's probs of the next token and q the draft probs. Every node x has a
    weight a(x), and the root has the weight 1. A child x of u that was drawn from q has the weight
    min(1, a(u) p(x) / q(x)). The algorithm decides on a node after all its descendants, and on siblings in
    their order. If no node in the subtree of x is accepted, then

        S = sum (a(u) p - q)+,    a(u) := S / (1 - a(u) + S),    p := (a(u) p - q)+ / S

    at u. Then x is removed from q, and the next child follows. After the last child, u is accepted with
    probability a(u), and then the next token is drawn from the current p at u. At the root a(u) stays 1.

    For a child x that was proposed deterministically, q is 1 at x. Drawn and deterministic children may be
    siblings. Of siblings with equal tokens only the first counts. Children with q(x) = 0 do not count. If S
    is 0, p does not change, and a(u) becomes 0 unless it is 1.

    Args:
        tokens: int64 ``[B, N]``, tokens of the nodes. Node 0 is the root, whose token is not read; -1 marks
            an absent node.
        parents: int64 ``[B, N]``, parent of each node, which precedes its children; -1 for the root. Siblings
            are in draw order.
        p: fp32 ``[B, N, V]``, the target's probs at each node.
        q: fp32 ``[B, M, V]``, draft probs; M may be 0 if all proposals are deterministic.
        q_rows: int64 ``[B, N]``, the row of ``q`` from which the children of a node were drawn; negative if
            they were proposed deterministically; read only for nodes with drawn children. ``FIXED`` says that
            the node itself was also proposed deterministically, whatever its siblings are.
        uniforms: fp32 ``[B, N]`` in [0, 1); node u is accepted if ``uniforms[u] < a(u)``, the root always.
        exponential: fp32 ``[B, V]``, Exp(1) noise; the emitted token is the argmax of the last p /
            exponential, the lowest id among equals. Token 0 is emitted for probs that are NaN.
        depth: length of the longest path below the root; deeper nodes are not read.

    Returns:
        path int64 ``[B, depth + 1]``, the accepted nodes from the root on, padded with -1; count int64
        ``[B]``, the number of accepted nodes including the root; next int64 ``[B]``, the token emitted after
        them.
    """
    return traverse_drawn(NoiseDraws(exponential, uniforms), tokens, parents, p, q, q_rows, depth)


def traverse_drawn(
    draws: Draws, tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor, q_rows: Tensor, depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes ``traverse_tree`` with any draws, at places (sequence, node) and (sequence,)."""
    paths, counts, emitted = [], [], []
    trees = zip(tokens.tolist(), parents.tolist(), q_rows.tolist(), strict=True)
    for b, (token, parent, row) in enumerate(trees):
        path, probs = _Tree(draws, b, token, parent, row, p[b], q[b], depth).accepted()
        paths.append(path + [-1] * (depth + 1 - len(path)))
        counts.append(len(path))
        emitted.append(max(0, int(draws.choose(probs, b))))
    return tokens.new_tensor(paths), tokens.new_tensor(counts), tokens.new_tensor(emitted)


class _Tree:
    """Verification of the tree of sequence ``b``; ``traverse_drawn`` describes the arguments."""

    def __init__(
        self,
        draws: Draws,
        b: int,
        tokens: Sequence[int],
        parents: Sequence[int],
        rows: Sequence[int],
        p: Tensor,
        q: Tensor,
        depth: int,
    ) -> None:
        self.draws, self.b, self.tokens, self.rows, self.p, self.q = draws, b, tokens, rows, p, q
        self.depth = depth
        self.children: list[list[int]] = [[] for _ in tokens]
        for node in range(1, len(tokens)):
            if tokens[node] >= 0 and parents[node] >= 0:
                self.children[parents[node]].append(node)

    def accepted(self) -> tuple[list[int], Tensor]:
        """Returns the accepted path, and the probs ``[V]`` of the token after it."""
        found = self._visit(0, torch.ones((), dtype=torch.float32, device=self.p.device), 0)
        assert found is not None, "the root is always accepted"
        return found

    def _visit(self, node: int, weight: Tensor, level: int) -> tuple[list[int], Tensor] | None:
        """Returns the accepted path from ``node`` on and the probs after it; None if no node is accepted."""
        target, row = self.p[node], self.rows[node]
        drawn = row >= 0 and any(self.rows[child] != FIXED for child in self.children[node])
        draft = self.q[row] if drawn else target
        rejected: set[int] = set()
        for child in self.children[node] if level < self.depth else ():
            x, fixed = self.tokens[child], row < 0 or self.rows[child] == FIXED
            proposed = torch.ones_like(weight) if fixed else draft[x]
            if x in rejected or not proposed > 0:
                continue
            found = self._visit(child, (weight * target[x] / proposed).clamp(max=1), level + 1)
            if found is not None:
                return [node, *found[0]], found[1]
            rejected.add(x)
            weight, target = residual(weight, target, draft, x, fixed)
            if not fixed:
                draft = without(draft, x)
        if node == 0 or self.draws.accept(weight, self.b, node):
            return [node], target
        return None


def residual(
    weight: Tensor, target: Tensor, draft: Tensor, token: int, deterministic: bool
) -> tuple[Tensor, Tensor]:
    """Returns a node's weight ``[]`` and target probs ``[V]`` after the rejection of a child with ``token``.

    The child was drawn from ``draft`` ``[V]``, which is not read if it was proposed deterministically.
    """
    mass = weight * target
    if deterministic:
        left = mass.index_fill(0, torch.tensor(token, device=mass.device), 0.0)
    else:
        left = (mass - draft).clamp_min(0)
    total = left.sum()
    if total > 0:
        return total / (1 - weight + total), left / total
    return (weight >= 1).to(weight.dtype), target


def without(draft: Tensor, token: int) -> Tensor:
    """Returns draft probs ``[V]`` without ``token``, renormalised; zeros if no probability is left."""
    others = draft.index_fill(0, torch.tensor(token, device=draft.device), 0.0)
    total = others.sum()
    return others / total if total > 0 else others


@fake("traverse_tree")
def _(tokens: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_results(tokens, rest[-1])

"""Traversal verification of token trees: acceptance from the leaves to the root."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from triforce_tree.kernels.operators import fake, operator
from triforce_tree.kernels.step.accept import FIXED, empty_results
from triforce_tree.kernels.step.draws import Draws, NoiseDraws


@operator("traverse_tree", triton=".traversal_kernels", cpu="..cpu.step.traversal")
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

    Every node x has a weight a(x), the probability that the accepted path reaches it; the root's is 1. Nodes
    are judged after all nodes below them, first siblings first. A child x of u, drawn from q, has the weight
    min(1, a(u) p(x) / q(x)). If nothing is accepted at or below x,

        S = sum (a(u) p - q)+,    a(u) := S / (1 - a(u) + S),    p := (a(u) p - q)+ / S

    at u, q loses x, and the next child follows. When u has no more children, u is accepted with probability
    a(u), and the next token is drawn from what has become of its p. At the root a(u) stays 1.

    A child x that was proposed deterministically is the case that q is 1 at x. Siblings may be of both kinds.
    Of siblings with equal tokens the first counts, and the others are absent, as are children whose
    probability q(x) is 0. A residual of sum 0 leaves p as it is, with the weight 1 if it was 1, else 0.

    Args:
        tokens: int64 ``[B, N]``; node 0 is the root, whose token is not read; -1 marks an absent node.
        parents: int64 ``[B, N]``; -1 for the root, and parents precede their children. Siblings are in draw
            order.
        p: fp32 ``[B, N, V]``, the target's probs at each node.
        q: fp32 ``[B, M, V]``, draft probs; M may be 0 where all proposals are deterministic.
        q_rows: int64 ``[B, N]``, the row of ``q`` that a node's children were drawn from, negative where they
            were proposed deterministically; read for nodes with drawn children only. ``FIXED``: the node
            itself was proposed deterministically too, whatever its siblings are.
        uniforms: fp32 ``[B, N]`` in [0, 1); node u is accepted where ``uniforms[u] < a(u)``, the root always.
        exponential: fp32 ``[B, V]`` of Exp(1) noise; the emitted token is the argmax of the last p /
            exponential, the lowest id among equals. Probs that are NaN emit token 0.
        depth: length of the longest path below the root; deeper nodes are not read.

    Returns:
        path int64 ``[B, depth + 1]``, the accepted nodes from the root on, padded with -1; count int64
        ``[B]``, their number, the root included; next int64 ``[B]``, the token emitted after them.
    """
    return traverse_drawn(NoiseDraws(exponential, uniforms), tokens, parents, p, q, q_rows, depth)


def traverse_drawn(
    draws: Draws, tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor, q_rows: Tensor, depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``traverse_tree`` with any source of random decisions, indexed by (sequence, node) and (sequence,)."""
    paths, counts, emitted = [], [], []
    trees = zip(tokens.tolist(), parents.tolist(), q_rows.tolist(), strict=True)
    for b, (token, parent, row) in enumerate(trees):
        path, probs = _Tree(draws, b, token, parent, row, p[b], q[b], depth).accepted()
        paths.append(path + [-1] * (depth + 1 - len(path)))
        counts.append(len(path))
        emitted.append(max(0, int(draws.choose(probs, b))))
    return tokens.new_tensor(paths), tokens.new_tensor(counts), tokens.new_tensor(emitted)


class _Tree:
    """Verifies one tree; the arguments are those of ``traverse_drawn`` for sequence ``b``."""

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
        """The accepted path, and the probs ``[V]`` of the token after it."""
        found = self._visit(0, torch.ones((), dtype=torch.float32, device=self.p.device), 0)
        assert found is not None, "the root is always accepted"
        return found

    def _visit(self, node: int, weight: Tensor, level: int) -> tuple[list[int], Tensor] | None:
        """The path from ``node`` on and the probs after it; None if nothing from here on is accepted."""
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
    """A node's weight ``[]`` and target probs ``[V]`` after the rejection of a child, drawn from ``draft``.

    For a child that was proposed deterministically the draft probs are 1 at its token, and not read.
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
    """Draft probs ``[V]`` of the next sibling: without a token, renormalised; zeros if nothing is left."""
    others = draft.index_fill(0, torch.tensor(token, device=draft.device), 0.0)
    total = others.sum()
    return others / total if total > 0 else others


@fake("traverse_tree")
def _(tokens: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_results(tokens, rest[-1])

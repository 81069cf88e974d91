"""Acceptance over a token tree: the accepted path, the token emitted after it, and runner-up tokens."""

from typing import Any

import torch
from torch import Tensor

from triforce_tree.kernels.operators import fake, operator
from triforce_tree.kernels.step.draws import Draws, NoiseDraws

FIXED = -2
"""The row of ``q`` of a node that was proposed deterministically, as are its children."""


@operator("accept_greedy", triton=".accept_kernels", cpu="..cpu.step.traversal")
def accept_greedy(tokens: Tensor, parents: Tensor, best: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Greedy acceptance: follow the target's argmax as long as a child proposes it.

    Args:
        tokens: int64 ``[B, N]``; node 0 is the root, whose token is not read; -1 marks an absent node.
        parents: int64 ``[B, N]``; -1 for the root, and parents precede their children.
        best: int64 ``[B, N]``, the target's argmax at each node.
        depth: length of the longest path below the root; deeper nodes are not read.

    Returns:
        path int64 ``[B, depth + 1]``, the accepted nodes from the root on, padded with -1; count int64
        ``[B]``, their number, the root included; next int64 ``[B]``, the token emitted after them.
    """
    paths, emitted = [], []
    for token, parent, target_token in zip(tokens.tolist(), parents.tolist(), best.tolist(), strict=True):
        path = [0]
        while len(path) <= depth:
            node = path[-1]
            match = [
                i
                for i in range(node + 1, len(token))
                if parent[i] == node and token[i] == target_token[node] and token[i] >= 0
            ]
            if not match:
                break
            path.append(match[0])
        paths.append(path)
        emitted.append(target_token[path[-1]])
    return _packed(paths, emitted, depth, tokens)


@operator("accept_tree", triton=".accept_kernels")
def accept_tree(
    tokens: Tensor,
    parents: Tensor,
    p: Tensor,
    q: Tensor,
    q_rows: Tensor,
    uniforms: Tensor,
    exponential: Tensor,
    depth: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Recursive rejection sampling over siblings (SpecInfer, Sequoia), for trees drawn without replacement.

    A child with zero draft probability (after its rejected siblings are removed) cannot have been drawn and
    counts as absent. Children that were proposed deterministically, as by suffix matching, have q(x) = 1: the
    i-th is accepted with probability p_i(x), and its rejection leaves p_{i+1}, which is p_i without x,
    renormalised, or p_i where that leaves nothing. A token that was already rejected counts as absent. Both
    kinds of nodes may occur in one tree, and a node may have both kinds of children: drawn ones, and after
    them deterministic ones, whose own ``q_rows`` is ``FIXED``. The latter are judged by what the rejection of
    the former left: with the residual p_i of the drawn children as the first p of the rule above. A token may
    be proposed by both; it then counts for the drawn child alone.

    Args:
        tokens, parents, depth: as for ``accept_greedy``; siblings are in draw order.
        p: fp32 ``[B, N, V]``, the target's probs at each node.
        q: fp32 ``[B, M, V]``, draft probs; M may be 0 where all proposals are deterministic.
        q_rows: int64 ``[B, N]``, the row of ``q`` that a node's children were drawn from, -1 where they
            were proposed deterministically; read for nodes with drawn children only. ``FIXED``: as -1, and
            the node itself was proposed deterministically too, whatever its parent's other children are.
        uniforms: fp32 ``[B, N]`` in [0, 1); node x is accepted where ``uniforms[x] < p(x) / q(x)``.
        exponential: fp32 ``[B, V]`` of Exp(1) noise; the emitted token is the argmax of the residual
            probs / exponential, the lowest id among equals. Probs that are NaN emit token 0.

    Returns:
        path, count, next: as ``accept_greedy``; next follows the residual where a child was rejected.
    """
    return accept_drawn(NoiseDraws(exponential, uniforms), tokens, parents, p, q, q_rows, depth)


def accept_drawn(
    draws: Draws, tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor, q_rows: Tensor, depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``accept_tree`` with any source of random decisions, indexed by (sequence, node) and (sequence,)."""
    paths, emitted = [], []
    trees = zip(tokens.tolist(), parents.tolist(), q_rows.tolist(), strict=True)
    for b, (token, parent, row) in enumerate(trees):
        path, accepted = [0], True
        while accepted:
            node, accepted = path[-1], False
            target = p[b, node]
            children = [i for i in range(node + 1, len(token)) if parent[i] == node and token[i] >= 0]
            certain = torch.ones_like(target)  # without the rejected tokens
            drawn = row[node] >= 0 and any(row[child] != FIXED for child in children)
            draft = q[b, row[node]] if drawn else certain
            for child in children if len(path) <= depth else ():
                x = token[child]
                deterministic = row[node] < 0 or row[child] == FIXED
                draft = certain if deterministic else draft
                if not draft[x] > 0:
                    continue
                if draws.accept(target[x] / draft[x], b, child):
                    path.append(child)
                    accepted = True
                    break
                target, draft = refused(target, draft, x, deterministic)
                certain = certain.index_fill(0, torch.tensor(x, device=target.device), 0.0)
        paths.append(path)
        emitted.append(max(0, int(draws.choose(target, b))))
    return _packed(paths, emitted, depth, tokens)


def refused(target: Tensor, draft: Tensor, token: int, deterministic: bool) -> tuple[Tensor, Tensor]:
    """The residual of the target's probs ``[V]`` after a rejection, and the draft probs of the next sibling.

    norm(max(p - q, 0)), and q without the token, renormalised. For a child that was proposed
    deterministically q is 1 at its token and 0 elsewhere.
    """
    out = torch.tensor(token, device=target.device)
    left = target.index_fill(0, out, 0.0) if deterministic else (target - draft).clamp_min(0)
    others = draft.index_fill(0, out, 0.0)
    return _normalised(left, target), others if deterministic else _normalised(others, others)


def _normalised(weights: Tensor, fallback: Tensor) -> Tensor:
    total = weights.sum()
    return weights / total if total > 0 else fallback


def _packed(
    paths: list[list[int]], emitted: list[int], depth: int, like: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    padded = [path + [-1] * (depth + 1 - len(path)) for path in paths]
    return like.new_tensor(padded), like.new_tensor([len(path) for path in paths]), like.new_tensor(emitted)


@operator("second_choice", triton=".accept_kernels")
def second_choice(probs: Tensor, chosen: Tensor, exponential: Tensor | None) -> Tensor:
    """The runner-up: the second token of a draw without replacement, or the second most probable token.

    Args:
        probs: fp32 ``[B, C, V]``.
        chosen: int64 ``[B, C]``, the token to exclude; negative for none.
        exponential: fp32 ``[B, C, V]`` of Exp(1) noise: argmax of probs / exponential; None: argmax of probs,
            which may then be logits. The lowest id among equals.

    Returns:
        int64 ``[B, C]``; -1 where no other token is possible (no positive probability; without
        ``exponential``, nothing above -inf). NaN counts as impossible.
    """
    return second_drawn(None if exponential is None else NoiseDraws(exponential), probs, chosen)


def second_drawn(draws: Draws | None, probs: Tensor, chosen: Tensor) -> Tensor:
    """``second_choice`` with any source of random decisions; None: the most probable other token."""
    out = torch.arange(probs.shape[-1], device=probs.device) == chosen[..., None]
    if draws is not None:
        return draws.choose(probs.masked_fill(out, 0.0))
    top, token = torch.where(probs > -torch.inf, probs, -torch.inf).masked_fill(out, -torch.inf).max(-1)
    return torch.where(top > -torch.inf, token, -1)


def empty_results(tokens: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised path, count and next of ``accept_greedy``."""
    batch = tokens.shape[0]
    return tokens.new_empty(batch, depth + 1), tokens.new_empty(batch), tokens.new_empty(batch)


@fake("accept_greedy")
@fake("accept_tree")
def _(tokens: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_results(tokens, rest[-1])


@fake("second_choice")
def _(probs: Tensor, chosen: Tensor, exponential: Tensor | None) -> Tensor:
    return torch.empty_like(chosen, memory_format=torch.contiguous_format)

"""Greedy acceptance over a token tree, and the choice of second tokens."""

from typing import Any

import torch
from torch import Tensor

from triforce_tree.kernels.operators import fake, operator
from triforce_tree.kernels.step.draws import Draws, NoiseDraws

FIXED = -2
"""Value of ``q_rows`` for a node that, like its children, was proposed deterministically."""


@operator("accept_greedy", triton=".accept_kernels", cpu="..cpu.step.operators")
def accept_greedy(tokens: Tensor, parents: Tensor, best: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Accepts the path whose tokens are the target's argmax at each node (greedy acceptance).

    Args:
        tokens: int64 ``[B, N]``, tokens of the nodes. Node 0 is the root, whose token is not read; -1 marks
            an absent node.
        parents: int64 ``[B, N]``, parent of each node, which precedes its children; -1 for the root.
        best: int64 ``[B, N]``, the target's argmax at each node.
        depth: length of the longest path below the root; deeper nodes are not read.

    Returns:
        path int64 ``[B, depth + 1]``, the accepted nodes from the root on, padded with -1; count int64
        ``[B]``, the number of accepted nodes including the root; next int64 ``[B]``, the token emitted after
        them.
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


def _packed(
    paths: list[list[int]], emitted: list[int], depth: int, like: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    padded = [path + [-1] * (depth + 1 - len(path)) for path in paths]
    return like.new_tensor(padded), like.new_tensor([len(path) for path in paths]), like.new_tensor(emitted)


@operator("second_choice", triton=".accept_kernels")
def second_choice(probs: Tensor, chosen: Tensor, exponential: Tensor | None) -> Tensor:
    """Returns the second of two draws without replacement, or the second most probable token.

    Args:
        probs: fp32 ``[B, C, V]``.
        chosen: int64 ``[B, C]``, the first token, which is excluded; negative for none.
        exponential: fp32 ``[B, C, V]``, Exp(1) noise. The result is the argmax of probs / exponential, or of
            probs (which may be logits) if None. Among equals, the lowest id is chosen.

    Returns:
        int64 ``[B, C]``; -1 where no other token is possible, because none has a positive probability (or
        a logit above -inf without ``exponential``). Tokens with NaN are impossible.
    """
    return second_drawn(None if exponential is None else NoiseDraws(exponential), probs, chosen)


def second_drawn(draws: Draws | None, probs: Tensor, chosen: Tensor) -> Tensor:
    """Returns ``second_choice`` with any source of draws; None chooses the most probable other token."""
    out = torch.arange(probs.shape[-1], device=probs.device) == chosen[..., None]
    if draws is not None:
        return draws.choose(probs.masked_fill(out, 0.0))
    top, token = torch.where(probs > -torch.inf, probs, -torch.inf).masked_fill(out, -torch.inf).max(-1)
    return torch.where(top > -torch.inf, token, -1)


def empty_results(tokens: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates path, count and next of ``accept_greedy``."""
    batch = tokens.shape[0]
    return tokens.new_empty(batch, depth + 1), tokens.new_empty(batch), tokens.new_empty(batch)


@fake("accept_greedy")
def _(tokens: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_results(tokens, rest[-1])


@fake("second_choice")
def _(probs: Tensor, chosen: Tensor, exponential: Tensor | None) -> Tensor:
    return torch.empty_like(chosen, memory_format=torch.contiguous_format)

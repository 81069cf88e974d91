"""Traversal verification of one token tree, written apart from the package."""

import torch
from torch import Tensor


def traverse_one_tree(
    tokens: Tensor,
    parents: Tensor,
    p: Tensor,
    q: Tensor,
    q_rows: Tensor,
    uniforms: Tensor,
    exponential: Tensor,
    depth: int,
) -> tuple[list[int], int]:
    """As in Weng et al. (arXiv 2505.12398), in float64: the chain to the first leaf is judged, and the leaf
    cut off if it is rejected, until one is accepted.

    Args: those of ``traverse_tree`` without the batch. Returns: accepted nodes, and the token after them.
    """
    left = set(range(1, len(tokens)))
    target, mass = p.double().clone(), torch.zeros(len(tokens), dtype=torch.float64)
    mass[0] = 1.0
    rejected: dict[int, list[int]] = {}
    known = {0}
    while True:
        # The chain of first children, with the weights that are not known yet.
        path = [0]
        while len(path) <= depth:
            node = path[-1]
            gone = rejected.setdefault(node, [])
            child = next(
                (
                    n
                    for n in sorted(left)
                    if parents[n] == node and _proposed(n, node, tokens, q, q_rows, gone)
                ),
                None,
            )
            if child is None:
                break
            if child not in known:
                proposal = _proposal(child, node, tokens, q, q_rows, gone, target[node])
                x = int(tokens[child])
                mass[child] = min(1.0, float(mass[node] * target[node][x] / proposal[x]))
                known.add(child)
            path.append(child)
        leaf = path[-1]
        if leaf == 0 or float(uniforms[leaf]) < float(mass[leaf]):
            return path, int((target[leaf] / exponential).argmax())
        above = path[-2]
        proposal = _proposal(leaf, above, tokens, q, q_rows, rejected[above], target[above])
        rest = (mass[above] * target[above] - proposal).clamp_min(0)
        if rest.sum() > 0:
            target[above] = rest / rest.sum()
            mass[above] = rest.sum() / (rest.sum() + 1 - mass[above])
        elif mass[above] < 1:
            mass[above] = 0.0
        rejected[above].append(int(tokens[leaf]))
        left.remove(leaf)


def _proposed(child: int, node: int, tokens: Tensor, q: Tensor, q_rows: Tensor, gone: list[int]) -> bool:
    x = int(tokens[child])
    if x < 0 or x in gone:
        return False
    return bool(q_rows[node] < 0 or q_rows[child] == -2 or q[q_rows[node], x] > 0)


def _proposal(
    child: int, node: int, tokens: Tensor, q: Tensor, q_rows: Tensor, gone: list[int], like: Tensor
) -> Tensor:
    """Returns the distribution that ``child`` was drawn from, after the siblings of tokens ``gone``."""
    if q_rows[node] < 0 or q_rows[child] == -2:
        return torch.zeros_like(like).index_fill(0, tokens[child], 1.0)
    draft = q[q_rows[node]].double()
    draft[gone] = 0.0
    return draft / draft.sum()

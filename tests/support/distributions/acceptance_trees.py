"""Verification of small trees by its definition, with every draw enumerated."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support.distributions.enumerated_noise import WalkDraws
from tests.support.distributions.enumeration import Walk
from triforce_tree.kernels.step.traversal import traverse_drawn

DRAWN = None
"""Stands for a token that is drawn, without replacement, from the row of q of its parent."""


@dataclass(frozen=True)
class Tree:
    """``rows``: the row of q that each node's children are drawn from; -1 if they are deterministic."""

    tokens: Sequence[int | None]
    parents: Sequence[int]
    rows: Sequence[int]


def probs_of(path: Sequence[int], vocabulary: int = 3, seed: int = 1) -> Tensor:
    """Returns pseudo-random probabilities ``[V]`` after these tokens, the same in every call."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr((seed, tuple(path))).encode()))
    return (1.5 * torch.randn(vocabulary, generator=generator)).softmax(-1)


def grown(tree: Tree, q: Tensor, walk: Walk) -> list[int]:
    """Returns the tokens of the tree, with those drawn that are ``DRAWN``."""
    tokens = list(tree.tokens)
    for parent, row in enumerate(tree.rows):
        children = [i for i, above in enumerate(tree.parents) if above == parent and tokens[i] is DRAWN]
        if children:
            drawn = WalkDraws([walk]).choose_distinct(q[None, row, None], len(children))
            for child, token in zip(children, drawn.flatten().tolist(), strict=True):
                tokens[child] = token
    return [int(token) for token in tokens if token is not None]


def accepted(
    tokens: Sequence[int], tree: Tree, p: Tensor, q: Tensor, walk: Walk
) -> tuple[tuple[int, ...], int]:
    """Returns the accepted nodes, and the token after them; ``p`` is ``[N, V]`` and ``q`` ``[M, V]``."""
    path, count, following = traverse_drawn(
        WalkDraws([walk]),
        torch.tensor([list(tokens)]),
        torch.tensor([list(tree.parents)]),
        p[None],
        q[None],
        torch.tensor([list(tree.rows)]),
        len(tokens),
    )
    return tuple(path[0, : int(count)].tolist()), int(following)


def paths_of(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns tokens from the root to each node."""
    paths = [(tokens[0],)]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths

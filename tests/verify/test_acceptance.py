"""The acceptance of small trees by its definition, with every draw enumerated."""

import itertools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.distributions.enumerated_noise import WalkDraws
from tests.support.distributions.enumeration import (
    NOISE,
    EnumeratingRandom,
    Walk,
    exact_distribution,
    outcomes,
    total_variation,
)
from triforce_tree.kernels.step import traversal
from triforce_tree.kernels.step.accept import FIXED
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


def draft_probs(rows: int, vocabulary: int = 3, seed: int = 0) -> torch.Tensor:
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))
    return (1.5 * logits).softmax(-1)


def distance(tree: Tree, length: int, q: torch.Tensor | None = None) -> float:
    """Returns the distance of the first ``length`` tokens from the target's distribution.

    The tokens are those of one acceptance, continued by draws from the target.
    """
    q = draft_probs(2) if q is None else q

    def run(walk: EnumeratingRandom) -> list[int]:
        tokens = grown(tree, q, walk)
        p = torch.stack([probs_of(path) for path in paths_of(tokens, tree.parents)])
        path, following = accepted(tokens, tree, p, q if max(tree.rows) >= 0 else q[:0], walk)
        new = [*(tokens[i] for i in path[1:]), following]
        while len(new) < length:
            new.append(walk.choose(probs_of((0, *new))))
        return new[:length]

    expected = {
        tokens: float(
            torch.stack([probs_of((0, *tokens[:i]))[t] for i, t in enumerate(tokens)]).double().prod()
        )
        for tokens in itertools.product(range(3), repeat=length)
    }
    return total_variation(exact_distribution(run), expected)


# Pairs of a tree and the number of compared tokens.
TREES = {
    "no proposal": (Tree([0], [-1], [-1]), 2),
    "chain": (Tree([0, DRAWN, DRAWN], [-1, 0, 1], [0, 1, -1]), 3),
    "siblings": (Tree([0, DRAWN, DRAWN], [-1, 0, 0], [0, -1, -1]), 2),
    "all siblings": (Tree([0, *[DRAWN] * 6], [-1, 0, 0, 0, 1, 2, 3], [0, 1, 1, 1, -1, -1, -1]), 2),
    "chain with runner-ups": (Tree([0, *[DRAWN] * 4], [-1, 0, 1, 0, 1], [0, 1, -1, -1, -1]), 3),
    "deep siblings": (Tree([0, *[DRAWN] * 4], [-1, 0, 0, 2, 2], [0, -1, 1, -1, -1]), 3),
    "drawn and deterministic siblings": (
        Tree([0, DRAWN, 1, 2, DRAWN, 0], [-1, 0, 0, 0, 1, 3], [0, 1, FIXED, FIXED, -1, -1]),
        3,
    ),
    "deterministic siblings beside the second of two drawn": (
        Tree([0, DRAWN, DRAWN, DRAWN, 1, 2], [-1, 0, 0, 2, 2, 4], [0, -1, 1, -1, FIXED, -1]),
        3,
    ),
    "deterministic beside all": (
        Tree([0, DRAWN, DRAWN, 2, 0, 2], [-1, 0, 0, 0, 0, 0], [0, -1, -1, *[FIXED] * 3]),
        2,
    ),
    "chain beside a tree": (Tree([0, DRAWN, DRAWN, 2, 1], [-1, 0, 1, 0, 3], [0, 1, -1, FIXED, FIXED]), 3),
    "chain that leaves a tree": (
        Tree([0, DRAWN, DRAWN, DRAWN, 1, 2], [-1, 0, 0, 1, 1, 2], [1, 0, -1, -1, FIXED, FIXED]),
        3,
    ),
    "deterministic": (Tree([0, 1, 1], [-1, 0, 1], [-1] * 3), 3),
    "two deterministic": (Tree([0, 1, 2, 1], [-1, 0, 0, 1], [-1] * 4), 3),
    "all deterministic": (Tree([0, 2, 0, 1, 1], [-1, 0, 0, 0, 1], [-1] * 5), 3),
    "equal deterministic siblings": (Tree([0, 1, 1, 2], [-1, 0, 0, 0], [-1] * 4), 2),
    "deterministic, deep": (Tree([0, 2, 0, 1, 1, 0], [-1, 0, 0, 1, 1, 2], [-1] * 6), 3),
    "drawn below deterministic": (
        Tree([0, 2, 0, DRAWN, DRAWN, 1], [-1, 0, 0, 1, 1, 3], [-1, 0, -1, -1, -1, -1]),
        3,
    ),
    "deterministic below drawn": (
        Tree([0, DRAWN, DRAWN, 1, 2, 0], [-1, 0, 0, 1, 1, 2], [1, -1, -1, -1, -1, -1]),
        3,
    ),
}


@pytest.mark.parametrize("name", TREES)
def test_an_honest_tree_is_accepted_losslessly(name: str) -> None:
    tree, length = TREES[name]
    assert distance(tree, length) < NOISE


def test_draws_from_the_targets_own_distribution_are_always_accepted() -> None:
    tree, q = Tree([0, DRAWN], [-1, 0], [0, -1]), probs_of((0,))[None]

    def path(walk: Walk) -> tuple[int, ...]:
        return accepted(grown(tree, q, walk), tree, q.repeat(2, 1), q, walk)[0]

    assert {nodes for nodes, _ in outcomes(path)} == {(0, 1)}


def test_disjoint_supports_are_lossless() -> None:
    """A draft that proposes only tokens of target probability 0: every token is drawn from the residual."""
    p = torch.tensor([[0.0, 0.25, 0.75], [1.0, 0.0, 0.0]])
    q = torch.tensor([[1.0, 0.0, 0.0]])
    tree = Tree([1, DRAWN], [-1, 0], [0, -1])
    results = dict(outcomes(lambda walk: accepted(grown(tree, q, walk), tree, p, q, walk)))
    assert results == {((0,), 1): 0.25, ((0,), 2): 0.75}


# A root and its child, drawn or deterministic.
PAIR = Tree([0, 1], [-1, 0], [0, -1])
FIXED_PAIR = Tree([0, 1], [-1, 0], [-1, -1])


def test_a_token_is_always_accepted_if_the_target_gives_it_more_probability() -> None:
    q = torch.tensor([[0.2, 0.8]])
    p = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    assert [a for a, _ in outcomes(lambda walk: accepted([0, 0], PAIR, p, q, walk))] == [((0, 1), 0)]


def test_a_token_is_accepted_by_the_ratio_of_probabilities_or_the_residual_is_drawn() -> None:
    q = torch.tensor([[0.2, 0.8]])
    p = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    results = {a: round(chance, 6) for a, chance in outcomes(lambda walk: accepted([0, 1], PAIR, p, q, walk))}
    assert results == {((0,), 0): 0.375, ((0, 1), 0): 0.625}


def test_a_deterministic_child_is_accepted_with_the_targets_probability() -> None:
    p = torch.tensor([[0.25, 0.75, 0.0], [0.0, 0.0, 1.0]])
    results = dict(outcomes(lambda walk: accepted([0, 0], FIXED_PAIR, p, p[:0], walk)))
    assert results == {((0,), 1): 0.75, ((0, 1), 2): 0.25}


@pytest.mark.parametrize(
    ("tree", "q"), [(PAIR, [[1.0, 0.0]]), (FIXED_PAIR, [[1.0, 0.0]])], ids=["drawn", "fixed"]
)
def test_a_child_of_target_probability_0_is_never_accepted(tree: Tree, q: list[list[float]]) -> None:
    p = torch.tensor([[0.0, 1.0], [1.0, 0.0]])

    def run(walk: EnumeratingRandom) -> tuple[tuple[int, ...], int]:
        return accepted([1, 0], tree, p, torch.tensor(q), walk)

    assert [a for a, _ in outcomes(run)] == [((0,), 1)]


FAULTS = ["residual", "replacement", "weight", "residual of p", "nodes by themselves"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_residual_is_detected(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five planted faults are detected: p instead of the residual; q that still has the rejected siblings; a
    weight that rejections do not change; the residual of p instead of the residual of a p; and nodes that are
    judged independently of their siblings.
    """
    tree, length = TREES["siblings" if fault == "replacement" else "chain"]
    rule = traversal.residual
    with monkeypatch.context() as patch:
        if fault == "replacement":
            patch.setattr(traversal, "without", lambda draft, token: draft)
        else:
            patch.setattr(traversal, "residual", partial(_wrong, fault, rule))
        assert distance(tree, length) > 0.003
    assert distance(tree, length) < NOISE


def _wrong(
    fault: str, rule: Callable[..., tuple[Tensor, Tensor]], weight: Tensor, p: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    after, left = rule(weight, p, *rest)
    if fault == "residual":
        return after, p
    if fault == "weight":
        return weight, left
    of_p = rule(torch.ones_like(weight), p, *rest)
    return (after, of_p[1]) if fault == "residual of p" else (weight * of_p[0], of_p[1])

"""The distribution of the tokens that one acceptance emits, by enumeration, for honest trees."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.distributions.acceptance_trees import DRAWN, Tree, accepted, grown, paths_of, probs_of
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
    "all siblings": (
        Tree([0, *[DRAWN] * 6], [-1, 0, 0, 0, 1, 2, 3], [0, 1, 1, 1, -1, -1, -1]),
        2,
    ),
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
    "chain beside a tree": (
        Tree([0, DRAWN, DRAWN, 2, 1], [-1, 0, 1, 0, 3], [0, 1, -1, FIXED, FIXED]),
        3,
    ),
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

"""Expected numbers of accepted tokens, as the verification benchmark computes them."""

import itertools

import pytest
import torch

from scripts.benchmarks.verification import expected
from tests.support.distributions.acceptance_trees import probs_of

LENGTH = 3


def chains() -> list[tuple[tuple[int, ...], torch.Tensor, torch.Tensor]]:
    """All chains of three tokens out of three, with p and q of their nodes."""
    return [
        (
            tokens,
            torch.stack([probs_of((0, *tokens[:n])) for n in range(LENGTH + 1)]),
            torch.stack([probs_of((0, *tokens[:n]), seed=2) for n in range(LENGTH)]),
        )
        for tokens in itertools.product(range(3), repeat=LENGTH)
    ]


def test_expectations_over_all_chains_are_those_of_the_papers() -> None:
    """Products of min(1, p / q) token by token, and min(1, a p / q) of the weight before in blocks."""
    found, by_formula = torch.zeros(2), torch.zeros(2)
    parents, rows = torch.tensor([[-1, 0, 1, 2]]), torch.tensor([[0, 1, 2, -1]])
    for tokens, p, q in chains():
        tree = torch.tensor([[0, *tokens]]), parents, p[None], q[None], rows, LENGTH
        ratios = torch.stack([p[i, x] / q[i, x] for i, x in enumerate(tokens)])
        drawn = torch.stack([q[i, x] for i, x in enumerate(tokens)]).prod()
        found += drawn * torch.stack([expected.traversal(*tree)[0], expected.node_by_node(*tree)[0]])
        weights = [torch.ones(())]
        for ratio in ratios:
            weights.append((weights[-1] * ratio).clamp(max=1))
        by_formula += drawn * torch.stack([sum(weights[1:]), ratios.clamp(max=1).cumprod(0).sum()])
    torch.testing.assert_close(found, by_formula)
    assert found[0] > 1.05 * found[1]


@pytest.mark.parametrize("depth", [1, 2])
def test_siblings_and_deterministic_children_count(depth: int) -> None:
    """Two siblings that hold all of p, the first with a child that is always right; by hand."""
    p = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.5, 0.5], [0.5, 0.5]])
    tokens, parents = torch.tensor([[0, 0, 1, 0]]), torch.tensor([[-1, 0, 0, 1]])
    tree = tokens, parents, p[None], p[None, :0], torch.full((1, 4), -1), depth
    for count in (expected.traversal, expected.node_by_node):
        assert count(*tree).tolist() == [1.0 if depth == 1 else 1.5]

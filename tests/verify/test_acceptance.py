"""The accepted path; ``test_acceptance_distributions`` tests the distribution of emitted tokens."""

import pytest
import torch

from tests.support.distributions.acceptance_trees import Tree, accepted
from tests.support.distributions.enumeration import EnumeratingRandom, outcomes
from triforce_tree.kernels import step

#        0
#      1   2      tokens 5, 6
#     3 4   5     tokens 7, 8, 7
TOKENS, PARENTS = [4, 5, 6, 7, 8, 7], [-1, 0, 0, 1, 1, 2]
CHAIN = Tree([0, 1], [-1, 0], [0, -1])
FIXED = Tree([0, 1], [-1, 0], [-1, -1])


@pytest.mark.parametrize(
    ("best", "path", "following"),
    [
        ([6, 0, 7, 0, 0, 1], [0, 2, 5], 1),
        ([5, 8, 0, 0, 3, 0], [0, 1, 4], 3),
        ([5, 9, 0, 0, 0, 0], [0, 1, -1], 9),
        ([7, 0, 0, 0, 0, 0], [0, -1, -1], 7),  # 7 is no child of the root
    ],
)
def test_greedy_follows_the_targets_choice_as_far_as_it_was_proposed(best, path, following) -> None:
    tokens, parents = torch.tensor([TOKENS]), torch.tensor([PARENTS])
    accepted_path, count, last = step.accept_greedy(tokens, parents, torch.tensor([best]), 2)
    assert accepted_path.tolist() == [path]
    assert (int(count), int(last)) == (sum(node >= 0 for node in path), following)


def test_greedy_without_a_proposal_takes_the_targets_choice() -> None:
    one = torch.tensor([[4]])
    path, count, last = step.accept_greedy(one, torch.tensor([[-1]]), torch.tensor([[2]]), 0)
    assert (path.tolist(), int(count), int(last)) == ([[0]], 1, 2)


def test_a_token_is_always_accepted_if_the_target_gives_it_more_probability() -> None:
    q = torch.tensor([[0.2, 0.8]])
    p = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    assert [a for a, _ in outcomes(lambda walk: accepted([0, 0], CHAIN, p, q, walk))] == [((0, 1), 0)]


def test_a_token_is_accepted_by_the_ratio_of_probabilities_or_the_residual_is_drawn() -> None:
    q = torch.tensor([[0.2, 0.8]])
    p = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    results = {
        a: round(chance, 6) for a, chance in outcomes(lambda walk: accepted([0, 1], CHAIN, p, q, walk))
    }
    assert results == {((0,), 0): 0.375, ((0, 1), 0): 0.625}


def test_a_deterministic_child_is_accepted_with_the_targets_probability() -> None:
    p = torch.tensor([[0.25, 0.75, 0.0], [0.0, 0.0, 1.0]])
    results = dict(outcomes(lambda walk: accepted([0, 0], FIXED, p, p[:0], walk)))
    assert results == {((0,), 1): 0.75, ((0, 1), 2): 0.25}


@pytest.mark.parametrize(
    ("tree", "q"), [(CHAIN, [[1.0, 0.0]]), (FIXED, [[1.0, 0.0]])], ids=["drawn", "fixed"]
)
def test_a_child_of_target_probability_0_is_never_accepted(tree: Tree, q: list[list[float]]) -> None:
    p = torch.tensor([[0.0, 1.0], [1.0, 0.0]])

    def run(walk: EnumeratingRandom) -> tuple[tuple[int, ...], int]:
        return accepted([1, 0], tree, p, torch.tensor(q), walk)

    assert [a for a, _ in outcomes(run)] == [((0,), 1)]

"""Which path is accepted. The laws of sampled acceptance stand in ``test_acceptance_laws``."""

import torch
from enumeration import EnumeratingRandom, outcomes
from triforce_tree.verify.acceptance import Accepted, accept_greedy, accept_sampling

from triforce_tree.token_tree import TokenTree, chain

#        0
#      1   2      tokens 5, 6
#     3 4   5     tokens 7, 8, 7
TREE = TokenTree([4, 5, 6, 7, 8, 7], [-1, 0, 0, 1, 1, 2])


def test_greedy_follows_the_targets_choice_as_far_as_it_was_proposed() -> None:
    assert accept_greedy(TREE, [6, 0, 7, 0, 0, 1]) == Accepted([0, 2, 5], 1)
    assert accept_greedy(TREE, [5, 8, 0, 0, 3, 0]) == Accepted([0, 1, 4], 3)
    assert accept_greedy(TREE, [5, 9, 0, 0, 0, 0]) == Accepted([0, 1], 9)
    assert accept_greedy(TREE, [7, 0, 0, 0, 0, 0]) == Accepted([0], 7), "7 stands deeper only"
    assert accept_greedy(TokenTree([4], [-1]), [2]) == Accepted([0], 2)


def test_sampling_accepts_for_sure_where_the_target_wants_a_token_more() -> None:
    q = torch.tensor([[0.2, 0.8]])
    p = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    assert accept_sampling(chain([0, 0], q), p, EnumeratingRandom()) == Accepted([0, 1], 0)


def test_sampling_accepts_by_the_ratio_and_else_draws_the_residual() -> None:
    q = torch.tensor([[0.2, 0.8]])
    p = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    results = [
        (a.path, a.next_token, chance)
        for a, chance in outcomes(lambda r: accept_sampling(chain([0, 1], q), p, r))
    ]
    chances = {tuple(path): (token, round(chance, 6)) for path, token, chance in results}
    assert chances == {(0,): (0, 0.375), (0, 1): (0, 0.625)}


def test_a_deterministic_child_is_accepted_with_the_targets_own_probability() -> None:
    p = torch.tensor([[0.25, 0.75, 0.0], [0.0, 0.0, 1.0]])
    tree = TokenTree([0, 0], [-1, 0])
    results = {
        (tuple(a.path), a.next_token): chance for a, chance in outcomes(lambda r: accept_sampling(tree, p, r))
    }
    assert results == {((0,), 1): 0.75, ((0, 1), 2): 0.25}


def test_a_child_the_target_never_says_is_never_accepted() -> None:
    p = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    for tree in (chain([1, 0], torch.tensor([[1.0, 0.0]])), TokenTree([1, 0], [-1, 0])):
        assert [a for a, _ in outcomes(lambda r, tree=tree: accept_sampling(tree, p, r))] == [
            Accepted([0], 1)
        ]

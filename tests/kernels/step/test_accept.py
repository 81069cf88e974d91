"""Greedy acceptance, runner-ups and large trees: definitions against naive ones, kernels against definitions.

The kernels run in Triton's interpreter where there is no GPU; see ``test_kv_slots``.
"""

import pytest
import torch

from tests.support.kernels import acceptance_cases, step_cases
from tests.support.kernels.triton_ops import DEVICE, runs_kernels
from triforce_tree.kernels import step


def test_greedy_acceptance_by_hand() -> None:
    """The second of three children, its child, then a token that was not proposed; then a smaller depth."""
    tokens = torch.tensor([[9, 4, 5, 6, 7, 5, -1]])
    parents = torch.tensor([[-1, 0, 0, 0, 2, 1, 4]])
    best = torch.tensor([[5, 5, 7, 0, 3, 0, 0]])
    path, count, following = step.accept_greedy(tokens, parents, best, 3)
    assert (path.tolist(), count.tolist(), following.tolist()) == ([[0, 2, 4, -1]], [3], [3])
    path, count, following = step.accept_greedy(tokens, parents, best, 1)
    assert (path.tolist(), count.tolist(), following.tolist()) == ([[0, 2]], [2], [7])
    # An absent node, whose token is -1, does not match a target token of -1.
    path, count, _ = step.accept_greedy(tokens, parents, best.index_fill(1, torch.tensor(4), -1), 3)
    assert (path.tolist(), count.tolist()) == ([[0, 2, 4, -1]], [3])


@pytest.mark.parametrize("seed", range(4))
def test_reference_greedy_finds_the_longest_accepted_path(seed) -> None:
    """It is the longest path of all nodes whose tokens are the target's argmax at their parents."""
    torch.manual_seed(seed)
    problem = acceptance_cases.greedy(3, 12, 4, "cpu", seed)
    tokens, parents, best, depth = problem.args
    path, count, following = problem.expected()
    for b in range(3):
        paths: dict[int, list[int]] = {0: [0]}
        for node in range(1, 12):
            above = int(parents[b, node])
            equal = (parents[b, :node] == above) & (tokens[b, :node] == tokens[b, node])
            # Of siblings with equal tokens the first counts.
            if above in paths and 0 <= tokens[b, node] == best[b, above] and not equal.any():
                paths[node] = [*paths[above], node]
        longest = max(map(len, paths.values()))
        assert longest <= depth + 1
        assert path[b, : count[b]].tolist() in [nodes for nodes in paths.values() if len(nodes) == longest]
        assert int(following[b]) == best[b, path[b, count[b] - 1]]


@runs_kernels
@pytest.mark.parametrize("nodes, depth", [(1025, 128), (68, 66)])
def test_a_large_deep_tree(nodes, depth, ops) -> None:
    """One long path below the root, which is accepted; sampling runs a program per node, so it is slower."""
    torch.manual_seed(0)
    vocab = 40
    parents = torch.tensor([-1, *range(depth), *(i % depth for i in range(nodes - depth - 1))], device=DEVICE)
    tokens = torch.randint(vocab, (1, nodes), device=DEVICE)
    tokens[0, depth + 1 :] = torch.randint(20, (nodes - depth - 1,), device=DEVICE)
    tokens[0, : depth + 1] = torch.randint(20, vocab, (depth + 1,), device=DEVICE)
    best = torch.zeros(1, nodes, dtype=torch.int64, device=DEVICE)
    best[0, :depth] = tokens[0, 1 : depth + 1]
    greedy = step_cases.Problem("accept_greedy", (tokens, parents[None], best, depth))
    step_cases.agree(greedy, ops)
    assert greedy.expected()[1].tolist() == [depth + 1]
    if nodes > 1000 and DEVICE == "cpu":
        return
    # The whole path is accepted with the product of its probabilities.
    p = torch.rand(1, nodes, vocab, device=DEVICE) * 1e-6
    p = p.scatter(2, best[..., None], 1.0)
    p /= p.sum(-1, keepdim=True)
    rows, uniforms = torch.full_like(tokens, -1), torch.rand(1, nodes, device=DEVICE) * 0.5
    exponential = torch.empty(1, vocab, device=DEVICE).exponential_()
    problem = step_cases.Problem(
        "traverse_tree", (tokens, parents[None], p, p[:, :0], rows, uniforms, exponential, depth)
    )
    expected = problem.expected()
    assert expected[1].tolist() == [depth + 1]
    step_cases.agree(problem, ops)


@runs_kernels
def test_rejections_of_drawn_siblings(ops) -> None:
    """Up to all children of the root rejected, which leaves 1e-20 of the draft distribution."""
    q = torch.tensor([0.9, 0.1 - 1e-6, 1e-6, 1e-12, 1e-20, 0.0, 0.0])
    p = torch.tensor([0.1, 0.05, 1e-7, 1e-13, 1e-21, 0.5, 0.35])
    tree = torch.tensor([[0, 0, 1, 2, 3, 4]]), torch.tensor([[-1, 0, 0, 0, 0, 0]])
    exponential = torch.ones(1, 7)
    exponential[0, 6] = 0.1
    for rejections in range(6):
        uniforms = torch.full((1, 6), 0.9999)
        uniforms[0, 1 + rejections :] = 0.0
        tensors = (
            *tree,
            p.expand(1, 6, 7),
            q.expand(1, 1, 7),
            torch.zeros_like(tree[0]),
            uniforms,
            exponential,
        )
        args = *(x.to(DEVICE) for x in tensors), 1
        step_cases.agree(step_cases.Problem("traverse_tree", args), ops)


@runs_kernels
@pytest.mark.parametrize("seed", range(6))
def test_accept_greedy(seed, ops) -> None:
    torch.manual_seed(seed)
    step_cases.agree(acceptance_cases.greedy(3, (1, 2, 7, 16, 33, 64)[seed], 3 + seed, DEVICE, seed), ops)


@runs_kernels
@pytest.mark.parametrize("shape", [(1, 1, 5), (2, 3, 300), (1, 4, 4200)], ids=str)
@pytest.mark.parametrize("exponential", [True, False], ids=["exponential", "greedy"])
def test_second_choice(shape, exponential, ops) -> None:
    step_cases.agree(acceptance_cases.runner_up(*shape, exponential, DEVICE), ops)


def test_second_choice_by_hand() -> None:
    probs, chosen = torch.tensor([[[0.2, 0.5, 0.3, 0.0]] * 3]), torch.tensor([[1, 2, -1]])
    noise = torch.tensor([1.0, 1.0, 3.0, 1e-9]).expand(1, 3, 4)
    assert step.second_choice(probs, chosen, None).tolist() == [[2, 1, 1]]
    assert step.second_choice(probs, chosen, noise).tolist() == [[0, 1, 1]]
    only = torch.tensor([[[0.0, 1.0, 0.0]]])
    assert step.second_choice(only, torch.tensor([[1]]), torch.ones(1, 1, 3)).tolist() == [[-1]]
    assert step.second_choice(only, torch.tensor([[1]]), None).tolist() == [[0]]

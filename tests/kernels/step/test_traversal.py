"""Traversal verification: its definition against a naive one, the kernel against the definition.

The kernel runs in Triton's interpreter where there is no GPU; see ``test_kv_slots``.
"""

import pytest
import torch

from tests.support.kernels import acceptance_cases, step_cases
from tests.support.kernels.naive_traversal import traverse_one_tree
from tests.support.kernels.triton_ops import DEVICE, runs_kernels

KINDS = {"drawn": {}, "mixed": {"fixed": 0.5}, "fixed": {"fixed": 1.0}, "mixed siblings": {"both": 0.7}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(8))
def test_the_definition_is_that_of_the_paper(seed, kind) -> None:
    torch.manual_seed(seed)
    likeness = acceptance_cases.LIKENESS[seed % 6]
    problem = acceptance_cases.traversal(
        4, 3 + seed, (3, 9, 60, 9)[seed % 4], "cpu", *likeness, seed=seed, **KINDS[kind]
    )
    *tensors, depth = problem.args
    path, count, following = problem.expected()
    for b in range(4):
        nodes, token = traverse_one_tree(*(x[b] for x in tensors), depth)
        assert nodes == path[b, : count[b]].tolist()
        assert (path[b, count[b] :] == -1).all()
        assert token == following[b]


@runs_kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_the_kernel_decides_as_the_definition(seed, kind, ops) -> None:
    torch.manual_seed(seed)
    nodes, vocab = (1, 2, 5, 9, 17, 33)[seed], (3, 7, 50, 300, 4200)[seed % 5]
    likeness = acceptance_cases.LIKENESS[seed % 6]
    problem = acceptance_cases.traversal(
        2, nodes, vocab, DEVICE, *likeness, seed % 2 == 1, seed, **KINDS[kind]
    )
    step_cases.agree(problem, ops)
    if nodes > 1:
        problem.args = (*problem.args[:-1], 1)  # deeper nodes are not read
        step_cases.agree(problem, ops)


@runs_kernels
def test_a_residual_of_nothing(ops) -> None:
    """p = q with rejections, which rounding alone causes; here uniforms of 1 force them."""
    p = torch.tensor([0.25, 0.5, 0.25], device=DEVICE).expand(1, 3, 3)
    chain = torch.tensor([[0, 1, 1]], device=DEVICE), torch.tensor([[-1, 0, 1]], device=DEVICE)
    ones, rows = torch.ones(1, 3, device=DEVICE), torch.arange(3, device=DEVICE)[None]
    for fixed in (False, True):
        own = (
            torch.nn.functional.one_hot(torch.tensor(1), 3).float().to(DEVICE).expand(1, 3, 3) if fixed else p
        )
        args = (*chain, own, p[:, : 0 if fixed else 3], rows * 0 - 1 if fixed else rows, ones, ones, 2)
        problem = step_cases.Problem("traverse_tree", args)
        step_cases.agree(problem, ops)
        assert [x.tolist() for x in problem.expected()] == [[[0, -1, -1]], [1], [1]]


@runs_kernels
@pytest.mark.parametrize("depth", [0, 2])
def test_a_root_alone(depth, ops) -> None:
    """Plain decoding draws so. The cases are equal weights, probabilities of 0, and a row of NaN."""
    p = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0], [torch.nan] * 3], device=DEVICE)[:, None]
    root = torch.zeros(3, 1, dtype=torch.int64, device=DEVICE)
    noise = torch.ones(3, 1, device=DEVICE), torch.ones(3, 3, device=DEVICE)
    problem = step_cases.Problem("traverse_tree", (root, root - 1, p, p[:, :0], root - 1, *noise, depth))
    step_cases.agree(problem, ops)
    path, count, following = problem.expected()
    assert (path[:, 0] == 0).all()
    assert count.tolist() == [1, 1, 1]
    assert following.tolist() == [0, 2, 0]


@runs_kernels
def test_a_long_chain_with_runner_ups(ops) -> None:
    """Level 2 verifies such trees: 12 tokens, and a second sibling of each; some are absent."""
    torch.manual_seed(0)
    length, vocab = 12, 60
    parents = [-1, *range(length), *range(length)]
    # On the CPU: a GPU draws other numbers.
    shared = torch.randn(6, 2 * length + 1, vocab) * 3
    p, q = ((torch.randn_like(shared) * 0.3 + shared).softmax(-1) for _ in range(2))
    rows = torch.arange(2 * length + 1).expand(6, -1)
    tokens = acceptance_cases.honest_tokens([parents] * 6, q, rows, absent=0.0)
    for b in range(6):
        tokens[b, 2 * b + 1 : length + 1], tokens[b, length + 2 * b + 1 :] = -1, -1
    tensors = tokens, torch.tensor(parents).expand(6, -1), p, q[:, :length], rows
    noise = torch.rand(6, 2 * length + 1) ** 0.2, torch.empty(6, vocab).exponential_()
    problem = step_cases.Problem("traverse_tree", (*(x.to(DEVICE) for x in (*tensors, *noise)), length))
    step_cases.agree(problem, ops)
    path, count, _ = problem.expected()
    assert count.tolist() != [1] * 6
    assert (path > length).any(), "no runner-up was accepted"

"""Acceptance over token trees: definitions against naive ones and statistics, kernels against definitions.

The kernels run in Triton's interpreter where there is no GPU; see ``test_kv_slots``.
"""

from types import SimpleNamespace

import pytest
import torch
from scipy import stats

from tests.support.kernels import acceptance_cases, step_cases, triton_ops
from tests.support.kernels.naive_acceptance import accept_one_tree
from tests.support.kernels.triton_ops import DEVICE, runs_kernels
from triforce_tree.kernels import step
from triforce_tree.kernels.step.accept import FIXED


@pytest.fixture
def ops() -> SimpleNamespace:
    """The Triton implementations of the step operators, by name."""
    return triton_ops.step_kernels()


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


@pytest.mark.parametrize("seed", range(12))
def test_reference_acceptance_is_recursive_rejection(seed) -> None:
    torch.manual_seed(seed)
    likeness = acceptance_cases.LIKENESS[seed % 6]
    fixed = (0.0, 0.5, 1.0)[seed % 3]
    problem = acceptance_cases.acceptance(
        4, 3 + seed, (3, 9, 60, 9)[seed % 4], "cpu", *likeness, seed=seed, fixed=fixed,
        beside=(0.0, 0.5)[seed % 2],
    )  # fmt: skip
    *tensors, depth = problem.args
    path, count, following = problem.expected()
    for b in range(4):
        nodes, token = accept_one_tree(*(x[b] for x in tensors), depth)
        assert nodes == path[b, : count[b]].tolist()
        assert (path[b, count[b] :] == -1).all()
        assert token == following[b]


@pytest.mark.parametrize("seed", range(4))
def test_reference_greedy_finds_the_longest_accepted_path(seed) -> None:
    """Among all nodes: every token on the path is the target's argmax at its parent."""
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


def test_reference_acceptance_samples_the_target_distribution() -> None:
    """Chi-square of the first two emitted tokens; the tree has two siblings, of which the first has one."""
    torch.manual_seed(1)
    runs, vocab = 6000, 4
    parents = [[-1, 0, 0, 1]] * runs
    target = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.1, 0.25, 0.25]])
    draft = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]])
    q_rows = torch.tensor([[0, 1, 1, 1]]).expand(runs, -1)
    tokens = acceptance_cases.honest_tokens(parents, draft.expand(runs, -1, -1), q_rows, absent=0.0)
    path, count, following = step.accept_tree(
        tokens,
        torch.tensor(parents),
        target[[0, 1, 1, 1]].expand(runs, -1, -1),
        draft.expand(runs, -1, -1),
        q_rows,
        torch.rand(runs, 4),
        torch.empty(runs, vocab).exponential_(),
        2,
    )
    emitted = torch.where(count[:, None] > 1, tokens.gather(1, path[:, 1:].clamp_min(0)), following[:, None])
    first = emitted[:, 0]
    second = torch.where(count > 2, emitted[:, 1], following)[count > 1]
    for tokens, probs in ((first, target[0]), (second, target[1])):
        seen, probs = tokens.bincount(minlength=vocab), probs.double() / probs.double().sum()
        assert stats.chisquare(seen, probs * seen.sum()).pvalue > 0.01
    assert (count == 3).any()
    assert (path[count > 1, 1] == 2).any(), "the second sibling was never accepted"


@runs_kernels
@pytest.mark.parametrize("seed", range(12))
def test_accept_tree(seed, ops) -> None:
    torch.manual_seed(seed)
    nodes, vocab = (1, 2, 5, 9, 17, 33, 3)[seed % 7], (3, 7, 50, 300, 4200)[seed % 5]
    for nan in (False, True):
        problem = acceptance_cases.acceptance(
            2, nodes, vocab, DEVICE, *acceptance_cases.LIKENESS[seed % 6], nan, seed
        )
        step_cases.agree(problem, ops)
        problem.args = (*problem.args[:-1], 1)  # deeper nodes are not read
        step_cases.agree(problem, ops)


@runs_kernels
@pytest.mark.parametrize("fixed", [0.5, 1.0], ids=["mixed", "all"])
@pytest.mark.parametrize("seed", range(12))
def test_deterministic_proposals(seed, fixed, ops) -> None:
    """``q_rows`` of -1: some nodes' children, or all, were proposed deterministically."""
    torch.manual_seed(seed)
    nodes, vocab = (2, 5, 9, 17, 33, 3)[seed % 6], (3, 7, 50, 300, 4200)[seed % 5]
    sharp, likeness = acceptance_cases.LIKENESS[seed % 6]
    for nan in (False, True):
        problem = acceptance_cases.acceptance(2, nodes, vocab, DEVICE, sharp, likeness, nan, seed, fixed)
        step_cases.agree(problem, ops)


@runs_kernels
@pytest.mark.parametrize("fixed", [0.0, 0.5], ids=["beside drawn", "both"])
@pytest.mark.parametrize("seed", range(12))
def test_deterministic_siblings_of_drawn_ones(seed, fixed, ops) -> None:
    torch.manual_seed(seed)
    nodes, vocab = (3, 5, 9, 17, 33, 4)[seed % 6], (3, 7, 50, 300, 4200)[seed % 5]
    sharp, likeness = acceptance_cases.LIKENESS[seed % 6]
    for nan in (False, True):
        problem = acceptance_cases.acceptance(2, nodes, vocab, DEVICE, sharp, likeness, nan, seed, fixed, 0.6)
        assert nodes < 9 or (problem.args[4] == FIXED).any()
        step_cases.agree(problem, ops)


@runs_kernels
@pytest.mark.parametrize("case", range(4))
def test_a_deterministic_sibling_is_judged_by_the_residual_of_the_drawn_ones(case, ops) -> None:
    """Uniforms just below and above its acceptance probability; a drawn sibling's token counts once."""
    p = torch.tensor([0.4, 0.1, 0.3, 0.2], device=DEVICE)
    q = torch.tensor([0.1, 0.7, 0.2, 0.0], device=DEVICE)
    # Token 1 is drawn and rejected: the residual is (3, 0, 1, 2) / 6; without token 3, (3, 0, 1, 0) / 4.
    token = (3, 3, 1, 3)[case]
    tokens = torch.tensor([[0, 1, token, 2]], device=DEVICE)
    rows = torch.tensor([[0, -1, FIXED, FIXED]], device=DEVICE)
    uniforms = torch.tensor([[0.0, 1 / 7 + 1e-3, 0.0, 0.0]], device=DEVICE)
    uniforms[0, 2] = (1 / 3 - 1e-3, 1 / 3 + 1e-3, 0.0, 1 / 3 + 1e-3)[case]
    # Of case 2, where token 1 counts once, the residual of the drawn sibling still holds for token 2.
    uniforms[0, 3] = (0.0, 1 / 4 - 1e-3, 1 / 6 - 1e-3, 1 / 4 + 1e-3)[case]
    parents = torch.tensor([[-1, 0, 0, 0]], device=DEVICE)
    exponential = torch.ones(1, 4, device=DEVICE)
    args = (tokens, parents, p.expand(1, 4, 4), q.expand(1, 1, 4), rows, uniforms, exponential, 1)
    problem = step_cases.Problem("accept_tree", args)
    step_cases.agree(problem, ops)
    path, count, following = (x.tolist() for x in problem.expected())
    assert (path, count) == (([[0, (2, 3, 3, -1)[case]]]), [(2, 2, 2, 1)[case]])
    assert case < 3 or following == [0]


@runs_kernels
@pytest.mark.parametrize("case", range(5))
def test_rejections_of_deterministic_siblings(case, ops) -> None:
    """Uniforms just below and above p_i(x), p_i being p without rejected tokens; equal tokens count once."""
    p = torch.tensor([0.1, 0.2, 0.3, 0.0, 0.4], device=DEVICE)
    tokens = torch.tensor([[0, 2, 2, 0, 1, 4]], device=DEVICE)
    parents = torch.tensor([[-1, 0, 0, 0, 0, 0]], device=DEVICE)
    accept_probs = torch.tensor([[0.0, 0.3, 0.0, 0.1 / 0.7, 0.2 / 0.6, 1.0]], device=DEVICE)
    uniforms, child = accept_probs + 1e-3, (1, 3, 4, 5, 0)[case]
    uniforms[0, child] -= 2e-3
    uniforms[0, 2] = 0.0  # below every acceptance probability
    exponential, rows = torch.ones(1, 5, device=DEVICE), torch.full_like(tokens, -1)
    q = torch.empty(1, 0, 5, device=DEVICE)
    problem = step_cases.Problem(
        "accept_tree", (tokens, parents, p.expand(1, 6, 5), q, rows, uniforms, exponential, 1)
    )
    step_cases.agree(problem, ops)
    path, count, following = (x.tolist() for x in problem.expected())
    if child:
        assert (path, count) == ([[0, child]], [2])
    else:
        # Every token of positive probability was rejected, the last by a uniform above 1: p stays.
        assert (path, count, following) == ([[0, -1]], [1], [4])


@runs_kernels
@pytest.mark.parametrize("nodes, depth", [(1025, 128), (90, 70)])
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
    p = torch.rand(1, nodes, vocab, device=DEVICE) * 1e-3
    p = p.scatter(2, best[..., None], 1.0)
    p /= p.sum(-1, keepdim=True)
    rows, uniforms = torch.full_like(tokens, -1), torch.rand(1, nodes, device=DEVICE) * 0.5
    exponential = torch.empty(1, vocab, device=DEVICE).exponential_()
    problem = step_cases.Problem(
        "accept_tree", (tokens, parents[None], p, p[:, :0], rows, uniforms, exponential, depth)
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
        step_cases.agree(step_cases.Problem("accept_tree", args), ops)


@runs_kernels
def test_an_empty_residual_keeps_the_target_probs(ops) -> None:
    """p <= q everywhere with a rejection happens by rounding only; here a uniform of 1 forces it."""
    p = torch.tensor([0.25, 0.5, 0.25], device=DEVICE).expand(1, 2, 3)
    tokens, parents = torch.tensor([[0, 1]], device=DEVICE), torch.tensor([[-1, 0]], device=DEVICE)
    ones = torch.ones(1, 3, device=DEVICE)
    args = (tokens, parents, p, p, torch.zeros_like(tokens), ones[:, :2], ones, 1)
    problem = step_cases.Problem("accept_tree", args)
    step_cases.agree(problem, ops)
    assert [x.tolist() for x in problem.expected()] == [[[0, -1]], [1], [1]]


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

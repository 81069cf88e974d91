"""The ops of the decoding cycle: references against naive definitions, kernels against references.

The kernels run in Triton's interpreter where there is no GPU, which rounds bf16 wrongly: fp16 and fp32
here, bf16 in ``scripts/checks/step_kernels_check.py``.
"""

import inspect
import subprocess
import sys
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest
import step_cases
import torch
from scipy import stats

from triforce_tree.kernels import step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF, SINGLE = torch.float16, torch.float32


@pytest.fixture(name="ops")
def kernels() -> SimpleNamespace:
    """The Triton ops by name."""
    pytest.importorskip("triton", reason="the kernels need Triton; install triton to run their tests")
    from triton import knobs

    if not torch.cuda.is_available() and not knobs.runtime.interpret:
        pytest.skip("Triton was loaded without TRITON_INTERPRET=1")
    from triforce_tree.kernels.step import (
        accept_kernels,
        grow_kernels,
        place_kernels,
        kv_slots_kernels,
        select_kernels,
    )

    modules = (kv_slots_kernels, select_kernels, accept_kernels, grow_kernels, place_kernels)
    return SimpleNamespace(
        **{name: getattr(m, name) for m in modules for name in step.__all__ if name in vars(m)}
    )


# The interpreter of Triton 3.6 makes scalars of one-element arrays, which newer NumPy warns about, as it
# does of infinities and NaN.
runs_kernels = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")


@runs_kernels
@pytest.mark.parametrize("shape", [(1, 2, 20, 1, 16), (3, 2, 40, 7, 24), (2, 3, 90, 70, 128)], ids=str)
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_append_rows(shape, dtype, ops) -> None:
    step_cases.agree(step_cases.append(*shape, dtype, DEVICE), ops)


@runs_kernels
@pytest.mark.parametrize(
    "shape", [(2, 1, 2, 20, 1, 16), (4, 3, 2, 60, 9, 24), (2, 2, 1, 300, 128, 128)], ids=str
)
def test_move_rows(shape, ops) -> None:
    step_cases.agree(step_cases.move(*shape, HALF, DEVICE), ops)


@runs_kernels
@pytest.mark.parametrize(
    ("shape", "ring"),
    [((1, 2, 20, 1, 16), 20), ((3, 2, 40, 7, 24), 33), ((2, 3, 90, 70, 128), 90), ((2, 1, 9, 9, 16), 9)],
    ids=str,
)
def test_append_to_ring(shape, ring, ops) -> None:
    step_cases.agree(step_cases.append_to_ring(*shape, HALF, DEVICE, ring=ring), ops)


@runs_kernels
@pytest.mark.parametrize(
    ("shape", "ring"),
    [((2, 1, 2, 20, 1, 16), 7), ((4, 3, 2, 60, 9, 24), 60), ((2, 2, 1, 300, 128, 128), 257)],
)
def test_move_in_ring(shape, ring, ops) -> None:
    step_cases.agree(step_cases.move_in_ring(*shape, HALF, DEVICE, ring=ring), ops)


@runs_kernels
def test_a_ring_that_cannot_work_is_refused(ops) -> None:
    cache, new = torch.zeros(1, 1, 8, 4, device=DEVICE), torch.zeros(1, 1, 5, 4, device=DEVICE)
    start, index = torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.zeros(1, 5, dtype=torch.int64)
    for own in (ops, step):
        for ring in (4, 9):
            with pytest.raises(ValueError, match=f"ring={ring} must be 5 \(the tokens of a call\) to 8"):
                own.append_kv(cache, cache, new, new, start, ring)
            with pytest.raises(ValueError, match=f"ring={ring} must be 5 \(the tokens of a call\) to 8"):
                own.move_kv(cache[None], index.to(DEVICE), start, ring)


@runs_kernels
def test_moved_rows_stay_inside(ops) -> None:
    """Sources and targets beyond the end are left alone."""
    rows = torch.randn(2, 1, 2, 10, 8, device=DEVICE)
    index, start = torch.tensor([[0, 3, -1, 1, 2]], device=DEVICE), torch.tensor([7], device=DEVICE)
    step_cases.agree(step_cases.Problem("move_kv", (rows, index, start), (0,)), ops)


@runs_kernels
@pytest.mark.parametrize(
    "shape", [(1, 2, 1, 16, 1, 16, 8), (2, 3, 2, 70, 5, 24, 6), (1, 3, 1, 300, 40, 128, 8)]
)
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_chunk_means(shape, dtype, ops) -> None:
    step_cases.agree(step_cases.means(*shape, dtype, DEVICE), ops)


@runs_kernels
@pytest.mark.parametrize(
    "shape",
    [(2, 3, 1, 70, 24, 8), (3, 2, 1, 150, 16, 33), (1, 1, 1, 64, 16, 64), (1, 2, 1, 5, 16, 1)],
    ids=str,
)
@pytest.mark.parametrize("integers", [False, True], ids=["normal", "ties"])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("held", [16384, 64], ids=["held", "walked"])
def test_select_chunks(shape, integers, group, held, ops, monkeypatch) -> None:
    from triforce_tree.kernels.step import select_kernels

    monkeypatch.setattr(select_kernels, "_HELD", held)
    batch, heads, _, *rest = shape
    problem = step_cases.selection(batch, heads, group, *rest, HALF, DEVICE, integers=integers)
    step_cases.agree(problem, ops)


@runs_kernels
@pytest.mark.parametrize("value", [0.0, -0.0, torch.inf, -torch.inf, torch.nan], ids=str)
def test_selection_from_strange_scores(value, ops) -> None:
    """All interests equal, or not numbers: the lowest chunks, as ever."""
    means = torch.zeros(1, 1, 90, 16, device=DEVICE)
    means[0, 0, 40:, 0] = value
    means[0, 0, 70, 0] = -1.0
    q, limit = torch.ones(1, 1, 16, device=DEVICE), torch.tensor([80], device=DEVICE)
    table = torch.full((1, 1, 60), -7, dtype=torch.int32, device=DEVICE)
    step_cases.agree(step_cases.Problem("select_chunks", (q, means, limit, table, 60, 1.0), (3,)), ops)


@pytest.mark.parametrize("group", [1, 4])
def test_reference_selection_ranks_as_shares(group) -> None:
    """Against softmax shares over the candidates, the largest of the query group, spelt out."""
    torch.manual_seed(0)
    q, means = torch.randn(2, 2 * group, 16), torch.randn(2, 2, 40, 16)
    limit, table = torch.tensor([40, 25]), torch.zeros(2, 2, 9, dtype=torch.int32)
    step.select_chunks(q, means, limit, table, 9, 0.25)
    for b, h in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        own = means[b, h, : limit[b]]
        shares = torch.stack([(own @ q[b, h * group + g] * 0.25).softmax(0) for g in range(group)]).amax(0)
        shares[0] = torch.inf
        assert table[b, h].tolist() == sorted(shares.topk(9).indices.tolist())


def test_greedy_acceptance_by_hand() -> None:
    """The second of three children, its child, then a token that nobody proposed; depth cuts it short."""
    tokens = torch.tensor([[9, 4, 5, 6, 7, 5, -1]])
    parents = torch.tensor([[-1, 0, 0, 0, 2, 1, 4]])
    best = torch.tensor([[5, 5, 7, 0, 3, 0, 0]])
    path, count, following = step.accept_greedy(tokens, parents, best, 3)
    assert (path.tolist(), count.tolist(), following.tolist()) == ([[0, 2, 4, -1]], [3], [3])
    path, count, following = step.accept_greedy(tokens, parents, best, 1)
    assert (path.tolist(), count.tolist(), following.tolist()) == ([[0, 2]], [2], [7])
    # A node that is not there is not what an id of -1 asks for.
    path, count, _ = step.accept_greedy(tokens, parents, best.index_fill(1, torch.tensor(4), -1), 3)
    assert (path.tolist(), count.tolist()) == ([[0, 2, 4, -1]], [3])


def below(parents: list[int], tokens: list[int], node: int) -> list[int]:
    return [i for i, above in enumerate(parents) if above == node and tokens[i] >= 0]


def accepted_by_hand(tokens, parents, p, q, q_rows, uniforms, exponential, depth) -> tuple[list[int], int]:
    """Recursive rejection as in SpecInfer and Sequoia, for one tree, in float64.

    Args: those of ``accept_tree`` without the batch. Returns: accepted nodes, and the token after them.
    """
    tokens, parents = tokens.tolist(), parents.tolist()
    path = [0]
    while True:
        node, probs = path[-1], p[path[-1]].double()
        children, gone = below(parents, tokens, node) if len(path) <= depth else [], []
        for child in children:
            token, row = tokens[child], int(q_rows[node])
            if token in gone:
                continue
            # What is left of the draft's distribution: its mass without the tokens that were refused.
            draft = torch.ones_like(probs) if row < 0 else q[row].double()
            draft[gone] = 0.0
            if row >= 0:
                draft = draft / draft.sum()
            if not draft[token] > 0:
                continue
            if float(uniforms[child]) < float(probs[token] / draft[token]):
                path.append(child)
                break
            gone.append(token)
            proposal = torch.zeros_like(probs).index_fill(0, torch.tensor(token), 1.0) if row < 0 else draft
            left = probs - torch.minimum(probs, proposal)
            probs = left / left.sum() if left.sum() > 0 else probs
        else:
            return path, int((probs / exponential).argmax())


@pytest.mark.parametrize("seed", range(12))
def test_reference_acceptance_is_recursive_rejection(seed) -> None:
    torch.manual_seed(seed)
    likeness = step_cases.LIKENESS[seed % 6]
    fixed = (0.0, 0.5, 1.0)[seed % 3]
    problem = step_cases.judgement(
        4, 3 + seed, (3, 9, 60, 9)[seed % 4], "cpu", *likeness, seed=seed, fixed=fixed
    )
    *tensors, depth = problem.args
    path, count, following = problem.expected()
    for b in range(4):
        nodes, token = accepted_by_hand(*(x[b] for x in tensors), depth)
        assert nodes == path[b, : count[b]].tolist()
        assert (path[b, count[b] :] == -1).all()
        assert token == following[b]


@pytest.mark.parametrize("seed", range(4))
def test_reference_greedy_finds_the_longest_accepted_path(seed) -> None:
    """Among all nodes: every token on the way is the target's choice at the node above it."""
    torch.manual_seed(seed)
    problem = step_cases.greedy(3, 12, 4, "cpu", seed)
    tokens, parents, best, depth = problem.args
    path, count, following = problem.expected()
    for b in range(3):
        paths: dict[int, list[int]] = {0: [0]}
        for node in range(1, 12):
            above = int(parents[b, node])
            equal = (parents[b, :node] == above) & (tokens[b, :node] == tokens[b, node])
            # Of equal siblings the first counts.
            if above in paths and 0 <= tokens[b, node] == best[b, above] and not equal.any():
                paths[node] = [*paths[above], node]
        longest = max(map(len, paths.values()))
        assert longest <= depth + 1
        assert path[b, : count[b]].tolist() in [nodes for nodes in paths.values() if len(nodes) == longest]
        assert int(following[b]) == best[b, path[b, count[b] - 1]]


def test_reference_acceptance_gives_the_targets_law() -> None:
    """Chi-square of the first two emitted tokens; the tree has two siblings, of which the first has one."""
    torch.manual_seed(1)
    runs, vocab = 6000, 4
    parents = [[-1, 0, 0, 1]] * runs
    target = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.1, 0.25, 0.25]])
    draft = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]])
    q_rows = torch.tensor([[0, 1, 1, 1]]).expand(runs, -1)
    tokens = step_cases.honest_tokens(parents, draft.expand(runs, -1, -1), q_rows, absent=0.0)
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
@pytest.mark.parametrize("seed", range(18))
def test_accept_tree(seed, ops) -> None:
    torch.manual_seed(seed)
    nodes, vocab = (1, 2, 5, 9, 17, 33, 33)[seed % 7], (3, 7, 50, 300, 4200)[seed % 5]
    for nan in (False, True):
        problem = step_cases.judgement(2, nodes, vocab, DEVICE, *step_cases.LIKENESS[seed % 6], nan, seed)
        step_cases.agree(problem, ops)
        problem.args = (*problem.args[:-1], 1)  # deeper nodes are not looked at
        step_cases.agree(problem, ops)


@runs_kernels
@pytest.mark.parametrize("fixed", [0.5, 1.0], ids=["mixed", "all"])
@pytest.mark.parametrize("seed", range(12))
def test_deterministic_proposals(seed, fixed, ops) -> None:
    """``q_rows`` of -1: some nodes' children, or all, were proposed deterministically."""
    torch.manual_seed(seed)
    nodes, vocab = (2, 5, 9, 17, 33, 33)[seed % 6], (3, 7, 50, 300, 4200)[seed % 5]
    sharp, likeness = step_cases.LIKENESS[seed % 6]
    for nan in (False, True):
        problem = step_cases.judgement(2, nodes, vocab, DEVICE, sharp, likeness, nan, seed, fixed)
        step_cases.agree(problem, ops)


@runs_kernels
@pytest.mark.parametrize("taken", range(5))
def test_deterministic_siblings_one_after_the_other(taken, ops) -> None:
    """Coins just below and above p_i(x), where p_i is p without what was refused; equal tokens count once."""
    p = torch.tensor([0.1, 0.2, 0.3, 0.0, 0.4], device=DEVICE)
    tokens = torch.tensor([[0, 2, 2, 0, 1, 4]], device=DEVICE)
    parents = torch.tensor([[-1, 0, 0, 0, 0, 0]], device=DEVICE)
    chances = torch.tensor([[0.0, 0.3, 0.0, 0.1 / 0.7, 0.2 / 0.6, 1.0]], device=DEVICE)
    coins, child = chances + 1e-3, (1, 3, 4, 5, 0)[taken]
    coins[0, child] -= 2e-3
    coins[0, 2] = 0.0  # below every chance
    exponential, rows = torch.ones(1, 5, device=DEVICE), torch.full_like(tokens, -1)
    q = torch.empty(1, 0, 5, device=DEVICE)
    problem = step_cases.Problem(
        "accept_tree", (tokens, parents, p.expand(1, 6, 5), q, rows, coins, exponential, 1)
    )
    step_cases.agree(problem, ops)
    path, count, following = (x.tolist() for x in problem.expected())
    if child:
        assert (path, count) == ([[0, child]], [2])
    else:
        # All that has any probability was refused, the last of it by a coin above 1: p stays.
        assert (path, count, following) == ([[0, -1]], [1], [4])


@runs_kernels
@pytest.mark.parametrize("nodes, depth", [(1025, 128), (90, 70)])
def test_a_large_deep_tree(nodes, depth, ops) -> None:
    """One long path below the root, which is accepted; sampling, slower, has a program for each node."""
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
    rows, coins = torch.full_like(tokens, -1), torch.rand(1, nodes, device=DEVICE) * 0.5
    exponential = torch.empty(1, vocab, device=DEVICE).exponential_()
    problem = step_cases.Problem(
        "accept_tree", (tokens, parents[None], p, p[:, :0], rows, coins, exponential, depth)
    )
    expected = problem.expected()
    assert expected[1].tolist() == [depth + 1]
    step_cases.agree(problem, ops)


@runs_kernels
def test_refused_siblings_one_after_the_other(ops) -> None:
    """All children of the root refused, down to a draft law that is left with 1e-20 of its mass."""
    q = torch.tensor([0.9, 0.1 - 1e-6, 1e-6, 1e-12, 1e-20, 0.0, 0.0])
    p = torch.tensor([0.1, 0.05, 1e-7, 1e-13, 1e-21, 0.5, 0.35])
    tree = torch.tensor([[0, 0, 1, 2, 3, 4]]), torch.tensor([[-1, 0, 0, 0, 0, 0]])
    exponential = torch.ones(1, 7)
    exponential[0, 6] = 0.1
    for refusals in range(6):
        coins = torch.full((1, 6), 0.9999)
        coins[0, 1 + refusals :] = 0.0
        tensors = (
            *tree,
            p.expand(1, 6, 7),
            q.expand(1, 1, 7),
            torch.zeros_like(tree[0]),
            coins,
            exponential,
        )
        args = *(x.to(DEVICE) for x in tensors), 1
        step_cases.agree(step_cases.Problem("accept_tree", args), ops)


@runs_kernels
def test_nothing_left_keeps_the_law(ops) -> None:
    """p <= q everywhere comes about by rounding only; a coin of 1 plays it here."""
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
    step_cases.agree(step_cases.greedy(3, (1, 2, 7, 16, 33, 64)[seed], 3 + seed, DEVICE, seed), ops)


@runs_kernels
@pytest.mark.parametrize("shape", [(1, 1, 5), (2, 3, 300), (1, 4, 4200)], ids=str)
@pytest.mark.parametrize("exponential", [True, False], ids=["exponential", "greedy"])
def test_second_choice(shape, exponential, ops) -> None:
    step_cases.agree(step_cases.runner_up(*shape, exponential, DEVICE), ops)


def test_second_choice_by_hand() -> None:
    probs, chosen = torch.tensor([[[0.2, 0.5, 0.3, 0.0]] * 3]), torch.tensor([[1, 2, -1]])
    noise = torch.tensor([1.0, 1.0, 3.0, 1e-9]).expand(1, 3, 4)
    assert step.second_choice(probs, chosen, None).tolist() == [[2, 1, 1]]
    assert step.second_choice(probs, chosen, noise).tolist() == [[0, 1, 1]]
    only = torch.tensor([[[0.0, 1.0, 0.0]]])
    assert step.second_choice(only, torch.tensor([[1]]), torch.ones(1, 1, 3)).tolist() == [[-1]]
    assert step.second_choice(only, torch.tensor([[1]]), None).tolist() == [[0]]


def test_rows_by_hand() -> None:
    caches = [torch.zeros(2, 1, 6, 2) for _ in range(2)]
    k = torch.arange(1.0, 13).view(2, 1, 3, 2)
    step.append_kv(*caches, k, -k, torch.tensor([1, 4]))
    assert caches[0][:, 0, :, 0].tolist() == [[0, 1, 3, 5, 0, 0], [0, 0, 0, 0, 7, 9]]
    assert torch.equal(caches[1], -caches[0])
    rows = torch.arange(10.0).view(1, 1, 1, 10, 1).repeat(1, 2, 1, 1, 1)
    ring = [torch.zeros(1, 1, 4, 2) for _ in range(2)]
    step.append_kv(*ring, k[:1], -k[:1], torch.tensor([10]), 4)
    assert ring[0][0, 0, :, 0].tolist() == [5, 0, 1, 3]
    around = torch.arange(5.0).view(1, 1, 1, 5, 1).clone()
    step.move_kv(around, torch.tensor([[2, 0, 1]]), torch.tensor([7]), 4)
    assert around.flatten().tolist() == [3, 0, 2, 1, 4]
    step.move_kv(rows, torch.tensor([[0, 2, -1, 5], [1, 0, -1, -1]]), torch.tensor([3, 6]))
    assert rows[0, :, 0, :, 0].tolist() == [[0, 1, 2, 3, 5, 5, 8, 7, 8, 9], [0, 1, 2, 3, 4, 5, 7, 6, 8, 9]]
    means = torch.full((1, 2, 1, 3, 1), -1.0)
    step.chunk_means(
        means, torch.arange(10.0).view(1, 1, 1, 10, 1).repeat(1, 2, 1, 1, 1), torch.tensor([0, 1]), 2, 4
    )
    assert means.flatten(1).tolist() == [[1.5, 5.5, -1, -1, 5.5, -1]]


@runs_kernels
def test_ops_trace(ops) -> None:
    """The custom ops have fakes that agree with them, so torch.compile keeps them in its graph."""
    for problem in (
        step_cases.append(1, 2, 20, 3, 16, SINGLE, DEVICE),
        step_cases.move(2, 1, 2, 20, 3, 16, SINGLE, DEVICE),
        step_cases.append_to_ring(1, 2, 20, 3, 16, SINGLE, DEVICE, ring=20),
        step_cases.move_in_ring(2, 1, 2, 20, 3, 16, SINGLE, DEVICE, ring=20),
        step_cases.means(1, 2, 1, 16, 1, 16, 8, SINGLE, DEVICE),
        step_cases.selection(1, 2, 2, 20, 16, 5, SINGLE, DEVICE),
        step_cases.judgement(2, 5, 7, DEVICE),
        step_cases.greedy(2, 5, 7, DEVICE),
        step_cases.runner_up(1, 2, 5, True, DEVICE),
    ):
        checks = ("test_schema", "test_faketensor")
        overload = getattr(step, problem.op).overload
        torch.library.opcheck(overload, problem.copied(), test_utils=checks)


def test_triton_is_imported_on_a_gpu_only() -> None:
    root = Path(__file__).parents[2]
    check = (
        "import sys; sys.modules['triton'] = None; import torch;"
        "from triforce_tree.kernels import exchange, step;"
        "x = torch.ones(1, 1, 4, 2); step.append_kv(x, x.clone(), x, x, torch.zeros(1, dtype=torch.int64));"
        "exchange.fetch_words(torch.zeros(3).int(), torch.ones(3).int())"
    )
    subprocess.run([sys.executable, "-c", check], cwd=root, check=True)


@runs_kernels
def test_kernels_have_the_signatures_of_their_operators(ops) -> None:
    assert len(step.__all__) == 10
    for name in step.__all__:
        operator = getattr(step, name)
        assert signature(operator) == signature(operator.definition) == signature(getattr(ops, name))
        assert inspect.getdoc(operator) == inspect.getdoc(operator.definition)
        arguments = [argument.name for argument in operator.overload._schema.arguments]
        assert list(signature(operator).parameters) == arguments


@pytest.mark.gpu
def test_operators_serve_each_device_by_its_own() -> None:
    """On a GPU the kernel, on the CPU the definition, of the same call."""
    problem = step_cases.greedy(3, 16, 9, "cpu")
    on_gpu = [x.cuda() if isinstance(x, torch.Tensor) else x for x in problem.args]
    for made, exact in zip(step.accept_greedy(*on_gpu), step.accept_greedy(*problem.args), strict=True):
        assert made.is_cuda
        assert torch.equal(made.cpu(), exact)

"""Tree growth: definitions against naive code and statistics, kernels against definitions."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.kernels import grow_cases, step_cases
from tests.support.kernels.triton_ops import DEVICE, runs_kernels
from triforce_tree.kernels import step
from triforce_tree.kernels.step.draws import largest

HALF, SINGLE = torch.float16, torch.float32
ROOT = Path(__file__).parents[3]


@runs_kernels
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("widths", [(1,), (8, 6, 4), (1, 1, 1, 1, 1)], ids=str)
def test_begin_tree(batch, widths, ops) -> None:
    step_cases.agree(grow_cases.beginning(batch, len(widths) + 2, widths, 40, DEVICE), ops)


@runs_kernels
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 5, 1), (2, 3, 5, 8), (2, 3, 300, 6), (3, 2, 64, 16), (1, 6, 330, 33), (1, 2, 90, 65)],
    ids=str,
)
@pytest.mark.parametrize("exponential", [True, False], ids=["exponential", "greedy"])
@pytest.mark.parametrize("ties", [True, False], ids=["ties", "normal"])
@pytest.mark.parametrize("slices, merged", [(1, 8192), (6, 8192), (32, 64)], ids=["one", "six", "few keys"])
def test_expand_nodes(shape, exponential, ties, slices, merged, ops, monkeypatch) -> None:
    from triforce_tree.kernels.step import grow_kernels

    monkeypatch.setattr(grow_kernels, "_MERGED", merged)
    monkeypatch.setattr(grow_kernels, "_SLICES", slices)
    for dtype, temperature in ((HALF, None), (SINGLE, 0.7)):
        problem = grow_cases.expansion(*shape, dtype, exponential, DEVICE, temperature, ties)
        step_cases.agree(problem, ops)


def test_a_temperature_is_not_fused_with_a_difference() -> None:
    """A fused product is not rounded, and the largest one is: their difference is 4e22 at -1e30 / 0.6."""
    script = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triforce_tree.kernels.step.grow_kernels import _sum_kernel as kernel

kinds = {name: "*fp32" if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
kinds |= {"ended_ptr": "*i32", "BLOCK": "constexpr"}
source = ASTSource(kernel, kinds, {(kernel.arg_names.index("BLOCK"),): 4096})
code = triton.compile(source, GPUTarget("cuda", 90, 32)).asm["ptx"]
assert "ex2.approx" in code and "fma.rn.f32" not in code
"""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    made = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr


@runs_kernels
@pytest.mark.parametrize("exponential", [True, False], ids=["exponential", "greedy"])
@pytest.mark.parametrize("vocab, count", [(90, 4), (90, 30), (20, 33)])
def test_slices_share_ties_and_may_be_empty(vocab, count, exponential, ops, monkeypatch) -> None:
    """Equal exponentials have an exact sum, so nothing depends on how the vocabulary is divided."""
    from triforce_tree.kernels.step import grow_kernels

    problem = grow_cases.scattered(2, 3, vocab, count, exponential, DEVICE)
    monkeypatch.setattr(grow_kernels, "_SLICES", 1)
    whole = problem.run(ops.expand_nodes, problem.copied())
    for slices in (1, 3, 7):
        monkeypatch.setattr(grow_kernels, "_SLICES", slices)
        step_cases.agree(problem, ops)
        divided = problem.run(ops.expand_nodes, problem.copied())
        assert all(torch.equal(a, b) for a, b in zip(divided, whole, strict=True))


@runs_kernels
@pytest.mark.parametrize("exponential", [True, False], ids=["exponential", "greedy"])
def test_expand_nodes_of_a_long_vocabulary(exponential, ops) -> None:
    """With the sizes that a GPU has: 17 slices, the last of a single token."""
    vocab = 16385
    step_cases.agree(grow_cases.expansion(1, 2, vocab, 3, HALF, exponential, DEVICE, 0.7), ops)
    logits = torch.arange(vocab, device=DEVICE).remainder(1000).float()[None, None]
    logits[..., -1] = 1000.0
    args = logits, torch.tensor(30.0, device=DEVICE), None, torch.full_like(logits, torch.nan), 3
    tokens, chances = ops.expand_nodes(*args)
    assert tokens.flatten().tolist() == [16384, 999, 1999]
    assert torch.equal(chances, args[3].gather(2, tokens))
    torch.testing.assert_close(args[3], (logits / 30.0).softmax(-1))


@runs_kernels
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (1, 1, 8, 8), (2, 8, 6, 6), (3, 6, 4, 4), (2, 5, 45, 33), (2, 1, 16, 9)], ids=str
)
@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "live"])
def test_place_nodes(shape, fixed, ops) -> None:
    for seed in range(3):
        for ties, last in ((False, False), (True, False), (False, True)):
            step_cases.agree(grow_cases.placement(*shape, DEVICE, fixed, ties, last, seed), ops)


@runs_kernels
@pytest.mark.parametrize(
    "shape, first, before",
    [
        ((2, 8, 6, 6), 50, 5),  # one word of ancestors, two in the mask
        ((2, 8, 6, 6), 60, 1),
        ((1, 40, 3, 30), 90, 64),
        ((1, 20, 8, 64), 200, 130),
        ((1, 1, 3, 3), 1021, 129),
        ((1, 4, 30, 100), 3, 6),  # more nodes than are picked one by one
        ((1, 200, 30, 150), 3, 63),  # more candidates than a program holds
    ],
    ids=str,
)
@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "live"])
def test_place_nodes_with_several_mask_words(shape, first, before, fixed, ops) -> None:
    for ties in (False, True):
        problem = grow_cases.placement(*shape, DEVICE, fixed, ties, first=first, before=before)
        step_cases.agree(problem, ops)


@pytest.mark.parametrize("before", [2, 64, 129])
def test_mask_words_by_hand(before) -> None:
    """A path of 200 nodes: the bits of all ancestors, in the mask after ``before`` set bits."""
    mask_words, mask = torch.zeros(1, 201, 4, dtype=torch.int64), torch.zeros(1, 6, dtype=torch.int64)
    mask_words[..., 0] = 1
    tree = torch.zeros(1, 201, dtype=torch.int64), torch.zeros(1, 201, dtype=torch.int64)
    draws = torch.zeros(1, 1, 1, dtype=torch.int64)
    for node in range(200):
        args = (*tree, mask_words, torch.ones(1, 201), draws[0], mask, draws, torch.ones(1, 1, 1), None)
        step.place_nodes(*args, node, before)
    unpacked = (mask_words[0, ..., None] >> torch.arange(64) & 1).flatten(1)
    assert torch.equal(unpacked[:, :201], torch.ones(201, 201, dtype=torch.int64).tril())
    assert not unpacked[:, 201:].any()
    assert (mask[..., None] >> torch.arange(64) & 1).flatten().tolist() == [1] * (before + 201) + [0] * (
        6 * 64 - before - 201
    )


def test_begin_tree_of_a_short_sequence() -> None:
    """2 tokens where 4 are fed again: padded on the left with the first token."""
    ids, positions, root = torch.zeros(1, 4).long(), torch.zeros(1, 5).long(), torch.zeros(1, 2).long()
    at, lengths = torch.zeros(1, 1).long(), torch.full((1,), -9, dtype=torch.int32)
    sequence, offsets = torch.tensor([[5, 6, -99, -99]]), torch.tensor([-3, -2, -1, 0, 1])
    end, ahead = torch.tensor([1]), torch.tensor([-3])
    step.begin_tree(ids, positions, root, at, lengths, sequence, end, end - 3, offsets, ahead)
    assert (ids.tolist(), positions.tolist()) == ([[5, 5, 5, 6]], [[0, 1, 2, 3, 4]])
    assert (int(root[0, 0]), at.tolist(), lengths.tolist()) == (6, [[0]], [0])


def test_draws_follow_the_probs_without_replacement() -> None:
    """Chi-square over ordered pairs: P(i, j) = p_i p_j / (1 - p_i)."""
    stats = pytest.importorskip("scipy.stats")
    torch.manual_seed(0)
    runs, exact = 20000, torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0])
    logits, probs = exact.log().expand(1, runs, 5), torch.empty(1, runs, 5)
    exponential = torch.empty_like(probs).exponential_()
    draws, chances = step.expand_nodes(logits, None, exponential, probs, 6)
    first = 0.45 + 0.55 * 0.4**3
    left = torch.tensor([1, 0.7, 0.7 * 0.8, 0, 0])
    expected = torch.cat([torch.tensor([first]), (1 - first) * left * 0.6 / torch.arange(2, 7)])
    torch.testing.assert_close(chances[0, 0], expected)
    assert (draws[..., :4].sort(-1).values == torch.arange(4)).all(), (
        "every token of positive probability, once each"
    )
    assert (draws[..., 4:] == -1).all()
    seen = (draws[0, :, 0] * 4 + draws[0, :, 1]).bincount(minlength=16).view(4, 4)
    p = exact[:4].double()
    expected = p[:, None] * p / (1 - p[:, None])
    other = ~torch.eye(4, dtype=torch.bool)
    assert (seen[~other] == 0).all()
    assert stats.chisquare(seen[other], expected[other] * runs / expected[other].sum()).pvalue > 0.01


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "live"])
def test_places_do_not_depend_on_the_draws(fixed) -> None:
    """Other draws from the same probs: the same tree except its tokens; siblings are the first draws."""
    problem = grow_cases.placement(4, 6, 5, 5, "cpu", fixed)
    args, other = problem.copied(), list(problem.copied())
    other[6] = torch.randint(-1, 40, args[6].shape)
    for one in (args, other):
        step.place_nodes.definition(*one)
        tokens, parents, draws, first = one[0], one[1], one[6], one[9]
        for b in range(4):
            for node in range(first + 6, first + 11):
                above = int(parents[b, node])
                rank = parents[b, first + 6 : node].tolist().count(above)
                assert tokens[b, node] == draws[b, above - first, rank]
    for at in (1, 2, 5):
        assert torch.equal(args[at], other[at])
    assert not torch.equal(args[0], other[0])


def test_tree_growth_by_hand() -> None:
    """Two children of the root, then the three of highest path probability below them."""
    ids, positions, root = torch.zeros(1, 3).long(), torch.zeros(1, 8).long(), torch.full((1, 6), -1)
    at, lengths = torch.zeros(2, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    sequence, offsets = torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([-2, -1, 0, 1, 1, 2, 2, 2])
    end, dropped, ahead = torch.tensor([3]), torch.tensor([1]), torch.tensor([-2, 1])
    step.begin_tree(ids, positions, root, at, lengths, sequence, end, dropped, offsets, ahead)
    assert ids.tolist() == [[6, 7, 8]]
    assert positions.tolist() == [[0, 1, 2, 3, 3, 4, 4, 4]]
    assert (int(root[0, 0]), at.flatten().tolist(), lengths.tolist()) == (8, [0, 3], [0])

    parents, mask_words, values = torch.full((1, 6), -1), torch.ones(1, 6, 1).long(), torch.ones(1, 6)
    for frontier, given, expected in (
        (slice(0, 1), [[0.1, 0.6, 0.3]], [1, 2]),
        (slice(1, 3), [[0.5, 0.4, 0.1], [0.0, 0.1, 0.9]], [0, 1, 2]),
    ):
        probs = torch.tensor([given])
        out, mask = torch.zeros(1, len(expected)).long(), torch.zeros(len(expected), 1).long()
        draws, chances = step.expand_nodes(probs.log(), None, None, torch.empty_like(probs), len(expected))
        step.place_nodes(
            root, parents, mask_words, values, out, mask, draws, chances, None, frontier.start, 2
        )
        assert out.tolist() == [expected]
    assert root.tolist() == [[8, 1, 2, 0, 1, 2]]
    assert parents.tolist() == [[-1, 0, 0, 1, 1, 2]]
    assert mask_words.squeeze(-1).tolist() == [[1, 0b11, 0b101, 0b1011, 0b10011, 0b100101]]
    assert mask.flatten().tolist() == [0b101111, 0b1001111, 0b10010111]
    torch.testing.assert_close(values[0], torch.tensor([1.0, 0.6, 0.3, 0.3, 0.24, 0.27]))


@pytest.mark.parametrize("kind", ["all different", "many equal", "two equal", "NaN", "zeros"])
@pytest.mark.parametrize("count", [1, 4, 7, 40])
def test_largest_takes_the_lower_index_among_equals(count: int, kind: str) -> None:
    numbers = torch.rand(3, 5, 40)
    if kind == "many equal":
        numbers = (numbers * 6).round() / 6
    elif kind == "two equal":
        numbers[..., 31] = numbers[..., 2] = numbers.amax(-1) - 1e-3
    elif kind == "NaN":
        numbers[0, 1, 7] = numbers[2, 2] = torch.nan
    elif kind == "zeros":
        numbers[1, 3], numbers[0, :, 3:] = 0.0, 0.0
    order = largest(numbers, count)
    for row, found in zip(numbers.flatten(0, 1).tolist(), order.flatten(0, 1).tolist(), strict=True):
        key = [(0.0 if x != x else 1.0, -x if x == x else 0.0, i) for i, x in enumerate(row)]
        assert found == sorted(range(40), key=key.__getitem__)[:count]

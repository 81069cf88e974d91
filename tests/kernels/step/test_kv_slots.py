"""KV slots, mean keys and chunk selection: definitions against naive code, kernels against definitions.

The kernels run in Triton's interpreter where there is no GPU, which rounds bf16 wrongly: fp16 and fp32
here, bf16 in ``tests/gpu/test_step_kernels.py``.
"""

import dataclasses
import math

import pytest
import torch

from tests.support.kernels import step_cases
from tests.support.kernels.triton_ops import DEVICE, runs_kernels
from triforce_tree.kernels import step
from triforce_tree.kernels.step import select
from triforce_tree.kernels.step.kv_slots import key_moments

HALF, SINGLE = torch.float16, torch.float32


@runs_kernels
@pytest.mark.parametrize(
    "shape",
    [
        (1, 2, 20, 1, 16),
        (3, 2, 40, 7, 24),
        (2, 3, 90, 70, 128),
        (2, 2, 40, 9, (24, 10)),
        (1, 2, 40, 17, (576, 512)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_append_kv(shape, dtype, ops) -> None:
    step_cases.agree(step_cases.append(*shape, dtype, DEVICE), ops)


@runs_kernels
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 2, 20, 1, 16),
        (2, 3, 2, 60, 9, 24),
        (1, 2, 1, 300, 128, 128),
        (2, 2, 2, 60, 9, (24, 10)),
        (1, 2, 1, 300, 128, (5, 96)),
        (1, 1, 2, 60, 20, (320, 512)),
    ],
    ids=str,
)
def test_move_kv(shape, ops) -> None:
    step_cases.agree(step_cases.move(*shape, HALF, DEVICE), ops)


@runs_kernels
@pytest.mark.parametrize("page", [4, 16])
def test_slots_in_pages(page, ops) -> None:
    """New tokens and paths that cross pages, some of which a sequence does not have."""
    new = step_cases.append(3, 2, 70, 23, (24, 10), SINGLE, DEVICE)
    for problem in (new, step_cases.move(2, 3, 2, 64, 20, (24, 10), HALF, DEVICE)):
        step_cases.agree(step_cases.in_pages(problem, page), ops)
    step_cases.agree(step_cases.in_pages(step_cases.append_int8(new), page), ops)


@runs_kernels
@pytest.mark.parametrize(
    ("shape", "ring"),
    [
        ((1, 2, 20, 1, 16), 20),
        ((3, 2, 40, 7, 24), 33),
        ((2, 3, 90, 70, 128), 90),
        ((2, 1, 9, 9, 16), 9),
        ((2, 1, 40, 9, (6, 20)), 33),
    ],
    ids=str,
)
def test_append_to_ring(shape, ring, ops) -> None:
    step_cases.agree(step_cases.append_to_ring(*shape, HALF, DEVICE, ring=ring), ops)


@runs_kernels
@pytest.mark.parametrize(
    ("shape", "ring"),
    [
        ((1, 1, 2, 20, 1, 16), 7),
        ((2, 3, 2, 60, 9, 24), 60),
        ((1, 2, 1, 300, 128, 128), 257),
        ((2, 3, 2, 60, 9, (24, 10)), 60),
    ],
)
def test_move_in_ring(shape, ring, ops) -> None:
    step_cases.agree(step_cases.move_in_ring(*shape, HALF, DEVICE, ring=ring), ops)


@runs_kernels
def test_a_ring_of_the_wrong_size_raises(ops) -> None:
    cache, new = torch.zeros(1, 1, 8, 4, device=DEVICE), torch.zeros(1, 1, 5, 4, device=DEVICE)
    start, index = torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.zeros(1, 5, dtype=torch.int64)
    for implementation in (ops, step):
        for ring in (4, 9):
            with pytest.raises(ValueError, match=f"ring={ring} must be 5 .* to 8 "):
                implementation.append_kv(cache, cache, new, new, start, ring)
            with pytest.raises(ValueError, match=f"ring={ring} must be 5 .* to 8 "):
                implementation.move_kv(cache[None], cache[None], index.to(DEVICE), start, ring)


@runs_kernels
def test_moves_beyond_the_cache_do_nothing(ops) -> None:
    step_cases.agree(step_cases.beyond_the_cache(DEVICE), ops)


def test_kv_slots_by_hand() -> None:
    caches = [torch.zeros(2, 1, 6, 2) for _ in range(2)]
    k = torch.arange(1.0, 13).view(2, 1, 3, 2)
    step.append_kv(*caches, k, -k, torch.tensor([1, 4]))
    assert caches[0][:, 0, :, 0].tolist() == [[0, 1, 3, 5, 0, 0], [0, 0, 0, 0, 7, 9]]
    assert torch.equal(caches[1], -caches[0])
    kv = torch.arange(10.0).view(1, 1, 1, 10, 1).repeat(1, 2, 1, 1, 1)
    ring = [torch.zeros(1, 1, 4, 2) for _ in range(2)]
    step.append_kv(*ring, k[:1], -k[:1], torch.tensor([10]), 4)
    assert ring[0][0, 0, :, 0].tolist() == [5, 0, 1, 3]
    paged, table = torch.zeros(2, 1, 6, 2), torch.tensor([[2, 0, -1], [1, 2, 0]], dtype=torch.int32)
    step.append_kv(paged, paged.clone(), k, -k, torch.tensor([1, 4]), 0, None, None, table, 2)
    assert paged[:, 0, :, 0].tolist() == [[3, 5, 0, 0, 0, 1], [7, 9, 0, 0, 0, 0]]
    around = torch.arange(5.0).view(1, 1, 1, 5, 1).clone()
    step.move_kv(around, -around, torch.tensor([[2, 0, 1]]), torch.tensor([7]), 4)
    assert around.flatten().tolist() == [3, 0, 2, 1, 4]
    other = -kv
    step.move_kv(kv, other, torch.tensor([[0, 2, -1, 5], [1, 0, -1, -1]]), torch.tensor([3, 6]))
    assert torch.equal(kv, -other)
    assert kv[0, :, 0, :, 0].tolist() == [[0, 1, 2, 3, 5, 5, 8, 7, 8, 9], [0, 1, 2, 3, 4, 5, 7, 6, 8, 9]]
    means = torch.full((1, 2, 1, 3, 1), -1.0)
    step.chunk_means(
        means, torch.arange(10.0).view(1, 1, 1, 10, 1).repeat(1, 2, 1, 1, 1), torch.tensor([0, 1]), 2, 4
    )
    assert means.flatten(1).tolist() == [[1.5, 5.5, -1, -1, 5.5, -1]]


@runs_kernels
@pytest.mark.parametrize(
    "shape",
    [(1, 2, 1, 16, 1, 16, 8), (2, 3, 2, 70, 5, 24, 6), (1, 3, 1, 300, 40, 128, 8), (1, 1, 1, 60, 5, 512, 8)],
)
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
@pytest.mark.parametrize("variances", [False, True], ids=["means", "variances too"])
def test_chunk_means(shape, dtype, variances, ops) -> None:
    step_cases.agree(step_cases.means(*shape, dtype, DEVICE, variances=variances), ops)


@runs_kernels
@pytest.mark.parametrize("shared", [False, True], ids=["own keys", "keys of all"])
def test_means_by_pages(shared, ops) -> None:
    """Chunks of the keys in any order; pages outside of them are left out, and so is what no page is for."""
    problem = step_cases.means(2, 3, 2, 70, 5, 24, 6, HALF, DEVICE)
    made, k, first, count, chunk = problem.args
    if shared:
        k = k[:, :1].expand(-1, 3, -1, -1, -1)
    inside = 70 // chunk
    wide = torch.full((*made.shape[:3], inside + 3, made.shape[4]), torch.nan, dtype=HALF, device=DEVICE)
    pages = torch.stack([torch.randperm(inside + 3) - 1 for _ in range(3)]).int().to(DEVICE)
    step_cases.agree(dataclasses.replace(problem, args=(wide, k, first, count, chunk, None, pages)), ops)
    ops.chunk_means(wide, k, first, count, chunk, None, pages)
    every = torch.full((*made.shape[:3], inside, made.shape[4]), torch.nan, dtype=HALF, device=DEVICE)
    step.chunk_means(every, k, torch.zeros_like(first), inside, chunk)
    for b, begin in enumerate(first.tolist()):
        for place, page in enumerate(pages[b].tolist()):
            found = wide[:, b, :, place]
            if begin <= place < begin + count and 0 <= page < inside:
                torch.testing.assert_close(found, every[:, b, :, page], rtol=2e-3, atol=2e-3)
            else:
                assert found.isnan().all()


@runs_kernels
def test_variances_of_keys_that_differ_little(ops) -> None:
    """Keys of 1,000 and a deviation of 1: a mean of squares less the squared mean would lose its digits."""
    made = torch.full((1, 1, 1, 3, 32), torch.nan, device=DEVICE)
    k = 1000 + torch.randn(1, 1, 1, 24, 16, device=DEVICE)
    ops.chunk_means(made, k, torch.zeros(1, dtype=torch.int64, device=DEVICE), 3, 8)
    exact = k[0, 0, 0].double().unflatten(0, (3, 8))
    mean, variance = made[0, 0, 0].double().split(16, -1)
    torch.testing.assert_close(mean, exact.mean(1), rtol=1e-5, atol=0)
    torch.testing.assert_close(variance, exact.var(1, unbiased=False), rtol=1e-3, atol=0)


@runs_kernels
@pytest.mark.parametrize(
    "shape",
    [
        (2, 3, 1, 70, 24, 8),
        (3, 2, 1, 150, 16, 33),
        (1, 1, 1, 64, 16, 64),
        (1, 2, 1, 5, 16, 1),
        (1, 1, 1, 70, 512, 9),
    ],
    ids=str,
)
@pytest.mark.parametrize("integers", [False, True], ids=["normal", "ties"])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("held", [16384, 64], ids=["in registers", "in blocks"])
def test_select_chunks(shape, integers, group, held, ops, monkeypatch) -> None:
    from triforce_tree.kernels.step import select_kernels

    monkeypatch.setattr(select_kernels, "_HELD", held)
    batch, heads, _, *rest = shape
    problem = step_cases.selection(batch, heads, group, *rest, HALF, DEVICE, integers=integers)
    step_cases.agree(problem, ops)


@runs_kernels
@pytest.mark.parametrize("group", [1, 3])
def test_select_chunks_by_variances(group, ops) -> None:
    problem = step_cases.selection(2, 3, group, 70, 24, 8, HALF, DEVICE, variances=True)
    step_cases.agree(problem, ops)
    q, means, limit, table, slots, scale = problem.args
    without = table.clone()
    step.select_chunks(q, means[..., :24].contiguous(), limit, without, slots, scale)
    step.select_chunks(*problem.args)
    assert not torch.equal(table, without), "the variances change nothing"


@runs_kernels
@pytest.mark.parametrize("value", [0.0, -0.0, torch.inf, -torch.inf, torch.nan], ids=str)
def test_selection_from_equal_or_non_finite_scores(value, ops) -> None:
    step_cases.agree(step_cases.even_scores(value, DEVICE), ops)


@pytest.mark.parametrize("group", [1, 4])
def test_reference_selection_ranks_by_softmax(group) -> None:
    """Against softmax probabilities over the candidates, maximised over the query group."""
    torch.manual_seed(0)
    q, means = torch.randn(2, 2 * group, 16), torch.randn(2, 2, 40, 16)
    limit, table = torch.tensor([40, 25]), torch.zeros(2, 2, 9, dtype=torch.int32)
    step.select_chunks(q, means, limit, table, 9, 0.25)
    for b, h in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        keys = means[b, h, : limit[b]]
        probs = torch.stack([(keys @ q[b, h * group + g] * 0.25).softmax(0) for g in range(group)]).amax(0)
        probs[0] = torch.inf
        assert table[b, h].tolist() == sorted(probs.topk(9).indices.tolist())


def test_variance_term_estimates_the_attention_of_gaussian_keys() -> None:
    """With the factor 1/2 a score is the logarithm of the mean of exp(scale q.k) over many such keys."""
    torch.manual_seed(0)
    keys = torch.randn(1, 1, 4, 20_000, 8) * torch.rand(1, 1, 4, 1, 8) + torch.randn(1, 1, 4, 1, 8)
    q, limit = torch.randn(1, 1, 8), torch.tensor([4])
    exact = (0.5 * keys @ q[0, 0]).logsumexp(-1) - math.log(20_000)
    without = select.chunk_scores(q, key_moments(keys, 3, 8), limit, 0.5)
    score = select.chunk_scores(q, key_moments(keys, 3, 16), limit, 0.5)
    term = (score - without) * 0.5 / select.VARIANCE_WEIGHT
    torch.testing.assert_close(without + term, exact, rtol=0, atol=0.02)
    assert (exact - without).amax() > 0.05


@pytest.mark.parametrize("levels", [2, 5, 10**6], ids=["two scores", "five", "all different"])
def test_selection_takes_the_lowest_of_equal_chunks(levels: int) -> None:
    """Two sequences with different limits; chunk 0 is always selected."""
    slots, limits = 6, torch.tensor([23, 9])
    for _ in range(20):
        scores = torch.randint(levels, (2, 3, 30)).float()
        q = torch.ones(2, 3, 1)
        table = torch.full((2, 3, slots + 2), -7, dtype=torch.int32)
        step.select_chunks(q, scores[..., None], limits, table, slots, 1.0)
        for b, limit in enumerate(limits.tolist()):
            for head in range(3):
                row = scores[b, head].tolist()
                rest = sorted(range(1, limit), key=lambda chunk, row=row: (-row[chunk], chunk))
                assert table[b, head].tolist() == [*sorted([0, *rest[: slots - 1]]), -7, -7]

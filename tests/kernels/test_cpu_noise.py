"""Exp(1) numbers on the CPU: their distribution, small numbers included, and their seeds."""

import pytest
import torch

from triforce_tree.kernels.cpu.fp32.library import library
from triforce_tree.kernels.cpu.fp32.noise import fill_exponential

pytestmark = pytest.mark.skipif(library() is None, reason="needs a processor with AVX2, and a C compiler")


def drawn(count: int, seed: int) -> torch.Tensor:
    out = torch.full((count,), torch.nan)
    fill_exponential(out, torch.Generator().manual_seed(seed))
    return out


def test_the_distribution() -> None:
    numbers = drawn(500_000, 0).double().sort().values
    expected = -torch.expm1(-numbers)
    ranks = (torch.arange(len(numbers)) + 0.5) / len(numbers)
    # Kolmogorov-Smirnov: above 1.95 with a chance of 0.001; the numbers are the same each time.
    assert (expected - ranks).abs().max() * len(numbers) ** 0.5 < 1.95
    assert numbers[0] > 0
    assert numbers[-1] < torch.inf
    # Draws from many tokens depend on the smallest of many numbers, which must not have few values.
    small = numbers[numbers < 1e-3]
    assert len(small.unique()) == len(small)
    assert abs(len(small) - 500) < 4 * 500**0.5
    # Neighbours are independent.
    pairs = drawn(500_000, 1).view(-1, 2)
    assert abs(float(torch.corrcoef(pairs.T)[0, 1])) < 4 / 500


def test_they_follow_from_the_seed_alone() -> None:
    one = drawn(9_001, 5)
    assert torch.equal(drawn(9_001, 5), one)
    assert not (drawn(9_001, 6) == one).any()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(drawn(9_001, 5), one)
    finally:
        torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(5)
    first, second = torch.empty(9_001), torch.empty(9_001)
    fill_exponential(first, generator)
    fill_exponential(second, generator)
    assert torch.equal(first, one)
    assert not (first == second).any()


def test_other_dtypes_take_torchs() -> None:
    out, expected = torch.empty(9, dtype=torch.float64), torch.empty(9, dtype=torch.float64)
    fill_exponential(out, torch.Generator().manual_seed(3))
    assert torch.equal(out, expected.exponential_(generator=torch.Generator().manual_seed(3)))

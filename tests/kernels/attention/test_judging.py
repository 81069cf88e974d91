"""Tests the checks of attention kernels, which tell wrong results from rounding."""

import pytest
import torch

from tests.support.kernels.kernels_cases import (
    ERROR_LIMIT,
    Case,
    build,
    enough_seeds,
    error_ratio,
    exact_attention,
)
from triforce_tree.kernels.attention.plan import Heads

HALF, SINGLE = torch.bfloat16, torch.float32


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_wrong_results_are_judged_wrong(dtype: torch.dtype, int8: bool) -> None:
    problem = build(Case(Heads(2, 1, 16), ((40, 3),), dtype, int8=int8), "cpu")
    out, lse = (t.float() for t in exact_attention(problem))
    assert error_ratio([(problem, out, lse)]) <= 1
    assert error_ratio([(problem, out * 1.05, lse)]) > ERROR_LIMIT
    assert error_ratio([(problem, out, lse + 0.01)]) > ERROR_LIMIT
    out[1, 1, 3] = torch.nan
    assert error_ratio([(problem, out, lse)]) > ERROR_LIMIT


def test_few_rows_of_single_precision_are_judged_over_more_seeds() -> None:
    assert enough_seeds(Case(Heads(5, 1, 16), ((40, 1),), HALF), 3) == [3]
    assert enough_seeds(Case(Heads(8, 1, 16), ((40, 20),), SINGLE), 3) == [3]
    seeds = enough_seeds(Case(Heads(5, 1, 16), ((40, 1),), SINGLE), 3)
    assert seeds[0] == 3
    assert len(set(seeds)) == 32

"""The order in which tokens and chunks are taken, with equal numbers, zeros and NaN."""

import pytest
import torch

from triforce_tree.kernels import step
from triforce_tree.kernels.step.draws import largest


@pytest.mark.parametrize("kind", ["all different", "many equal", "two equal", "NaN", "zeros"])
@pytest.mark.parametrize("count", [1, 4, 7, 40])
def test_the_largest_with_the_lower_index_first_among_equals(count: int, kind: str) -> None:
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


@pytest.mark.parametrize("levels", [2, 5, 10**6], ids=["two interests", "five", "all different"])
def test_chosen_chunks_are_the_lowest_of_equal_interest(levels: int) -> None:
    """Two sequences with limits of their own; chunk 0 always, whatever its interest."""
    slots, limits = 6, torch.tensor([23, 9])
    for _ in range(20):
        wanted = torch.randint(levels, (2, 3, 30)).float()
        q = torch.ones(2, 3, 1)
        table = torch.full((2, 3, slots + 2), -7, dtype=torch.int32)
        step.select_chunks(q, wanted[..., None], limits, table, slots, 1.0)
        for b, limit in enumerate(limits.tolist()):
            for head in range(3):
                row = wanted[b, head].tolist()
                rest = sorted(range(1, limit), key=lambda chunk, row=row: (-row[chunk], chunk))
                assert table[b, head].tolist() == [*sorted([0, *rest[: slots - 1]]), -7, -7]

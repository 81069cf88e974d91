"""The batched operators that statistical tests use instead of the definitions give the same results."""

import pytest
import torch

from tests.support.distributions.batched_ops import append_kv, attention, move_kv, traverse_tree
from tests.support.kernels import acceptance_cases
from triforce_tree.kernels import step
from triforce_tree.kernels.attention.plan import KV, AttentionParams, Heads, plan_trees
from triforce_tree.kernels.cpu.tree_attention import planned_attention


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "pages"])
def test_batched_attention_equals_the_planned_one(paged: bool) -> None:
    heads, batch, page = Heads(4, 2, 8), 3, 4
    masks = [torch.ones(5, 7).tril(2).bool()] * batch
    plan = plan_trees(heads, masks, [9, 0, 21], device="cpu")
    q = torch.randn(batch * 5, 4, 8)
    table = None
    k, v = torch.randn(2, batch, 2, 32, 8)
    if paged:
        k, v = torch.randn(2, 40, 2, page, 8)
        table = torch.randint(40, (batch, 2, 8), dtype=torch.int32)
    given = q, KV(k, v, table), plan, AttentionParams(0.3)
    torch.testing.assert_close(attention(*given), planned_attention(*given))


def test_batched_kv_writes_equal_the_definitions() -> None:
    start = torch.tensor([0, 3, 9])
    k, v = torch.randn(2, 3, 2, 5, 4)
    caches = [torch.randn(2, 3, 2, 16, 4)]
    caches.append(caches[0].clone())
    append_kv(*caches[0], k, v, start)
    step.append_kv(*caches[1], k, v, start)
    assert torch.equal(*caches)
    kv = [torch.randn(2, 2, 3, 2, 16, 4)]
    kv.append(kv[0].clone())
    index = torch.tensor([[0, 2, 4, -1], [0, -1, -1, -1], [0, 1, 3, 6]])
    move_kv(*kv[0], index, start)
    step.move_kv(*kv[1], index, start)
    assert torch.equal(*kv)


@pytest.mark.parametrize("seed", range(6))
def test_batched_acceptance_equals_the_definition(seed: int) -> None:
    torch.manual_seed(seed)
    rejected = 0
    for likeness in acceptance_cases.LIKENESS:
        args = acceptance_cases.traversal(
            40, (1, 2, 5, 9, 17, 33)[seed], 7, "cpu", *likeness, False, seed, fixed=(0.0, 0.5, 1.0)[seed % 3]
        ).args
        for depth in (args[-1], 1):
            expected = step.traverse_tree(*args[:-1], depth)
            assert all(
                torch.equal(*pair) for pair in zip(traverse_tree(*args[:-1], depth), expected, strict=True)
            )
            rejected += int((expected[1] <= depth).sum())
    assert rejected

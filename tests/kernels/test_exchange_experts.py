"""Experts that are copied from the host: definitions against plain sets, kernels against definitions."""

from itertools import product

import pytest
import torch
from torch import Tensor

from tests.support.kernels import triton_ops
from tests.support.kernels.triton_ops import DEVICE
from triforce_tree.kernels import exchange

EXPERTS, LAYER = 11, 3
# No tokens, one token, many tokens of few experts, and indices of experts of other ranks.
ROUTED = [[], [[4, 0]], [[1, 2]] * 1500, [[9, 11], [-1, 10], [10, 2]]]
pytestmark = triton_ops.runs_kernels


@pytest.fixture(name="ops")
def kernels():
    """The Triton implementations."""
    triton_ops.require_triton()
    from triforce_tree.kernels.exchange import experts_kernels

    return experts_kernels


def state() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Holders of each slot, the list, its length, and all that were fetched before."""
    held = torch.tensor([LAYER, -1, LAYER, 7, -1, 0, LAYER, LAYER, 1, LAYER, 2], dtype=torch.int32)
    scratch = torch.full((EXPERTS,), -7, dtype=torch.int32), torch.full((1,), -7, dtype=torch.int32)
    return held, *scratch, torch.tensor([100])


@pytest.mark.parametrize("routed", ROUTED)
def test_routed_experts_that_are_missing_are_listed(ops, routed: list[list[int]]):
    ids = torch.tensor(routed, dtype=torch.int64)
    before = state()[0]
    wanted = {expert for token in routed for expert in token}
    missing = [e for e in range(EXPERTS) if e in wanted and before[e] != LAYER]
    spread = ids.repeat_interleave(2, -1)[..., ::2]
    for choose, given in product((exchange.choose_experts, ops.choose_experts), (ids, spread)):
        held, moves, count, fetched = (t.to(DEVICE) for t in state())
        choose(given.to(DEVICE), held, moves, count, fetched, LAYER)
        assert int(count) == len(missing)
        assert int(fetched) == 100 + len(missing)
        assert moves[: len(missing)].tolist() == missing
        before_or_now = [LAYER if e in missing else int(before[e]) for e in range(EXPERTS)]
        assert held.tolist() == before_or_now


@pytest.mark.parametrize("words", [1, 1000, 5003])
def test_listed_experts_are_copied_and_no_others(ops, words: int):
    on_host = torch.randn(EXPERTS, words)
    on_host = on_host.pin_memory() if DEVICE == "cuda" else on_host
    moves = torch.tensor([0, 4, 10, 5] + [99] * (EXPERTS - 4), dtype=torch.int32)
    for count in (0, 3, 4):
        expected = torch.full_like(on_host, torch.nan)
        copied = moves[:count].tolist()
        expected[copied] = on_host[copied]
        for fetch in (exchange.fetch_experts, ops.fetch_experts):
            slots = torch.full((EXPERTS, words), torch.nan, device=DEVICE)
            number = torch.tensor([count], dtype=torch.int32, device=DEVICE)
            fetch(slots, on_host, moves.to(DEVICE), number)
            torch.testing.assert_close(slots.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(ValueError, match="one dtype and size"):
        ops.fetch_experts(slots, on_host[1:], moves, number)

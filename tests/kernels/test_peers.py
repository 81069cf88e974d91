"""Collectives over memory that ranks read from each other, beside their definitions."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from triforce_tree.kernels.attention.reference import merge_states
from triforce_tree.kernels.ranks.peers import merge_with_peers, sum_with_peers
from triforce_tree.runtime.peer_memory import CHANNELS, layout, memory_bytes

RANKS = 3


def memories(count: int = RANKS) -> list[Tensor]:
    made = [torch.zeros(memory_bytes(), dtype=torch.uint8) for _ in range(count)]
    for memory in made:
        layout(memory, torch.float32).data.fill_(torch.nan)
    return made


def counters() -> Tensor:
    return torch.zeros(CHANNELS, dtype=torch.int32)


def at_once(run: Callable[[int], list[Tensor]], ranks: int = RANKS) -> list[list[Tensor]]:
    """Returns what each rank returns; each runs in a thread of its own."""
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


@pytest.mark.parametrize("shape", [(1, 64), (3, 1000), (700,)])
def test_all_ranks_get_the_same_sums_call_after_call(shape: tuple[int, ...]) -> None:
    given = torch.randn(4, RANKS, *shape).bfloat16()
    shared = memories()

    def run(rank: int) -> list[Tensor]:
        calls = counters()
        return [sum_with_peers.definition(x[rank], shared, calls, rank) for x in given]

    for found in at_once(run):
        for x, total in zip(given, found, strict=True):
            assert torch.equal(total, x.float().sum(0).to(x.dtype))


@pytest.mark.parametrize("dim", [64, 80])
def test_attention_is_merged_over_ranks_without_keys_too(dim: int) -> None:
    outs, lses = torch.randn(2, RANKS, 5, 6, dim), torch.randn(2, RANKS, 5, 6)
    lses[0, 1], lses[1, :, 0] = -torch.inf, -torch.inf
    shared = memories()

    def run(rank: int) -> list[Tensor]:
        calls = counters()
        return [
            merge_with_peers.definition(out[rank], lse[rank], shared, calls, rank)
            for out, lse in zip(outs, lses, strict=True)
        ]

    for found in at_once(run):
        for out, lse, merged in zip(outs, lses, found, strict=True):
            torch.testing.assert_close(merged, merge_states(out, lse)[0])


class TestKernels:
    """In the interpreter a launch runs alone: the other ranks have arrived before it."""

    @pytest.fixture(autouse=True)
    def kernels(self) -> None:
        self.ops = pytest.importorskip("triforce_tree.kernels.ranks.peers_kernels")

    @pytest.mark.parametrize("call", [0, 1, 2**31 - 1])
    def test_sums(self, call: int) -> None:
        x = torch.randn(RANKS, 3, 700)
        shared, own = self.others_arrived(
            call, lambda rank, memory, calls: sum_with_peers.definition(x[rank], memory, calls, rank)
        )
        total = self.ops.sum_with_peers(x[1], shared, own, 1)
        torch.testing.assert_close(total, x.sum(0))
        self.check_told(shared, own, call, channels=-(-3 * 700 // 512))

    @pytest.mark.parametrize("dim", [64, 80])
    def test_merged_attention(self, dim: int) -> None:
        outs, lses = torch.randn(RANKS, 5, 6, dim), torch.randn(RANKS, 5, 6)
        lses[0, 2], lses[:, 3, 1] = -torch.inf, -torch.inf
        shared, own = self.others_arrived(
            4,
            lambda rank, memory, calls: merge_with_peers.definition(
                outs[rank], lses[rank], memory, calls, rank
            ),
        )
        merged = self.ops.merge_with_peers(outs[1], lses[1], shared, own, 1)
        torch.testing.assert_close(merged, merge_states(outs, lses)[0])
        self.check_told(shared, own, 4, channels=-(-30 // (512 // (64 if dim == 64 else 128))))

    def others_arrived(
        self, call: int, run: Callable[[int, list[Tensor], Tensor], Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        """Memories in which all ranks but rank 1 have written their part of this call, and its counters."""
        shared, own = memories(), counters() + call
        after = counters() + call + 1
        for memory in shared:
            layout(memory, torch.float32).arrived.copy_((counters() + call)[:, None])
        for rank in (0, 2):
            # It runs as if all others had arrived; only what it wrote itself stays.
            alone = [memory.clone() for memory in shared]
            layout(alone[rank], torch.float32).arrived.copy_(after[:, None])
            run(rank, alone, counters() + call)
            arrived = layout(shared[rank], torch.float32).arrived.clone()
            shared[rank] = alone[rank]
            layout(shared[rank], torch.float32).arrived.copy_(arrived)
            layout(shared[1], torch.float32).arrived[:, rank] = after
        return shared, own

    def check_told(self, shared: list[Tensor], own: Tensor, call: int, channels: int) -> None:
        """Rank 1 has counted the call, and told the others, in the channels that it used."""
        after = torch.tensor([call], dtype=torch.int32) + 1
        assert own[:channels].eq(after).all()
        assert own[channels:].eq(call).all()
        for rank in (0, 2):
            arrived = layout(shared[rank], torch.float32).arrived[:, 1]
            assert arrived[:channels].eq(after).all()
            assert arrived[channels:].eq(call).all()

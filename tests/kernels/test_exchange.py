"""Device slots of retrieved chunks: definitions against plain sets, kernels against definitions."""

import pytest
import torch
from torch import Tensor

from tests.support.kernels import triton_ops
from tests.support.kernels.triton_ops import DEVICE
from triforce_tree.kernels import exchange
from triforce_tree.kernels.attention.plan import Heads

BATCH, HEADS, SLOTS, CHUNKS, WANTED = 2, 3, 11, 40, 6
pytestmark = triton_ops.runs_kernels


@pytest.fixture(name="ops")
def kernels():
    """The Triton implementations."""
    triton_ops.require_triton()
    from triforce_tree.kernels.exchange import chunks_kernels as exchange_kernels

    return exchange_kernels


def state(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Held chunks, slots of chunks, clock hands."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(BATCH, HEADS, CHUNKS, generator=generator).argsort(-1).int()
    held = order[..., :SLOTS].contiguous()
    hand = torch.randint(0, SLOTS, (BATCH, HEADS), generator=generator, dtype=torch.int32)
    return held, exchange.place_of(held, CHUNKS), hand


def wanted_chunks(held: Tensor, seed: int) -> Tensor:
    """Some chunks that are held and some that are not; for two of the heads all are held, or none."""
    generator = torch.Generator().manual_seed(seed)
    wanted = torch.rand(BATCH, HEADS, CHUNKS, generator=generator).argsort(-1)[..., :WANTED].int()
    wanted[0, 0] = held[0, 0, :WANTED]
    wanted[1, 1] = torch.tensor([c for c in range(CHUNKS) if c not in held[1, 1].tolist()][:WANTED])
    return wanted.sort(-1).values.contiguous()


def scratch() -> tuple[Tensor, Tensor]:
    return torch.full((BATCH, HEADS, 2, WANTED), -7, dtype=torch.int32), torch.full(
        (BATCH, HEADS), -7, dtype=torch.int32
    )


@pytest.mark.parametrize("seed", range(4))
def test_every_wanted_chunk_gets_a_slot_and_keeps_the_one_it_has(seed: int):
    held, place, hand = state(seed)
    before = held.clone()
    wanted = wanted_chunks(held, seed + 100)
    moves, counts = scratch()
    exchange.exchange_chunks(held, place, wanted, hand, moves, counts)
    assert torch.equal(place, exchange.place_of(held, CHUNKS))
    for b in range(BATCH):
        for h in range(HEADS):
            chosen, now = set(wanted[b, h].tolist()), held[b, h].tolist()
            assert chosen <= set(now)
            assert len(set(now)) == SLOTS
            missing = chosen - set(before[b, h].tolist())
            count = int(counts[b, h])
            assert set(moves[b, h, 1, :count].tolist()) == missing
            for slot, chunk in moves[b, h, :, :count].T.tolist():
                assert now[slot] == chunk
            kept = [s for s in range(SLOTS) if s not in moves[b, h, 0, :count].tolist()]
            assert torch.equal(held[b, h, kept], before[b, h, kept])


def test_slots_are_replaced_in_clock_order():
    held = torch.arange(4, dtype=torch.int32).view(1, 1, 4)
    place, hand = exchange.place_of(held, 9), torch.tensor([[2]], dtype=torch.int32)
    moves, counts = torch.zeros(1, 1, 2, 2, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    for wanted, now, at in (([3, 7], [7, 1, 2, 3], 1), ([4, 5], [7, 4, 5, 3], 3), ([4, 7], [7, 4, 5, 3], 3)):
        # In the first round the hand skips slot 3, whose chunk is wanted; in the last it does not move.
        chosen = torch.tensor([[wanted]], dtype=torch.int32)
        if wanted == [3, 7]:
            held[0, 0, 2], place[0, 0, 2] = 2, 2
            hand[0, 0] = 3
        exchange.exchange_chunks(held, place, chosen, hand, moves, counts)
        assert (held[0, 0].tolist(), int(hand)) == (now, at)


@pytest.mark.parametrize("seed", range(4))
def test_exchange_kernel(ops, seed: int):
    kernel_state, expected_state = state(seed), state(seed)
    wanted = wanted_chunks(kernel_state[0], seed + 100)
    made, expected = scratch(), scratch()
    on_device = [t.to(DEVICE) for t in (*kernel_state, wanted, *made)]
    held, place, hand, chosen, moves, counts = on_device
    ops.exchange_chunks(held, place, chosen, hand, moves, counts)
    exchange.exchange_chunks(*expected_state[:2], wanted, expected_state[2], *expected)
    for one, other in zip((held, place, hand, counts), (*expected_state, expected[1]), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=0, atol=0)
    for b in range(BATCH):
        for h in range(HEADS):
            count = int(counts[b, h])
            assert torch.equal(moves[b, h, :, :count].cpu(), expected[0][b, h, :, :count])


@pytest.mark.parametrize("device_chunks", [0, 3, 10])
@pytest.mark.parametrize("chunk", [4, 6])
@pytest.mark.parametrize("dims", [(12, 12), (12, 5), (3, 8), (320, 512)], ids=str)
def test_fetch_chunks(ops, chunk: int, device_chunks: int, dims: tuple[int, int]):
    chunks, slots, heads = 10, 5, Heads(HEADS, HEADS, *dims)
    kv = torch.randn(chunks * chunk, heads.row, dtype=torch.float16)
    on_device, on_host = kv[: device_chunks * chunk].to(DEVICE), kv[device_chunks * chunk :].contiguous()
    if DEVICE == "cuda":
        on_host = on_host.pin_memory()
    # Chunk slots at the start of a larger buffer, as in the retrieval cache.
    sizes = [(HEADS, slots * chunk + 7, dim) for dim in dims]
    slots_kv = [torch.full(size, torch.nan, dtype=torch.float16, device=DEVICE) for size in sizes]
    moves = torch.zeros(HEADS, 2, 4, dtype=torch.int32)
    counts = torch.tensor([4, 2, 0], dtype=torch.int32)
    moves[:, 0], moves[:, 1] = torch.tensor([4, 0, 2, 1]), torch.tensor([9, 2, 3, 0])
    expected = [part.cpu().clone() for part in slots_kv]
    for head, count in enumerate(counts.tolist()):
        for slot, chunk_index in moves[head, :, :count].T.tolist():
            rows = kv[chunk_index * chunk : (chunk_index + 1) * chunk]
            for part, source in zip(expected, heads.split(rows), strict=True):
                part[head, slot * chunk : (slot + 1) * chunk] = source[:, head]
    for fetch in (exchange.fetch_chunks, ops.fetch_chunks):
        got = [part.clone() for part in slots_kv]
        fetch(got[0], got[1], on_device, on_host, moves.to(DEVICE), counts.to(DEVICE), chunk)
        for part, exact in zip(got, expected, strict=True):
            torch.testing.assert_close(part.cpu(), exact, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("count", [1, 1024, 5003])
def test_fetch_words(ops, count: int):
    source = torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32)
    for fetch in (exchange.fetch_words, ops.fetch_words):
        target = torch.zeros(count + 1, dtype=torch.int32, device=DEVICE)
        fetch(target[:-1], source.pin_memory() if DEVICE == "cuda" else source)
        assert torch.equal(target[:-1].cpu(), source)
        assert target[-1] == 0
    with pytest.raises(ValueError, match="int32 tensors of one size"):
        ops.fetch_words(target, source)

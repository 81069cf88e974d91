"""Slots of chosen chunks: definitions against plain sets, kernels (interpreted off the GPU) against them."""

import pytest
import torch
from torch import Tensor

from triforce_tree.kernels import exchange

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, HEADS, SLOTS, CHUNKS, ASKED = 2, 3, 11, 40, 6


@pytest.fixture(name="ops")
def kernels():
    """The Triton ops."""
    pytest.importorskip("triton", reason="the kernels need Triton; install triton to run their tests")
    from triton import knobs

    if not torch.cuda.is_available() and not knobs.runtime.interpret:
        pytest.skip("Triton was loaded without TRITON_INTERPRET=1")
    from triforce_tree.kernels.exchange import chunks_kernels as exchange_kernels

    return exchange_kernels


def state(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Held chunks, places, hands."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(BATCH, HEADS, CHUNKS, generator=generator).argsort(-1).int()
    held = order[..., :SLOTS].contiguous()
    hand = torch.randint(0, SLOTS, (BATCH, HEADS), generator=generator, dtype=torch.int32)
    return held, exchange.place_of(held, CHUNKS), hand


def wish(held: Tensor, seed: int) -> Tensor:
    """Some chunks that are held and some that are not; all of them, or none, for two of the heads."""
    generator = torch.Generator().manual_seed(seed)
    wanted = torch.rand(BATCH, HEADS, CHUNKS, generator=generator).argsort(-1)[..., :ASKED].int()
    wanted[0, 0] = held[0, 0, :ASKED]
    wanted[1, 1] = torch.tensor([c for c in range(CHUNKS) if c not in held[1, 1].tolist()][:ASKED])
    return wanted.sort(-1).values.contiguous()


def scratch() -> tuple[Tensor, Tensor]:
    return torch.full((BATCH, HEADS, 2, ASKED), -7, dtype=torch.int32), torch.full(
        (BATCH, HEADS), -7, dtype=torch.int32
    )


@pytest.mark.parametrize("seed", range(4))
def test_every_wanted_chunk_gets_a_slot_and_keeps_the_one_it_has(seed: int):
    held, place, hand = state(seed)
    before = held.clone()
    wanted = wish(held, seed + 100)
    moves, counts = scratch()
    exchange.exchange_chunks(held, place, wanted, hand, moves, counts)
    assert torch.equal(place, exchange.place_of(held, CHUNKS))
    for b in range(BATCH):
        for h in range(HEADS):
            asked, now = set(wanted[b, h].tolist()), held[b, h].tolist()
            assert asked <= set(now)
            assert len(set(now)) == SLOTS
            missing = asked - set(before[b, h].tolist())
            count = int(counts[b, h])
            assert set(moves[b, h, 1, :count].tolist()) == missing
            for slot, chunk in moves[b, h, :, :count].T.tolist():
                assert now[slot] == chunk
            kept = [s for s in range(SLOTS) if s not in moves[b, h, 0, :count].tolist()]
            assert torch.equal(held[b, h, kept], before[b, h, kept])


def test_slots_are_given_in_turn():
    held = torch.arange(4, dtype=torch.int32).view(1, 1, 4)
    place, hand = exchange.place_of(held, 9), torch.tensor([[2]], dtype=torch.int32)
    moves, counts = torch.zeros(1, 1, 2, 2, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    for wanted, now, at in (([3, 7], [7, 1, 2, 3], 1), ([4, 5], [7, 4, 5, 3], 3), ([4, 7], [7, 4, 5, 3], 3)):
        # The hand passes slot 3, which is wanted, in the first round, and rests in the last.
        asked = torch.tensor([[wanted]], dtype=torch.int32)
        if wanted == [3, 7]:
            held[0, 0, 2], place[0, 0, 2] = 2, 2
            hand[0, 0] = 3
        exchange.exchange_chunks(held, place, asked, hand, moves, counts)
        assert (held[0, 0].tolist(), int(hand)) == (now, at)


@pytest.mark.parametrize("seed", range(4))
def test_the_kernel_settles_as_its_definition_does(ops, seed: int):
    mine, theirs = state(seed), state(seed)
    wanted = wish(mine[0], seed + 100)
    made, expected = scratch(), scratch()
    on_device = [t.to(DEVICE) for t in (*mine, wanted, *made)]
    held, place, hand, asked, moves, counts = on_device
    ops.exchange_chunks(held, place, asked, hand, moves, counts)
    exchange.exchange_chunks(*theirs[:2], wanted, theirs[2], *expected)
    for one, other in zip((held, place, hand, counts), (*theirs, expected[1]), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=0, atol=0)
    for b in range(BATCH):
        for h in range(HEADS):
            count = int(counts[b, h])
            assert torch.equal(moves[b, h, :, :count].cpu(), expected[0][b, h, :, :count])


@pytest.mark.parametrize("near_chunks", [0, 3, 10])
@pytest.mark.parametrize("chunk", [4, 6])
def test_fetched_chunks_are_those_of_their_place(ops, chunk: int, near_chunks: int):
    chunks, slots, dim = 10, 5, 12
    rows = torch.randn(chunks * chunk, 2, HEADS, dim, dtype=torch.float16)
    near, far = rows[: near_chunks * chunk].to(DEVICE), rows[near_chunks * chunk :].contiguous()
    if DEVICE == "cuda":
        far = far.pin_memory()
    # Slots in front of a wider buffer, as level 1 has them.
    kv = torch.full((2, HEADS, slots * chunk + 7, dim), torch.nan, dtype=torch.float16, device=DEVICE)
    moves = torch.zeros(HEADS, 2, 4, dtype=torch.int32)
    counts = torch.tensor([4, 2, 0], dtype=torch.int32)
    moves[:, 0], moves[:, 1] = torch.tensor([4, 0, 2, 1]), torch.tensor([9, 2, 3, 0])
    expected = kv.cpu().clone()
    for head, count in enumerate(counts.tolist()):
        for slot, number in moves[head, :, :count].T.tolist():
            source = rows[number * chunk : (number + 1) * chunk, :, head]
            expected[:, head, slot * chunk : (slot + 1) * chunk] = source.transpose(0, 1)
    for fetch in (exchange.fetch_chunks, ops.fetch_chunks):
        got = kv.clone()
        fetch(got[0], got[1], near, far, moves.to(DEVICE), counts.to(DEVICE), chunk)
        torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("count", [1, 1024, 5003])
def test_words_arrive_as_they_are(ops, count: int):
    source = torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32)
    for fetch in (exchange.fetch_words, ops.fetch_words):
        target = torch.zeros(count + 1, dtype=torch.int32, device=DEVICE)
        fetch(target[:-1], source.pin_memory() if DEVICE == "cuda" else source)
        assert torch.equal(target[:-1].cpu(), source)
        assert target[-1] == 0
    with pytest.raises(ValueError, match="int32 tensors of one size"):
        ops.fetch_words(target, source)

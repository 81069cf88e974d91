"""The arithmetic of a slower link: when transfers end, what they queue behind, which bytes are counted."""

import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from triforce_tree.kernels.exchange import link
from triforce_tree.kernels.exchange.link import Link
from triforce_tree.kv.offload import bandwidth
from triforce_tree.kv.offload.bandwidth import bandwidths
from triforce_tree.kv.offload.copy_stream import BufferRing, CopyStream

CPU = torch.device("cpu")


class Clock:
    """A clock that only sleeping, and what a test says, moves."""

    def __init__(self) -> None:
        self.now = 5_000

    def perf_counter_ns(self) -> int:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += round(1e9 * seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(link, "time", made)
    return made


@pytest.fixture
def slow() -> Iterator[Link]:
    """4 MB/s: 250 nanoseconds a byte."""
    with link.limited(Link(CPU, 4e6)) as made:
        yield made


def transfer(size: int, clock: Clock, own: int, count: Tensor | None = None, to_host: bool = False) -> int:
    """Returns the nanoseconds of a transfer that takes ``own`` on the machine's own link."""
    start, begun = clock.now, link.begin()
    clock.now += own
    link.end(begun, size, count, to_host)
    return clock.now - start


def test_a_transfer_takes_the_time_of_the_slower_link(slow: Link, clock: Clock) -> None:
    assert transfer(1000, clock, 10_000) == 250_000
    assert transfer(1000, clock, 300_000) == 300_000, "the machine's own link is slower"
    clock.now += 1_000_000
    assert transfer(8, clock, 0) == 2000, "an idle link gathers no credit"
    assert slow.carried == (2008, 0)


def test_transfers_of_two_streams_share_a_direction(slow: Link, clock: Clock) -> None:
    start, first, second, back = clock.now, link.begin(), link.begin(), link.begin()
    link.end(first, 1000)
    assert clock.now - start == 250_000
    link.end(second, 400)
    assert clock.now - start == 350_000, "it began with the first one, and got the link after it"
    link.end(back, 1200, to_host=True)
    assert clock.now - start == 350_000, "the other direction was free since its beginning"
    assert slow.carried == (1400, 1200)


def test_parts_are_counted(slow: Link, clock: Clock) -> None:
    count = torch.tensor([[2, 0], [1, 4]], dtype=torch.int32)
    assert transfer(100, clock, 0, count) == 7 * 25_000
    assert transfer(100, clock, 0, torch.zeros(1, dtype=torch.int32)) == 0
    assert slow.carried == (700, 0)


def test_nothing_is_launched_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("begin_transfer", "end_transfer"):
        monkeypatch.setattr(link, name, None)
    begun = link.begin()
    assert begun is None
    link.end(begun, 1 << 30)
    assert link.current() is None


def test_copies_are_delayed(slow: Link) -> None:
    """With the real clock: streams, rings and the measured bandwidth."""
    source = torch.arange(20_000, dtype=torch.int64)
    target = torch.zeros_like(source)
    start = time.perf_counter_ns()
    CopyStream(CPU).copy(target, source)
    assert time.perf_counter_ns() - start >= 1e9 * source.nbytes / slow.rate
    assert torch.equal(target, source)
    ring, pieces = BufferRing(2, (5, 8), CPU, torch.float32), list(torch.ones(3, 5, 8))
    ring.start(pieces)
    for _ in pieces:
        ring.acquire()
        ring.release()
    assert slow.carried == (source.nbytes + ring.bytes, 0)


def test_plans_see_the_link(slow: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "read_bandwidth", lambda device: 7e9)
    assert bandwidths(CPU) == (4e6, 7e9)
    with link.limited(Link(CPU, 50e6, 1e12)):
        assert bandwidths(CPU) == (50e6, 1e12)
    assert link.current() is slow


def test_a_link_without_a_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="too slow for a link; give at least 1e6"):
        Link(CPU, 25.0)

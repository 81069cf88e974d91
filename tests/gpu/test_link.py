"""A slower link on a GPU: copies and kernels that read host memory take its time, in graphs too."""

import pytest
import torch

from triforce_tree.kernels import exchange
from triforce_tree.kernels.exchange import link
from triforce_tree.kernels.exchange.link import Link
from triforce_tree.kv.offload.bandwidth import copy_bandwidth
from triforce_tree.kv.offload.copy_stream import CopyStream
from triforce_tree.kv.offload.pinned import HostMemory

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def milliseconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    end.synchronize()
    return float(start.elapsed_time(end))


@pytest.mark.parametrize("rate", [5e9, 12e9])
def test_the_measured_bandwidth_is_that_of_the_link(rate: float) -> None:
    with link.limited(Link(CUDA, rate)):
        assert copy_bandwidth(CUDA) == pytest.approx(rate, rel=0.03)


def test_both_streams_share_the_link_and_directions_do_not() -> None:
    memory = HostMemory(locked=True)
    try:
        host = memory.take((4, 16 << 20), torch.uint8)
        device = torch.empty((4, 16 << 20), dtype=torch.uint8, device=CUDA)
        with link.limited(Link(CUDA, 4e9)) as slow:
            streams = [CopyStream(CUDA) for _ in range(3)]
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            streams[0].copy(device[0], host[0])
            streams[1].copy(device[1], host[1])
            streams[2].copy(host[2], device[2])
            for stream in streams:
                stream.join()
            end.record()
            assert milliseconds(start, end) == pytest.approx(2e3 * host[0].nbytes / slow.rate, rel=0.1)
            assert slow.carried == (2 * host[0].nbytes, host[0].nbytes)
    finally:
        memory.release()


def test_a_graph_holds_transfers_whose_size_the_device_decides() -> None:
    memory = HostMemory(locked=True)
    try:
        host = memory.take((8, 1 << 18), torch.int64).fill_(3)
        slots = torch.zeros_like(host, device=CUDA)
        moves, count = (torch.zeros(n, dtype=torch.int32, device=CUDA) for n in (8, 1))
        moves.copy_(torch.arange(8))
        with link.limited(Link(CUDA, 1e9)) as slow:

            def fetch() -> None:
                begun = link.begin()
                exchange.fetch_experts(slots, host, moves, count)
                link.end(begun, host[0].nbytes, count)

            fetch()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                fetch()
            for parts in (0, 1, 5):
                count.fill_(parts)
                before = slow.carried[0]
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                took = milliseconds(start, end)
                assert slow.carried[0] - before == parts * host[0].nbytes
                assert took == pytest.approx(1e3 * parts * host[0].nbytes / slow.rate, rel=0.05, abs=0.1)
    finally:
        memory.release()

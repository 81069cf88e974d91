"""Time of short calls on a GPU: captured in one CUDA graph, so that no launch from the host counts."""

from collections.abc import Callable, Sequence
from statistics import median

import torch


def graph_us(
    calls: Sequence[Callable[[], object]], repeats: int, target_ms: float, runs: tuple[int, int]
) -> float:
    """Median microseconds of one call.

    Args:
        calls: run one after the other; on tensors that together exceed L2 where it should hold none of them.
            Each is run once before the capture, which compiles what it needs.
        repeats: of all calls in the graph.
        target_ms: how long all replays together should take.
        runs: fewest and most replays.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    each = repeats * len(calls)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / each

    replay()
    first = replay()
    least, most = runs
    return median([replay() for _ in range(int(min(most, max(least, target_ms * 1e3 / (first * each)))))])

"""What Ring Attention communicates: all keys and values of a rank, passed on to the next one."""

import statistics

import torch
import torch.distributed as dist

from scripts.benchmarks.common.results import Record
from scripts.benchmarks.common.timing import timed
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.kv.parallel.backend import SplitBackend


def passed_on(program: DecodingProgram, runs: int) -> Record:
    """Milliseconds in which all ranks pass the slots of their positions on once, layer by layer.

    A token over W ranks takes W - 1 times as many (arXiv 2310.01889). The slots' own memory is sent.

    Args:
        program: whose text is split by position over all ranks.
    """
    backend = program.cache.backend
    assert isinstance(backend, SplitBackend)
    split = backend.slots
    layers = [split.part.layer(index) for index in range(program.target.layers) if split.splits(index)]
    received = [torch.empty_like(part) for part in layers[0]]
    rank, size = dist.get_rank(), dist.get_world_size()
    following, before = (rank + 1) % size, (rank - 1) % size

    def pass_on() -> None:
        for parts in layers:
            for part, room in zip(parts, received, strict=True):
                exchange = [dist.P2POp(dist.isend, part, following), dist.P2POp(dist.irecv, room, before)]
                for request in dist.batch_isend_irecv(exchange):
                    request.wait()

    seconds = [timed(program.device, pass_on)[1] for _ in range(runs + 1)][1:]
    size_of_layer = sum(part.nbytes for part in layers[0])
    return {"ms": 1e3 * statistics.median(seconds), "layers": len(layers), "layer_bytes": size_of_layer}

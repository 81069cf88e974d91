"""The least time a stage can take: the bytes it must read, over the bandwidth measured in the same run."""

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from timing import timed
from transformers import PreTrainedModel

from triforce_tree.cycle.cycle import Cycle
from triforce_tree.cycle.growth import Growth
from triforce_tree.cycle.store import KVStore


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second of a large sum, which reads everything and writes nothing."""
    size = 2**32 if device.type == "cuda" else 2**26
    data = torch.ones(size // 4, dtype=torch.float32, device=device)
    times = [timed(device, data.sum)[1] for _ in range(12 if device.type == "cuda" else 3)]
    del data
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return size / statistics.median(times[1:])


def weight_bytes(model: PreTrainedModel) -> int:
    """What one forward reads of a model: all but an input embedding that is not the head as well."""
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    read = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    if head.weight is not embedding.weight:
        read.pop(id(embedding.weight), None)
    return sum(t.numel() * t.element_size() for t in read.values())


def row_bytes(store: KVStore) -> int:
    """K and V of one token in all layers."""
    return sum(len(g.layers) * g.shape.numbers * g.kv.element_size() for g in store.groups)


def stage_bytes(cycle: Cycle, lengths: Sequence[int]) -> dict[str, int]:
    """Bytes that one run of each stage must read, by its name; texts have ``lengths`` tokens."""
    row = row_bytes(cycle.store)
    full = weight_bytes(cycle.full.model) + sum(lengths) * row
    needed = {"plain": full, "full": full}
    if isinstance(cycle.drafter, Growth):
        growth = cycle.drafter
        window = cycle.batch * (growth.config.sinks + growth.config.window) * row_bytes(growth.store)
        needed["grow"] = growth.depth * (weight_bytes(growth.model.model) + window)
    if cycle.rows is not None:
        config = cycle.rows.config
        seen = sum(min(config.budget, length) for length in lengths)
        needed["middle"] = weight_bytes(cycle.middle.model) + seen * row
        # The chunks are chosen by the means of their keys: half a row a chunk.
        needed["choose"] = needed["middle"] + sum(length // config.chunk for length in lengths) * row // 2
    return needed


def roofs_ms(cycle: Cycle, lengths: Sequence[int], bandwidth: float) -> dict[str, float]:
    """Milliseconds of each stage at the full bandwidth."""
    return {name: 1e3 * size / bandwidth for name, size in stage_bytes(cycle, lengths).items()}

"""The memory of drafters other than a draft model, in bytes: heads, hidden states, the suffix index."""

from triforce_tree.config import HierarchyConfig
from triforce_tree.drafters.base import drafter_bytes
from triforce_tree.planning.memory_map import Sizes
from triforce_tree.trees.device_shapes import pass_limits


def uses(sizes: Sizes, config: HierarchyConfig, levels: int, max_seq_len: int, batch: int) -> dict[str, int]:
    """Returns the bytes of heads, their caches, hidden states and the index of suffix matching, by use."""
    if sizes.drafter is None or levels == 1:
        return {"heads": sizes.heads_bytes} if sizes.heads_bytes else {}
    limits = pass_limits(config, levels)
    capacity = max_seq_len + limits.scratch_slots
    return drafter_bytes(sizes.drafter, batch, capacity, limits, sizes.hidden, sizes.itemsize)

"""The least time that stages of decoding can take on this device, by the bytes that they read."""

from collections.abc import Sequence

from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.drafters.tree_model import TreeDrafter
from triforce_tree.kv.store import KVStore
from triforce_tree.models.model_copy import weight_bytes


def roofs_ms(program: DecodingProgram, lengths: Sequence[int], bandwidth: float) -> dict[str, float]:
    """The least milliseconds a run of each stage can take: the bytes it must read over the bandwidth.

    Args:
        lengths: tokens of each sequence.
        bandwidth: bytes a second, measured in the same run.
    """
    slot = _slot_bytes(program.store)
    full = weight_bytes(program.full.model) + sum(lengths) * slot
    needed = dict.fromkeys(("plain", "target", "target_tree"), full)
    drafter = program.drafter
    if isinstance(drafter, TreeDrafter):
        window = program.batch * (drafter.config.sinks + drafter.config.window) * _slot_bytes(drafter.store)
        needed["draft"] = drafter.depth * (weight_bytes(drafter.model.model) + window)
    if program.retrieval is not None:
        config = program.retrieval.config
        seen = sum(min(config.budget, length) for length in lengths) * slot
        needed["retrieval"] = weight_bytes(program.retrieval_model.model) + seen
        # Chunks are chosen by the means of their keys: half a slot a chunk.
        means = sum(length // config.chunk for length in lengths) * slot // 2
        needed["retrieval_refresh"] = needed["retrieval"] + means
    return {name: 1e3 * size / bandwidth for name, size in needed.items()}


def _slot_bytes(store: KVStore) -> int:
    """K and V of one token in all layers."""
    return sum(part[:, 0, :, 0].nbytes for group in store.groups for part in group.parts)

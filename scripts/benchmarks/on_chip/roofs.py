"""Lower bounds on the time of stages of decoding, by the bytes that they read."""

from collections.abc import Sequence

from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.drafters.tree_model import TreeDrafter
from triforce_tree.kv.store import KVStore
from triforce_tree.models.model_copy import weight_bytes


def roofs_ms(program: DecodingProgram, lengths: Sequence[int], bandwidth: float) -> dict[str, float]:
    """Returns the least milliseconds of a run of each stage: the bytes that it reads over the bandwidth.

    Args:
        lengths: number of tokens of each sequence.
        bandwidth: bytes per second, measured in the same run.
    """
    slot = _slot_bytes(program.store)
    full = weight_bytes(program.full.model) + sum(lengths) * slot
    needed = dict.fromkeys(("plain", "target", "target_tree"), full)
    drafter = program.drafter
    if isinstance(drafter, TreeDrafter):
        kept = drafter.window
        window = program.batch * (kept.config.sinks + kept.config.window) * _slot_bytes(kept.store)
        needed["draft"] = len(program.shapes[0].widths) * (weight_bytes(drafter.model.model) + window)
    if program.retrieval is not None:
        config = program.retrieval.config
        seen = sum(min(config.budget, length) for length in lengths) * slot
        needed["retrieval"] = weight_bytes(program.retrieval_model.model) + seen
        # Chunks are selected by their mean keys, which have half the bytes of a slot.
        means = sum(length // config.chunk for length in lengths) * slot // 2
        needed["retrieval_refresh"] = needed["retrieval"] + means
    return {name: 1e3 * size / bandwidth for name, size in needed.items()}


def _slot_bytes(store: KVStore) -> int:
    """Returns the bytes of keys and values of one token in all layers."""
    return sum(part[:, 0, :, 0].nbytes for group in store.groups for part in group.parts)

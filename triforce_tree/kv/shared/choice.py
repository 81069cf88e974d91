"""Which prefixes of the prompts of a batch are stored once."""

import math
from collections.abc import Sequence

from triforce_tree.config import HierarchyConfig
from triforce_tree.kv.chunk_policy import BoundPolicy
from triforce_tree.kv.prefill import chunk_tokens
from triforce_tree.kv.shared.tree import PrefixTree, common_prefixes
from triforce_tree.models.hf_model import HFModel

# Of prompts that are all known: fewest tokens of a prefix, and fewest KV slots that prefixes spare all rows
# together. Attention to a prefix is a part of its own, whose results are merged: on a CPU passes of two rows
# are slower below 2,048 tokens, of eight below 400.
LEAST, LEAST_SPARED = 64, 2048


def prefixes_stored_once(
    target: HFModel, config: HierarchyConfig, prompts: Sequence[Sequence[int]], rows: int
) -> PrefixTree:
    """The common prefixes of these prompts that a batch of them stores once; none to store copies.

    Copies are stored where too little is common to spare a tenth of the slots, or to make up for the merging
    of parts. A prefix may end within a
    chunk of the prefill: what follows it is then computed in chunks from there on.

    Args:
        rows: most sequences that are decoded together.
    """
    if len(prompts) < 2 or prefix_tokens(target, config) is None:
        return PrefixTree()
    unit = config.retrieval.chunk
    least = -(-LEAST // unit) * unit
    return common_prefixes(prompts, unit, min(rows, len(prompts)), least, LEAST_SPARED)


def prefix_tokens(target: HFModel, config: HierarchyConfig) -> int | None:
    """What tokens that prompts to come share are a multiple of; None where all prompts store copies.

    These are whole chunks of a prefill, and of the retrieval, so that each prompt is computed as alone.
    Copies are stored with recurrent layers, which have a state and no slots; with layers that have a window,
    whose rings belong to one sequence; where slots are split over ranks or kept in host memory between calls
    (``prefix_cache`` in bytes); for a retrieval policy that reads the keys, which expects those of a sequence
    in one tensor; and in exact mode, as sums over several parts have other bits.
    """
    windows = any(shape.window is not None for shape in target.kv_shapes)
    if (
        target.states is not None
        or windows
        or config.exact
        or config.text_ranks > 1
        or config.prefix_bytes
        or BoundPolicy(config.retrieval).needs_context
    ):
        return None
    return math.lcm(chunk_tokens(config.prefill_chunk, target.device), config.retrieval.chunk)


def page_of(unit: int, config: HierarchyConfig, levels: int) -> int:
    """The page of tables, which all prefixes are whole multiples of.

    ``unit``: of prompts that join a batch; 0 where none do.
    """
    if levels == 3:
        return config.retrieval.chunk
    return math.gcd(unit, 64) if unit else 1

"""Which prompts of a batch have their common prefix stored once."""

import math
from collections.abc import Sequence

from triforce_tree.config import HierarchyConfig
from triforce_tree.kv.cached_tokens import common_prefix
from triforce_tree.kv.chunk_policy import BoundPolicy
from triforce_tree.kv.prefill import chunk_tokens
from triforce_tree.models.hf_model import HFModel


def prefix_stored_once(target: HFModel, config: HierarchyConfig, prompts: Sequence[Sequence[int]]) -> int:
    """Tokens of the common prefix of these prompts that a batch of them stores once; 0 to store copies.

    The prefix has whole chunks of a prefill, and of the retrieval, so that each prompt is computed as alone.
    Copies are stored where nothing of that length is common; with recurrent layers, which have a state and no
    slots; with layers that have a window, whose rings belong to one sequence; where slots are split over
    ranks or kept in host memory between calls (``prefix_cache`` in bytes); for a retrieval policy that
    reads the keys, which expects those of a sequence in one tensor; and in exact mode, as sums over two parts
    have other bits.
    """
    if len(prompts) < 2 or target.states is not None:
        return 0
    if any(shape.window is not None for shape in target.kv_shapes):
        return 0
    if (
        config.exact
        or config.context_parallel > 1
        or config.prefix_bytes
        or BoundPolicy(config.retrieval).needs_context
    ):
        return 0
    first, *others = prompts
    # The last token of a prompt is the root of the first pass.
    common = min(len(prompt) - 1 for prompt in prompts)
    for other in others:
        common = min(common, common_prefix(first[:common], other))
    unit = math.lcm(chunk_tokens(config.prefill_chunk, target.device), config.retrieval.chunk)
    return common // unit * unit

"""Parts of a decoding program: the buffers of its sequences, and level 1's own copy of the weights."""

from collections.abc import Sequence

from triforce_tree.decoding.choice.tree_acceptance import MOST_RANKS
from triforce_tree.drafters.base import Drafter, features_of
from triforce_tree.models.few_row import low_bit_copy
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.step_model import StepModel
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.device_shapes import DeviceTreeShape, PassLimits


def new_state(
    target: HFModel,
    drafter: Drafter | None,
    extent: PassLimits,
    batch: int,
    max_seq_len: int,
    levels: int,
    shapes: Sequence[DeviceTreeShape],
) -> SequenceState:
    """Buffers for ``batch`` sequences of at most ``max_seq_len`` tokens, with trees of these shapes."""
    chain, extra, vocabulary = 0, extent.depth, 0
    if levels == 3:
        chain, extra, vocabulary = extent.max_draft_tokens, extent.depth + 1, target.vocab_size
    features = features_of(drafter, target, batch, extent.max_draft_tokens + extent.depth + 2)
    # Acceptance by rank is needed to compare shapes.
    ranks = (max(len(shape.widths) for shape in shapes), MOST_RANKS) if len(shapes) > 1 else None
    return SequenceState(
        batch, max_seq_len + extent.scratch_slots, chain, max(1, extra), vocabulary, target.device, features,
        ranks,
    )  # fmt: skip


def low_bit_model(target: HFModel, bits: int, compiled: bool, features: Sequence[int]) -> StepModel:
    """The target on a copy of its weights in ``bits`` 8 or 4, for level 1."""
    bring = target.streamed.bring if target.streamed is not None else None
    clone = low_bit_copy(target.model, bits, bring)
    step = StepModel(clone, compiled, target.length_rope, features, target.learned_positions)
    step.capturable = step.capturable and target.capturable is not False
    return step

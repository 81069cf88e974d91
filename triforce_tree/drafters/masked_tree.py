"""Trees of a draft model that was trained to predict several tokens at once from mask tokens (PARD, arXiv
2504.18583).
"""

from typing import Any

import torch
from torch import Tensor

from triforce_tree.drafters.base import TokenTree
from triforce_tree.drafters.heads.growth import TreeGrowth
from triforce_tree.drafters.token_map import Forwards, TokenMap
from triforce_tree.kernels import step
from triforce_tree.kv.recurrent_states import DraftedStates
from triforce_tree.kv.store import KVStore
from triforce_tree.kv.tree_attention_view import TreeAttentionView
from triforce_tree.models.hf_model import HFModel
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.shapes import Shape
from triforce_tree.verify.probs import Sampler


def mask_token(draft: HFModel, tokens: TokenMap | None) -> int | None:
    """Returns the id of a draft model's mask token (``pard_token`` in its configuration), as the target names
    it; None for an ordinary draft model.

    Args:
        tokens: maps the target's token ids to the draft's; None if these are equal.

    Raises:
        ValueError: the draft model cannot draft with its mask token.
    """
    config: Any = draft.model.config
    mask = getattr(config, "pard_token", None)
    if getattr(config, "spd_type", "pard") == "pard2" or getattr(config, "pard2", False):
        raise ValueError(
            f"the draft {draft.name} is a PARD-2 model, which reads hidden states of its target; this is not "
            "supported, give a PARD model"
        )
    if mask is None:
        return None
    if not isinstance(mask, int) or not 0 <= mask < draft.vocab_size:
        raise ValueError(
            f"pard_token={mask!r} of the draft {draft.name} must be one of its {draft.vocab_size} tokens; "
            "download its config.json again"
        )
    if draft.states is not None:
        raise ValueError(f"the draft {draft.name} has a pard_token and recurrent layers; not supported")
    if tokens is None:
        return mask
    ids = (tokens.inputs == mask).nonzero()
    if not len(ids):
        raise ValueError(
            f"pard_token={mask} of the draft {draft.name} stands for no token of the target; give a draft of "
            "the target's tokenizer"
        )
    return int(ids[0])


class MaskedTree:
    """Grows trees of one shape in a single forward of the draft model.

    The newest tokens are followed by mask tokens. The output at the root and at each mask token predicts the
    tokens of one depth, whatever the tokens in between are, so that all nodes of a depth have one
    distribution.

    Args:
        shape: the shape.
        refeed: number of newest tokens of the sequence that the forward processes; the root is the last.
        mask: id of the mask token.

    Attributes:
        depth: depth of the deepest node.
        nodes: number of nodes, including the root.
    """

    def __init__(self, shape: str | Shape, refeed: int, mask: int) -> None:
        self._growth, self._refeed, self._mask = TreeGrowth(shape), refeed, mask
        self.depth, self.nodes = self._growth.depth, self._growth.nodes

    def bind(self, store: KVStore, states: DraftedStates | None) -> None:
        """Allocates buffers and a view of the KV slots of the draft; see ``GrownTree.bind``. There are no
        ``states``.
        """
        refeed, batch, device = self._refeed, store.batch, store.device
        self._growth.bind(batch, device)
        width = refeed + self.depth - 1
        self._newest = torch.zeros(batch, refeed, dtype=torch.int64, device=device)
        self._ids = torch.full((batch, width), self._mask, device=device)
        self._positions = torch.zeros_like(self._ids)
        self._offsets = torch.arange(1 - refeed, self.depth, device=device)
        self._first_slots = torch.zeros(1, batch, dtype=torch.int64, device=device)
        self._first_offset = torch.tensor([1 - refeed], device=device)
        self._lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self._view = TreeAttentionView(store, width, mask=torch.ones(width, width, dtype=torch.bool).tril())
        self._view.follow(self._first_slots[0], self._lengths)

    def grow(
        self,
        model: Forwards,
        dropped: Tensor,
        state: SequenceState,
        tree: TokenTree,
        sampler: Sampler,
    ) -> None:
        """Writes a tree for each sequence; see ``GrownTree.grow``."""
        step.begin_tree(
            self._newest, self._positions, tree.tokens, self._first_slots, self._lengths,
            state.tokens, state.end, dropped, self._offsets, self._first_offset,
        )  # fmt: skip
        self._ids[:, : self._refeed] = self._newest
        logits = model(self._ids, self._positions, self._view, self.depth)
        for depth, nodes in enumerate(self._growth.frontiers):
            shared = logits[:, depth : depth + 1].expand(-1, nodes.stop - nodes.start, -1)
            self._growth.place(depth, shared, state, tree, sampler)

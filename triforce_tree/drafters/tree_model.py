"""A drafter that grows trees with a draft model, one forward per depth for all sequences together."""

from collections.abc import Sequence

import torch
from torch import Tensor

from triforce_tree.config import HierarchyConfig
from triforce_tree.drafters.base import Drafter, TokenTree
from triforce_tree.drafters.draft_window import ContinuedWindow, DraftWindow, RecomputedWindow
from triforce_tree.drafters.heads.growth import TreeGrowth
from triforce_tree.drafters.mask_token import mask_token
from triforce_tree.drafters.token_map import Forwards, MappedModel, TokenMap
from triforce_tree.kernels import step
from triforce_tree.kernels.attention.plan import unpack_mask
from triforce_tree.kv.marks import MOST_COPIES
from triforce_tree.kv.recurrent_states import DraftedStates
from triforce_tree.kv.store import KVStore
from triforce_tree.kv.tree_attention_view import TreeAttentionView
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.running_forward import RecurrentPass
from triforce_tree.models.step_model import step_model
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.device_shapes import PassLimits, tree_shapes
from triforce_tree.trees.shapes import Shape
from triforce_tree.verify.probs import Sampler

# A draft with learned position embeddings must have at least this many positions after its window.
_BEYOND_WINDOW = 128


class TreeDrafter(Drafter):
    """Grows trees with a draft model that attends to a window of each sequence.

    The KV cache of the draft holds the first ``sinks`` tokens and the newest ones (``draft_window``). The
    first forward of each tree processes the newest tokens again, so accepted tokens, bonus tokens and
    rollbacks need no forwards of their own.

    Args:
        draft: the draft model.
        config: shapes of the trees, sinks and window. Chains of suffix-matched tokens in ``config.shapes``
            are ignored here; ``WithLookup`` adds them.
        tokens: maps the target's token ids to the draft's; None if these are equal.
    """

    name = "draft"
    deterministic = False

    def __init__(self, draft: HFModel, config: HierarchyConfig, tokens: TokenMap | None = None) -> None:
        self.draft, self._config, self._tokens = draft, config, tokens
        laid_out = [shape for shape in tree_shapes(config) if not shape.matched]
        self.shapes = config.shapes[: len(laid_out)]
        self.tree = self.shapes[0]
        model = step_model(draft, compiled=draft.device.type == "cuda", drafts=True)
        self.model: Forwards = model if tokens is None else MappedModel(model, tokens)
        self.capturable = self.model.capturable
        deepest = max(shape.depth for shape in laid_out)
        # A tree starts at most ``gamma`` tokens, the provisional chain, after the committed tokens.
        beyond = max(_BEYOND_WINDOW, config.gamma + deepest)
        streaming = config.streaming
        needed = streaming.sinks + 2 * streaming.window + beyond
        limit = draft.learned_positions
        if limit is not None and needed > limit:
            window = max(1, (limit - streaming.sinks - beyond) // 2)
            raise ValueError(
                f"{draft.name} has {limit} learned positions, and its window needs {needed}; set "
                f"window<={window}, or choose another draft"
            )
        # One verification by the retrieval model adds at most depth + 1 tokens, and one by the target 1 more.
        self.refeed_tokens = deepest + 2
        mask = mask_token(draft, tokens)
        self.grown = [GrownTree(shape, self.refeed_tokens, mask) for shape in self.shapes]
        self.nodes = max(grown.nodes for grown in self.grown)

    def buffer_bytes(self, batch: int, capacity: int, limits: PassLimits) -> dict[str, int]:
        if (shapes := self.draft.states) is None:
            return {}
        size, streaming = self.draft.dtype.itemsize, self._config.streaming
        slots = (streaming.sinks + 2 * streaming.window) * sum(s.elements for s in self.draft.kv_shapes)
        branching = sum(shape.nodes for shape in tree_shapes(self._config) if max(shape.widths) > 1)
        kept = (self.refeed_tokens + limits.chain + branching) * shapes.token_bytes(size)
        copies = MOST_COPIES * (shapes.bytes(size) + slots * size)
        return {"draft's recurrent states": batch * (2 * shapes.bytes(size) + kept + copies)}

    def bind(self, state: SequenceState) -> None:
        scratch = state.max_draft_tokens + 2 * self.refeed_tokens + self.nodes
        size = self.refeed_tokens, scratch, state
        self.window: DraftWindow
        if self.draft.states is None:
            self.window = RecomputedWindow(self.draft, self.model, self._config.streaming, *size)
        else:
            self.window = ContinuedWindow(self.draft, self._tokens, self._config, *size)
        for grown in self.grown:
            grown.bind(self.window.store, self.window.drafted)

    def take_over(self, earlier: Drafter) -> None:
        if isinstance(earlier, TreeDrafter) and earlier.draft is self.draft:
            self.window.take_over(earlier.window)

    def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        self.window.begin_tree(state)
        self.grown[tree.shape].grow(self.model, self.window.dropped, state, tree, sampler)

    def start(self, sequences: Sequence[Sequence[int]]) -> None:
        self.window.choose_rope(sequences)
        for b, sequence in enumerate(sequences):
            self.window.start(b, sequence)

    def start_one(self, b: int, sequences: Sequence[Sequence[int]]) -> None:
        self.window.start(b, sequences[b])

    def prepare(self, sequences: Sequence[Sequence[int] | None], resumed: bool) -> None:
        """Processes tokens that plain decoding committed, and makes room in windows that have no slots
        left.
        """
        self.window.extend(sequences, resumed)


class GrownTree:
    """Grows trees of one shape with a draft model.

    Without a mask token there is one forward per depth. With one, a single forward reads the newest tokens
    and mask tokens after them: the output at the root and at each mask token predicts the tokens of one
    depth, whatever the tokens in between are, so that all nodes of a depth have one distribution.

    Args:
        shape: the shape.
        refeed: number of newest tokens of the sequence that the first forward processes; the root is the
            last of them.
        mask: id of the mask token.

    Attributes:
        nodes: number of nodes that the draft model grows, including the root.
    """

    def __init__(self, shape: str | Shape, refeed: int, mask: int | None) -> None:
        self._growth, self._refeed, self._mask = TreeGrowth(shape), refeed, mask
        self.nodes = self._growth.nodes

    def bind(self, store: KVStore, states: DraftedStates | None) -> None:
        """Allocates buffers and views.

        Args:
            store: the KV slots of the draft. All shapes share it; forwards overwrite the slots after the
                window.
            states: of recurrent layers; then the positions of tokens are those in the sequence.
        """
        growth, refeed, batch, device = self._growth, self._refeed, store.batch, store.device
        widths, masks = growth.shape.widths, 0 if self._mask is None else growth.depth - 1
        growth.bind(batch, device)
        self._states, self._branches = states, None
        if states is not None and max(widths) > 1:
            self._branches = states.tree(self.nodes, growth.depth)
        # The depth of each column of a forward's inputs: the newest tokens, then masks or the tree's nodes.
        below = growth.shape.depths[1:] if self._mask is None else range(1, masks + 1)
        columns = [*range(1 - refeed, 1), *below]
        # The nodes that each forward after the first processes.
        later = growth.frontiers[1:] if self._mask is None else []

        def buffer(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*size, dtype=dtype, device=device)

        self._newest, self._positions = buffer(batch, refeed), buffer(batch, len(columns))
        self._masked = torch.full((batch, refeed + masks), self._mask or 0, device=device)
        self._offsets = torch.tensor(columns, device=device)
        # The first KV slot that each forward writes, and its distance from the root's.
        self._first_slots = buffer(1 + len(later), batch)
        self._first_offsets = torch.tensor([1 - refeed, *(nodes.start for nodes in later)], device=device)
        self._lengths = buffer(batch, dtype=torch.int32)
        causal = torch.ones(refeed + masks, refeed + masks, dtype=torch.bool, device="cpu").tril()
        self._views = [TreeAttentionView(store, refeed + masks, mask=causal)]
        for nodes in later:
            tail_depths = [refeed - 1 + depth for depth in columns[: refeed - 1 + nodes.stop]]
            width, tail = nodes.stop - nodes.start, len(tail_depths)
            self._views.append(TreeAttentionView(store, width, tail=tail, depths=tail_depths))
        for view, first_slot in zip(self._views, self._first_slots, strict=True):
            view.follow(first_slot, self._lengths)

    def grow(
        self,
        model: Forwards,
        dropped: Tensor,
        state: SequenceState,
        tree: TokenTree,
        sampler: Sampler,
    ) -> None:
        """Writes a tree for each sequence.

        Args:
            dropped: int64 ``[B]``, the number of tokens of each sequence that the draft's KV cache has
                dropped.
        """
        growth, before = self._growth, self._refeed - 1
        step.begin_tree(
            self._newest, self._positions, tree.tokens, self._first_slots, self._lengths,
            state.tokens, state.end, dropped, self._offsets, self._first_offsets,
        )  # fmt: skip
        if self._mask is not None:
            self._masked[:, : self._refeed] = self._newest
            logits = model(self._masked, self._positions, self._views[0], growth.depth)
            growth.place_all(logits, state, tree, sampler)
            return
        if self._states is not None:
            self._positions += dropped.clamp_min(0)[:, None]
        for d, nodes in enumerate(growth.frontiers):
            columns = slice(before + nodes.start if d else 0, before + nodes.stop)
            width, states = nodes.stop - nodes.start, self._pass(tree, nodes)
            tokens = growth.ids[d - 1] if d else self._newest
            logits = model(tokens, self._positions[:, columns], self._views[d], width, states)
            mask = self._views[d + 1].mask if d + 1 < growth.depth else None
            growth.place(d, logits, state, tree, sampler, mask, before)

    def _pass(self, tree: TokenTree, nodes: slice) -> RecurrentPass | None:
        """Returns the states of recurrent layers for a forward of ``nodes``; None if there are none."""
        if self._states is None:
            return None
        if not nodes.start:
            return self._states
        if self._branches is None:
            return self._states.drafted
        # The root is in the states that the tree begins from.
        ancestors = unpack_mask(tree.mask_words[:, nodes])[:, :, 1 : nodes.stop]
        self._branches.begin(nodes.start - 1, ancestors)
        return self._branches

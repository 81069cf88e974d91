"""A drafter that grows trees with a draft model, one forward per depth for all sequences together."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from triforce_tree.config import HierarchyConfig
from triforce_tree.drafters.base import Drafter, TokenTree
from triforce_tree.drafters.token_map import Forwards, MappedModel, TokenMap
from triforce_tree.kernels import step
from triforce_tree.kernels.attention.plan import AttentionParams
from triforce_tree.kv.prefill import windowed_attention
from triforce_tree.kv.store import KVStore
from triforce_tree.kv.tree_attention_view import TreeAttentionView
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.step_model import MOST_ROWS, step_model
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.device_shapes import DeviceTreeShape, tree_shapes
from triforce_tree.trees.shapes import with_chain
from triforce_tree.verify.probs import Sampler

# A draft with learned position embeddings must have at least this many positions after its window.
_BEYOND_WINDOW = 128


class TreeDrafter(Drafter):
    """Grows trees with a draft model that attends to a window of each sequence.

    The KV cache of the draft holds the first ``sinks`` tokens and the newest ones, at positions counted
    within the cache (StreamingLLM). When the window is full, the keys and values of its newer half are
    recomputed, which Xiao et al. (arXiv 2309.17453, table 1) found to be the best of the windowed caches. No
    cached key is rotated again. The first forward of each tree processes the newest tokens again, so accepted
    tokens, bonus tokens and rollbacks need no forwards of their own.

    Args:
        draft: the draft model.
        config: shapes of the trees, sinks and window. Chains of suffix-matched tokens in ``config.shapes``
            are ignored here; ``WithLookup`` and ``Merged`` add them.
        tokens: maps the target's token ids to the draft's; None if these are equal.
    """

    name = "draft"
    deterministic = False

    def __init__(self, draft: HFModel, config: HierarchyConfig, tokens: TokenMap | None = None) -> None:
        self.draft, self.config = draft, config.streaming
        laid_out = [shape for shape in tree_shapes(config) if not shape.matched]
        self.shapes = tuple(with_chain(shape, 0) for shape in config.shapes[: len(laid_out)])
        self.tree = self.shapes[0]
        model = step_model(draft, compiled=draft.device.type == "cuda")
        self.model: Forwards = model if tokens is None else MappedModel(model, tokens)
        self.capturable = self.model.capturable
        deepest = max(shape.depth for shape in laid_out)
        # A tree starts at most ``gamma`` tokens, the provisional chain, after the committed tokens.
        beyond = max(_BEYOND_WINDOW, config.gamma + deepest)
        needed = self.config.sinks + 2 * self.config.window + beyond
        limit = draft.learned_positions
        if limit is not None and needed > limit:
            window = max(1, (limit - self.config.sinks - beyond) // 2)
            raise ValueError(
                f"{draft.name} has {limit} learned positions, and its window needs {needed}; set "
                f"window<={window}, or choose another draft"
            )
        self.depth = len(laid_out[0].widths)
        # One verification by the retrieval model adds at most depth + 1 tokens, and one by the target 1 more.
        self.refeed_tokens = deepest + 2
        self.grown = [GrownTree(shape, self.refeed_tokens) for shape in laid_out]
        self.nodes = max(grown.nodes for grown in self.grown)

    def bind(self, state: SequenceState) -> None:
        batch, device = state.batch, self.model.device
        self._scratch_slots = state.max_draft_tokens + 2 * self.refeed_tokens + self.nodes
        capacity = self.config.sinks + 2 * self.config.window + self._scratch_slots
        self.store = KVStore(self.draft.kv_layers, batch, capacity, device, self.draft.dtype)
        # The number of tokens between sinks and window that the cache of each sequence has dropped. It is
        # negative for a sequence shorter than ``refeed_tokens``, which counts as padded on the left. The host
        # has a copy.
        self.dropped = torch.zeros(batch, dtype=torch.int64, device=device)
        self._dropped_on_host = [0] * batch
        # The number of first tokens of each sequence that the cache holds or has dropped.
        self._fed = [0] * batch
        # Forwards of up to MOST_ROWS tokens compile the layers for that number, which takes seconds. Feeding
        # more tokens at once avoids this while decoding.
        self._least_fed = MOST_ROWS + 1 if device.type == "cuda" else 1
        for grown in self.grown:
            grown.bind(self.store)

    def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        self.grown[tree.shape].grow(self.model, self.dropped, state, tree, sampler)

    def start(self, sequences: Sequence[Sequence[int]]) -> None:
        if (rope := self.draft.length_rope) is not None:
            rope.choose_for_window(self.store.slots)
        for b, sequence in enumerate(sequences):
            self._recompute_window(b, sequence)

    def start_one(self, b: int, sequences: Sequence[Sequence[int]]) -> None:
        self._recompute_window(b, sequences[b])

    def prepare(self, sequences: Sequence[Sequence[int] | None], resumed: bool) -> None:
        """Processes tokens that plain decoding committed, and recomputes windows that have no slots left."""
        for b, sequence in enumerate(sequences):
            if sequence is None:
                continue
            needed = len(sequence) - self._dropped_on_host[b] + self._scratch_slots
            final, fed = len(sequence) - self.refeed_tokens, self._fed[b]
            # Only the first forward of a tree writes slots of padding on the left, so a padded sequence that
            # has grown is recomputed.
            if needed > self.store.slots or (resumed and self._dropped_on_host[b] < 0):
                self._recompute_window(b, sequence)
            elif resumed and final > fed:
                dropped = self._dropped_on_host[b]
                oldest = dropped + self.config.sinks if dropped else 0
                fed = max(oldest, min(fed, final - self._least_fed))
                self._prefill(b, list(sequence[fed:final]), fed - dropped)
            # The first forward of the next tree processes the newest tokens.
            self._fed[b] = len(sequence)

    def _recompute_window(self, b: int, sequence: Sequence[int]) -> None:
        # Every tree processes the newest ``refeed_tokens`` again. A sequence shorter than this counts as
        # padded on the left with copies of its first token.
        final = len(sequence) - self.refeed_tokens
        sinks, window = self.config.sinks, self.config.window
        newest = min(window, max(0, final - sinks))
        held = [*sequence[: max(0, min(sinks, final))], *sequence[max(0, final - newest) : max(0, final)]]
        self.dropped[b] = self._dropped_on_host[b] = final - len(held)
        self._fed[b] = max(0, final)
        if held:
            self._prefill(b, held)

    def _prefill(self, b: int, tokens: list[int], first: int = 0) -> None:
        """Writes the keys and values of ``tokens`` into the KV slots of sequence b from ``first`` on."""
        ids, end = torch.tensor([tokens], device=self.model.device), first + len(tokens)
        positions = torch.arange(first, end, device=ids.device)[None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, how: AttentionParams) -> Tensor:
            how = self.store.layers[layer].checked(how)
            k, v = self.store.append(layer, b, first, k, v)
            out = windowed_attention(q, k, v, how, end - q.shape[2])
            return out.transpose(1, 2).contiguous()

        self.model(ids, positions, attend, last=1)


class GrownTree:
    """Grows trees of one shape, one forward of the draft model per depth.

    Args:
        shape: the number of nodes at each depth, and their parents if they are fixed.
        refeed: number of newest tokens of the sequence that the first forward processes; the root is the
            last of them.

    Attributes:
        depth: number of forwards per tree.
        nodes: number of nodes that the draft model grows, including the root.
    """

    def __init__(self, shape: DeviceTreeShape, refeed: int) -> None:
        self.shape, self._refeed = shape, refeed
        self.depth, self.nodes = len(shape.widths), shape.tree_nodes

    def bind(self, store: KVStore) -> None:
        """Allocates buffers and views.

        Args:
            store: the KV slots of the draft. All shapes share it; forwards overwrite the slots after the
                window.
        """
        shape, refeed, batch, device = self.shape, self._refeed, store.batch, store.device
        starts = [0, *accumulate(shape.widths, initial=1)]
        self._frontiers = [slice(a, b) for a, b in pairwise(starts[:-1])]  # the nodes that get children

        def buffer(*size: int, fill: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full(size, fill, dtype=dtype, device=device)

        self._path_probs = buffer(batch, self.nodes, fill=1, dtype=torch.float32)
        self._pairs = [
            None if shape.places is None else torch.tensor(shape.places[d], device=device).T.contiguous()
            for d in range(self.depth)
        ]
        # Inputs of the forwards: the newest tokens of the sequence, then the nodes of each depth.
        self._ids = [buffer(batch, width) for width in (refeed, *shape.widths)]
        self._positions = buffer(batch, refeed - 1 + self.nodes)
        depths = [0] + [d + 1 for d, width in enumerate(shape.widths) for _ in range(width)]
        self._offsets = torch.tensor([*range(1 - refeed, 0), *depths], device=device)
        # The first KV slot that each forward writes, and its distance from the root's.
        self._first_slots = buffer(self.depth, batch)
        self._first_offsets = torch.tensor([1 - refeed, *starts[1 : self.depth]], device=device)
        self._lengths = buffer(batch, dtype=torch.int32)
        causal = torch.ones(refeed, refeed, dtype=torch.bool).tril()
        self._views = [TreeAttentionView(store, refeed, mask=causal)]
        for width, nodes in zip(shape.widths, self._frontiers[1:], strict=False):
            tail_depths = [*range(refeed - 1), *(refeed - 1 + d for d in depths[: nodes.stop])]
            self._views.append(TreeAttentionView(store, width, tail=len(tail_depths), depths=tail_depths))
        for view, first_slot in zip(self._views, self._first_slots, strict=True):
            view.follow(first_slot, self._lengths)

    def grow(
        self, model: Forwards, dropped: Tensor, state: SequenceState, tree: TokenTree, sampler: Sampler
    ) -> None:
        """Writes a tree for each sequence.

        Args:
            dropped: int64 ``[B]``, the number of tokens of each sequence that the draft's KV cache has
                dropped.
        """
        end, before = state.end, self._refeed - 1
        step.begin_tree(
            self._ids[0], self._positions, tree.tokens, self._first_slots, self._lengths,
            state.tokens, end, dropped, self._offsets, self._first_offsets,
        )  # fmt: skip
        for d, nodes in enumerate(self._frontiers):
            columns = slice(before + nodes.start if d else 0, before + nodes.stop)
            logits = model(
                self._ids[d], self._positions[:, columns], self._views[d], last=nodes.stop - nodes.start
            )
            probs = tree.probs[:, nodes]
            paths = partial(tree.paths, state, end, nodes)
            draws, by_rank = sampler.children(logits, probs, self.shape.siblings(d), nodes, paths)
            mask = self._views[d + 1].mask if d + 1 < self.depth else None
            step.place_nodes(
                tree.tokens, tree.parents, tree.mask_words, self._path_probs, self._ids[d + 1], mask,
                draws, by_rank, probs, self._pairs[d], nodes.start, before,
            )  # fmt: skip

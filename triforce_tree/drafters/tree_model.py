"""The draft model as a drafter: it grows the token trees of all sequences together, one forward per depth."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from triforce_tree.config import HierarchyConfig
from triforce_tree.drafters.base import TokenTree
from triforce_tree.drafters.token_map import Forwards, MappedModel, TokenMap
from triforce_tree.kernels import step
from triforce_tree.kv.prefill import windowed_attention
from triforce_tree.kv.store import KVStore
from triforce_tree.kv.tree_attention_view import TreeAttentionView
from triforce_tree.models.attention import AttentionParams
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.step_model import step_model
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.device_shapes import device_tree_shape
from triforce_tree.trees.shapes import Shape, parse_shape, with_chain
from triforce_tree.verify.probs import Sampler

# Positions after its window that a draft with learned positions must have at least; deep trees take more.
_BEYOND_WINDOW = 128


class TreeDrafter:
    """A draft model that sees a window of each sequence, and the trees it grows.

    Its KV cache holds the ``sinks`` first tokens and the newest ones, at positions counted within the window
    (StreamingLLM). When a window is full, the keys and values of its newer half are recomputed, which Xiao et
    al. (arXiv 2309.17453, table 1) found to be the best of the windowed caches; no cached key is re-rotated.
    The newest tokens are fed again with each tree, so accepted tokens, bonus tokens and rollbacks need no
    passes of their own.

    Args:
        draft: the checked model.
        config: shape of the trees, sinks and window. A chain beside the trees is left to others.
        tokens: its token ids for the target's; None where these are the same.
    """

    name = "draft"
    deterministic = False
    features: tuple[int, ...] = ()

    def __init__(self, draft: HFModel, config: HierarchyConfig, tokens: TokenMap | None = None) -> None:
        self.draft, self.config = draft, config.streaming
        self.tree: str | Shape = with_chain(config.tree, 0)
        own = step_model(draft, compiled=draft.device.type == "cuda")
        self.model: Forwards = own if tokens is None else MappedModel(own, tokens)
        self.shape = shape = device_tree_shape(parse_shape(config.tree))
        self.capturable = self.model.capturable
        # The chain of level 1 and a tree after it.
        beyond = max(_BEYOND_WINDOW, config.gamma + shape.depth)
        needed = self.config.sinks + 2 * self.config.window + beyond
        limit = draft.learned_positions
        if limit is not None and needed > limit:
            window = max(1, (limit - self.config.sinks - beyond) // 2)
            raise ValueError(
                f"{draft.name} has {limit} learned positions, and its window needs {needed}; set "
                f"window<={window}, or choose another draft"
            )
        self.depth = len(shape.widths)
        self.nodes = shape.tree_nodes
        # As many as one verification by level 1 (depth + 1) and one by level 2 (1 more) can add.
        self.refeed_tokens = shape.depth + 2

    def bind(self, state: SequenceState) -> None:
        batch, shape, device = state.batch, self.shape, self.model.device
        self._scratch_slots = state.max_draft_tokens + 2 * self.refeed_tokens + self.nodes
        capacity = self.config.sinks + 2 * self.config.window + self._scratch_slots
        self.store = KVStore(self.draft.kv_layers, batch, capacity, device, self.draft.dtype)
        # Tokens between the sinks and the window, which the cache does not hold; the same on the host.
        self.dropped = torch.zeros(batch, dtype=torch.int64, device=device)
        self._dropped_on_host = [0] * batch
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
        refeed = self.refeed_tokens
        self._ids = [buffer(batch, width) for width in (refeed, *shape.widths)]
        self._positions = buffer(batch, refeed - 1 + self.nodes)
        depths = [0] + [d + 1 for d, width in enumerate(shape.widths) for _ in range(width)]
        self._offsets = torch.tensor([*range(1 - refeed, 0), *depths], device=device)
        # The first KV slot that each forward writes, and its distance from the root's.
        self._first_slots = buffer(self.depth, batch)
        self._first_offsets = torch.tensor([1 - refeed, *starts[1 : self.depth]], device=device)
        self._lengths = buffer(batch, dtype=torch.int32)
        causal = torch.ones(refeed, refeed, dtype=torch.bool).tril()
        self._views = [TreeAttentionView(self.store, refeed, mask=causal)]
        for width, nodes in zip(shape.widths, self._frontiers[1:], strict=False):
            tail_depths = [*range(refeed - 1), *(refeed - 1 + d for d in depths[: nodes.stop])]
            view = TreeAttentionView(self.store, width, tail=len(tail_depths), depths=tail_depths)
            self._views.append(view)
        for view, first_slot in zip(self._views, self._first_slots, strict=True):
            view.follow(first_slot, self._lengths)

    def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        end, before = state.end, self.refeed_tokens - 1
        step.begin_tree(
            self._ids[0], self._positions, tree.tokens, self._first_slots, self._lengths,
            state.tokens, end, self.dropped, self._offsets, self._first_offsets,
        )  # fmt: skip
        for d, nodes in enumerate(self._frontiers):
            columns = slice(before + nodes.start if d else 0, before + nodes.stop)
            logits = self.model(
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

    def start(self, sequences: Sequence[Sequence[int]]) -> None:
        if (rope := self.draft.length_rope) is not None:
            rope.choose_for_window(self.store.rows)
        self.prepare(sequences, resumed=True)

    def start_one(self, b: int, sequences: Sequence[Sequence[int]]) -> None:
        self._recompute_window(b, sequences[b])

    def prepare(self, sequences: Sequence[Sequence[int] | None], resumed: bool) -> None:
        """Recompute windows that have no slots left for another pass, or that lack tokens."""
        for b, sequence in enumerate(sequences):
            if sequence is None:
                continue
            needed = len(sequence) - self._dropped_on_host[b] + self._scratch_slots
            if resumed or needed > self.store.rows:
                self._recompute_window(b, sequence)

    def _recompute_window(self, b: int, sequence: Sequence[int]) -> None:
        # All but the newest tokens, which every tree feeds again. A sequence shorter than these counts as
        # padded on the left with copies of its first token.
        final = len(sequence) - self.refeed_tokens
        sinks, window = self.config.sinks, self.config.window
        newest = min(window, max(0, final - sinks))
        held = [*sequence[: max(0, min(sinks, final))], *sequence[max(0, final - newest) : max(0, final)]]
        self.dropped[b] = self._dropped_on_host[b] = final - len(held)
        if held:
            self._prefill(b, held)

    def _prefill(self, b: int, tokens: list[int]) -> None:
        """Write the keys and values of ``tokens`` into the first slots of sequence b."""
        ids = torch.tensor([tokens], device=self.model.device)
        positions = torch.arange(len(tokens), device=ids.device)[None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, how: AttentionParams) -> Tensor:
            for cached, new in zip(self.store.layer(layer), (k, v), strict=True):
                cached[b : b + 1, :, : len(tokens)] = new
            out = windowed_attention(q, k, v, how, 0)
            return out.transpose(1, 2).contiguous()

        self.model(ids, positions, attend, last=1)

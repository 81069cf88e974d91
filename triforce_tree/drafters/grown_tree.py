"""Grows trees of one shape with a draft model: buffers, KV views, and one forward per depth."""

from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from triforce_tree.drafters.base import TokenTree
from triforce_tree.drafters.token_map import Forwards
from triforce_tree.kernels import step
from triforce_tree.kv.store import KVStore
from triforce_tree.kv.tree_attention_view import TreeAttentionView
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.device_shapes import DeviceTreeShape
from triforce_tree.verify.probs import Sampler


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

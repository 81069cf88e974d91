"""The token tree that the target verifies with ``levels=3``, where the retrieval model has built a chain."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from triforce_tree.drafters.base import TokenTree
from triforce_tree.kernels.attention.plan import pack_mask, unpack_mask
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.ancestors import ancestor_mask


class ChainTree:
    """Joins the retrieval model's chain, the runner-ups of its tokens, and a drafter's tree, the *tail*.

    A runner-up is the second choice of the retrieval model at a position of the chain. The tail continues the
    chain: the chain's last token is the tail's root. Nodes have this order: the root and the chain (nodes 0
    to ``max_draft_tokens``); the runner-up of chain token i + 1 as a child of node i; the tail without its
    root. Nodes beyond the chain's length are unused.

    Args:
        state: holds the chains.
        runner_ups: whether runner-ups are verified too.
        tail: the tree that the drafter writes, whose ``probs`` are the last entries of
            ``state.chain_probs``; None without a tail.

    Attributes:
        tree: the joined tree.
        mask, depths: bool ``[N, N]`` ancestor mask and depths of all nodes; None with a tail, since they then
            depend on the chain's length.
        tail_start: the first node of the tail in the joined tree, which is node 1 of the tail itself.
    """

    def __init__(self, state: SequenceState, runner_ups: bool, tail: TokenTree | None) -> None:
        self.state, self._runner_ups, self._tail = state, runner_ups, tail
        most, batch, device = state.max_draft_tokens, state.batch, state.device
        parents = [*range(-1, most), *(range(most) if runner_ups else ())]
        depths = [*range(most + 1), *(range(1, most + 1) if runner_ups else ())]
        self.mask: Tensor | None = ancestor_mask(parents)
        self.depths: list[int] | None = depths
        self.tail_start = len(parents)
        count = self.tail_start + (tail.nodes - 1 if tail is not None else 0)
        self._offsets = torch.arange(most + 1, device=device)
        self.tree = TokenTree(
            tokens=torch.full((batch, count), -1, device=device),
            parents=torch.tensor(parents, device=device).expand(batch, -1),
            depths=torch.tensor(depths, device=device),
            mask_words=torch.zeros(batch, 0, dtype=torch.int64, device=device),
            probs=state.chain_probs,
            probs_rows=torch.arange(count, device=device).repeat(batch, 1),
            depth=most,
        )
        if tail is None:
            return
        fixed = pack_mask(pad(self.mask, (0, count - self.tail_start))).to(device)
        self._chain_words = fixed[: most + 1]
        self.tree = replace(
            self.tree,
            parents=pad(self.tree.parents, (0, tail.nodes - 1)),
            depths=pad(self.tree.depths, (0, tail.nodes - 1)).repeat(batch, 1),
            mask_words=pad(fixed, (0, 0, 0, tail.nodes - 1)).repeat(batch, 1, 1),
            depth=most + tail.depth,
        )
        self.mask = self.depths = None

    def fill(self) -> None:
        """Copies the chains, runner-ups and tails of all sequences into ``tree``."""
        state, tree, most = self.state, self.tree, self.state.max_draft_tokens
        tokens = state.tokens.gather(1, state.length[:, None] + self._offsets)
        chain = state.chain[:, None]
        tree.tokens[:, : most + 1] = torch.where(self._offsets <= chain, tokens, -1)
        if self._runner_ups:
            runner_ups = state.runner_ups[:, :most]
            tree.tokens[:, most + 1 : self.tail_start] = torch.where(
                self._offsets[:-1] < chain, runner_ups, -1
            )
        if self._tail is not None:
            self._append(self._tail, chain)

    def _append(self, tail: TokenTree, chain: Tensor) -> None:
        """Writes the tail's nodes as descendants of the last chain token.

        Args:
            chain: int64 ``[B, 1]``, the number of tokens in each chain.
        """
        tree, above = self.tree, self.tail_start
        tree.tokens[:, above:] = tail.tokens[:, 1:]
        parents = tail.parents[:, 1:]
        tree.parents[:, above:] = torch.where(parents > 0, parents + above - 1, chain)
        tree.depths[:, above:] = tail.depths[1:] + chain
        rows = tail.probs_rows
        rows = torch.where(rows >= 0, rows + self.state.chain_probs.shape[1] - tail.probs.shape[1], rows)
        tree.probs_rows[:, above:] = rows[:, 1:]
        # The chain's last token has the children of the tail's root.
        nodes = self._offsets
        tree.probs_rows[:, : len(nodes)] = torch.where(nodes == chain, rows[:, :1], nodes)
        among = unpack_mask(tail.mask_words)[:, 1:, 1 : tail.nodes].flatten(0, 1)
        words = pack_mask(pad(among, (above, 0))).view(len(parents), tail.nodes - 1, -1)
        tree.mask_words[:, above:] = words | self._chain_words[chain]

"""Adds a chain of deterministic tokens to a token tree."""

import torch
from torch import Tensor

from triforce_tree.kernels.attention.plan import pack_mask
from triforce_tree.kernels.operators import operator
from triforce_tree.kernels.step.accept import FIXED


@operator("graft_chain", writes=("tokens", "parents", "mask_words", "rows"), triton=".graft_kernels")
def graft_chain(
    tokens: Tensor,
    parents: Tensor,
    mask_words: Tensor,
    rows: Tensor,
    own_tokens: Tensor,
    own_parents: Tensor,
    own_words: Tensor,
    own_rows: Tensor,
    chain: Tensor,
) -> None:
    """Writes a token tree of M nodes, and after them a chain of L tokens below its root.

    The chain follows the path of the tree whose tokens equal its first tokens. The remaining tokens of the
    chain become new nodes: token j is node M + j at depth j + 1. Nodes M + j of tokens on the path are
    unused. So a node of the chain comes after its siblings, and siblings have different tokens.

    Args:
        tokens, parents: int64 ``[B, M + L]``, token and parent of each node; written.
        mask_words: int64 ``[B, M + L, W]``, masks of ancestors with 64 W >= M + L; written.
        rows: int64 ``[B, M + L]``, ``q_rows`` of ``traverse_tree``; written; ``FIXED`` for the chain.
        own_tokens, own_parents, own_rows: int64 ``[B, M]``, the tree without the chain.
        own_words: int64 ``[B, M, w]``, its masks, w <= W.
        chain: int64 ``[B, L]``, padded with -1.
    """
    nodes, length, words = own_tokens.shape[1], chain.shape[1], own_words.shape[2]
    tokens[:, :nodes], parents[:, :nodes], rows[:, :nodes] = own_tokens, own_parents, own_rows
    mask_words[:, :nodes], mask_words[:, :nodes, :words] = 0, own_words
    rows[:, nodes:] = FIXED
    index = torch.arange(nodes + length, device=tokens.device)
    trees = zip(own_tokens.tolist(), own_parents.tolist(), chain.tolist(), strict=True)
    for b, (token, parent, proposed) in enumerate(trees):
        node, shared = 0, 0
        while shared < length:
            same = [
                i for i, above in enumerate(parent) if above == node and token[i] == proposed[shared] >= 0
            ]
            if not same:
                break
            node, shared = same[0], shared + 1
        tokens[b, nodes:] = torch.where(index[:length] >= shared, chain[b], -1)
        parents[b, nodes:] = torch.where(index[:length] > shared, index[nodes:] - 1, node)
        above = mask_words[b, node]
        # seen, bool [L, M + L], marks for each node of the chain the new nodes up to it.
        seen = (index >= nodes + shared) & (index <= index[nodes:, None])
        mask_words[b, nodes:] = above | pack_mask(seen, mask_words.shape[2])

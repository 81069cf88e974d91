"""A chain of deterministic tokens beside a token tree, as one tree that shares their common paths."""

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
    """Writes a tree of M nodes and, after them, a chain of L tokens below its root.

    The chain follows the tree as long as a child has its next token; node M + j, at depth j + 1, is the
    chain's token j where no node of the tree is, else it is unused. So of the siblings of a node the chain's
    is the last, and no token of its own path is there twice.

    Args:
        tokens, parents: int64 ``[B, M + L]``, written, as all of ``TokenTree``.
        mask_words: int64 ``[B, M + L, W]``, written; 64 W >= M + L.
        rows: int64 ``[B, M + L]``, written; ``FIXED`` for the chain.
        own_tokens, own_parents, own_rows: int64 ``[B, M]``, of the tree.
        own_words: int64 ``[B, M, w]``, w <= W.
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
        # bool [L, M + L]: the nodes of the chain up to each of its own.
        seen = (index >= nodes + shared) & (index <= index[nodes:, None])
        mask_words[b, nodes:] = above | pack_mask(seen, mask_words.shape[2])

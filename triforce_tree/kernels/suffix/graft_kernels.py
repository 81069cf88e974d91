"""Triton kernel that adds a chain to a token tree; see ``graft``."""

import triton
import triton.language as tl
from torch import Tensor

from triforce_tree.kernels.launching import warps
from triforce_tree.kernels.step.accept import FIXED

_FIXED = tl.constexpr(FIXED)


@triton.jit
def _graft_kernel(
    tokens_ptr,  # int64 [B, M + L], like parents_ptr
    parents_ptr,
    words_ptr,  # int64 [B, M + L, WORDS]
    rows_ptr,  # int64 [B, M + L]
    own_tokens_ptr,  # int64 [B, M], like own_parents_ptr
    own_parents_ptr,
    own_words_ptr,  # int64 [B, M, OWN_WORDS]
    own_rows_ptr,  # int64 [B, M]
    chain_ptr,  # int64 [B, L]
    nodes,
    length,
    WORDS: tl.constexpr,
    OWN_WORDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    tokens_ptr += sequence * (nodes + length)
    parents_ptr += sequence * (nodes + length)
    rows_ptr += sequence * (nodes + length)
    words_ptr += sequence * (nodes + length) * WORDS
    own_words_ptr += sequence * nodes * OWN_WORDS
    chain_ptr += sequence * length
    index, slot = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_L)
    real, in_chain = index < nodes, slot < length
    token = tl.load(own_tokens_ptr + sequence * nodes + index, mask=real, other=-1)
    parent = tl.load(own_parents_ptr + sequence * nodes + index, mask=real, other=-1)
    row = tl.load(own_rows_ptr + sequence * nodes + index, mask=real, other=-1)
    proposed = tl.load(chain_ptr + slot, mask=in_chain, other=-1)
    tl.store(tokens_ptr + index, token, mask=real)
    tl.store(parents_ptr + index, parent, mask=real)
    tl.store(rows_ptr + index, row, mask=real)

    node, shared = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    walking = length > 0
    while walking:
        following = tl.max(tl.where(slot == shared, proposed, -1), 0)
        child = tl.min(tl.where((parent == node) & (token == following), index, BLOCK_M), 0)
        walking = (following >= 0) & (child < BLOCK_M)
        node = tl.where(walking, child, node)
        shared += walking.to(tl.int32)
        walking = walking & (shared < length)

    own = (nodes + slot).to(tl.int64)
    tl.store(tokens_ptr + own, tl.where(slot >= shared, proposed, -1), mask=in_chain)
    tl.store(parents_ptr + own, tl.where(slot > shared, own - 1, node), mask=in_chain)
    tl.store(rows_ptr + own, slot.to(tl.int64) * 0 + _FIXED, mask=in_chain)
    begin = (nodes + shared).to(tl.int64)
    for i in tl.static_range(WORDS):
        word = index.to(tl.int64) * 0
        above = tl.full([], 0, tl.int64)
        if i < OWN_WORDS:
            word = tl.load(own_words_ptr + index * OWN_WORDS + i, mask=real, other=0)
            above = tl.load(own_words_ptr + node * OWN_WORDS + i)
        tl.store(words_ptr + index * WORDS + i, word, mask=real)
        # Of the bits ``begin`` to ``own``, this sets those in word i.
        low, high = tl.minimum(tl.maximum(begin - 64 * i, 0), 64), tl.minimum(own - 64 * i, 63)
        low_bits = tl.where(low < 64, (own * 0 + 1) << tl.minimum(low, 63), 0) - 1
        high_bits = tl.where(high >= 63, -1, ((own * 0 + 1) << (tl.maximum(high, 0) + 1)) - 1)
        bits = tl.where((high >= 0) & (high >= low), high_bits & ~low_bits, 0)
        tl.store(words_ptr + own * WORDS + i, above | bits, mask=in_chain)


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
    """See ``graft.graft_chain``."""
    batch, nodes = own_tokens.shape
    args = (tokens, parents, mask_words, rows, own_tokens, own_parents, own_words, own_rows, chain)
    if not all(x.is_contiguous() for x in args):
        raise ValueError("the kernel of graft_chain needs contiguous tensors")
    if 64 * mask_words.shape[2] < tokens.shape[1]:
        raise ValueError(f"{tokens.shape[1]} nodes do not fit {mask_words.shape[2]} mask words of 64 bits")
    _graft_kernel[(batch,)](
        *args, nodes, chain.shape[1], WORDS=mask_words.shape[2], OWN_WORDS=own_words.shape[2],
        BLOCK_M=triton.next_power_of_2(nodes), BLOCK_L=triton.next_power_of_2(chain.shape[1]),
        **warps(1),
    )  # fmt: skip

"""Triton kernel that gives the new nodes of a token tree their places; see ``grow_kernels``."""

import triton
import triton.language as tl
from torch import Tensor

from triforce_tree.kernels.step.grow_kernels import FIRST, LAST, bits_of, check_dense, rank_word, warps

_POSITIVE = tl.constexpr(2**63 - 1)
# Candidates for new nodes that a program holds at once, and most nodes that it takes from them one by one.
_HELD, _TAKEN = 4096, 64
# Candidates that it looks at together where there are more of either.
_WALKED = 2048


@triton.jit
def _chances(values_ptr, ranks_ptr, place, places, count):
    """Values of the parents of some places, and words that rank these places by their chance."""
    real = place < places
    value = tl.load(values_ptr + place // count, mask=real, other=0.0)
    chance = value * tl.load(ranks_ptr + place, mask=real, other=0.0)
    return value, tl.where(real, rank_word(bits_of(chance), place), LAST)


@triton.jit
def _write_nodes(
    tokens_ptr,
    parents_ptr,
    words_ptr,
    values_ptr,
    ids_ptr,
    mask_ptr,
    draws_ptr,
    probs_ptr,
    slot,
    rank,
    value,
    place,
    taken,
    probs_f,
    first,
    frontier,
    count,
    before,
    WORDS: tl.constexpr,
    MASK_WORDS: tl.constexpr,
):
    """The new nodes at ``place`` below the frontier's ``slot``; pointers are those of one sequence."""
    drawn = tl.load(draws_ptr + slot * count + rank, mask=taken, other=-1)
    value *= tl.load(probs_ptr + slot * probs_f + drawn, mask=taken & (drawn >= 0), other=0.0)
    one = tl.full([], 1, tl.int64)
    above, node = (first + slot).to(tl.int64), (first + frontier + place).to(tl.int64)
    tl.store(tokens_ptr + node, drawn, mask=taken)
    tl.store(parents_ptr + node, above, mask=taken)
    tl.store(values_ptr + node, value, mask=taken)
    tl.store(ids_ptr + place, tl.maximum(drawn, 0), mask=taken)
    for i in tl.static_range(WORDS):
        word = tl.load(words_ptr + above * WORDS + i, mask=taken, other=0)
        if WORDS == 1:
            word |= one << node
        else:
            word |= tl.where((node >> 6) == i, one << (node & 63), 0)
        tl.store(words_ptr + node * WORDS + i, word, mask=taken)
        if WORDS * MASK_WORDS == 1:
            seen = (word << before) | ((one << before) - 1)
            tl.store(mask_ptr + place, seen, mask=taken)
    if WORDS * MASK_WORDS > 1:
        # The parents' words moved by ``before`` bits, which may end in the next word; the node's own bit.
        moved, bits, at = before // 64, before % 64, node + before
        for i in tl.static_range(MASK_WORDS):
            low = place * 0 + (i - moved)
            there = words_ptr + above * WORDS + low
            word = tl.load(there, mask=taken & (low >= 0) & (low < WORDS), other=0)
            under = tl.load(there - 1, mask=taken & (low >= 1) & (low <= WORDS), other=0)
            seen = (word << bits) | (((under >> 1) & _POSITIVE) >> (63 - bits))
            seen |= tl.where((at >> 6) == i, one << (at & 63), 0)
            front = tl.minimum(tl.maximum(one * (before - 64 * i), 0), 64)
            seen |= tl.where(front == 64, -1, (one << tl.minimum(front, 63)) - 1)
            tl.store(mask_ptr + place * MASK_WORDS + i, seen, mask=taken)


@triton.jit
def _place_kernel(
    tokens_ptr,  # int64 [B, N], as the next
    parents_ptr,
    words_ptr,  # int64 [B, N, WORDS]
    values_ptr,  # fp32 [B, N]
    ids_ptr,  # int64 [B, W]
    mask_ptr,  # int64 [B * W, MASK_WORDS], or None
    draws_ptr,  # int64 [B, F, K]
    ranks_ptr,  # fp32 [B, F, K]
    probs_ptr,  # fp32 [B, F, V] with strides
    pairs_ptr,  # int64 [2, W], or None: the likeliest places
    probs_b,
    probs_f,
    nodes,
    first,
    frontier,
    count,
    width,
    before,
    WORDS: tl.constexpr,
    MASK_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    WALKED: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    tree, row = sequence * nodes, sequence * frontier * count
    tokens_ptr += tree
    parents_ptr += tree
    words_ptr += tree * WORDS
    values_ptr += tree
    ids_ptr += sequence * width
    if mask_ptr is not None:
        mask_ptr += sequence * width * MASK_WORDS
    draws_ptr += row
    ranks_ptr += row
    probs_ptr += sequence * probs_b
    lane, places = tl.arange(0, BLOCK), frontier * count
    if WALKED:
        # The largest word that as many as are wanted reach, between ``least`` and ``above``.
        least, above = tl.full([], 0, tl.int64), tl.full([], FIRST, tl.int64)
        while above - least > 1:
            middle = least + ((above - least) >> 1)
            reaching = tl.full([], 0, tl.int32)
            for start in range(0, places, BLOCK):
                _, word = _chances(values_ptr + first, ranks_ptr, start + lane, places, count)
                reaching += tl.sum((word >= middle).to(tl.int32), 0)
            above = tl.where(reaching > width, above, tl.where(reaching == width, middle + 1, middle))
            least = tl.where(reaching >= width, middle, least)
        done = tl.full([], 0, tl.int32)
        for start in range(0, places, BLOCK):
            there = start + lane
            value, word = _chances(values_ptr + first, ranks_ptr, there, places, count)
            taken = word >= least
            place = done + tl.cumsum(taken.to(tl.int32), 0) - 1
            done += tl.sum(taken.to(tl.int32), 0)
            _write_nodes(
                tokens_ptr, parents_ptr, words_ptr, values_ptr, ids_ptr, mask_ptr, draws_ptr, probs_ptr,
                there // count, there % count, value, place, taken, probs_f, first, frontier, count, before,
                WORDS, MASK_WORDS,
            )  # fmt: skip
    else:
        if pairs_ptr is None:
            slot, rank = lane // count, lane % count
            value, word = _chances(values_ptr + first, ranks_ptr, lane, places, count)
            least = tl.full([], FIRST, tl.int64)
            for _ in range(width):
                least = tl.max(tl.where(word < least, word, LAST), 0)
            taken = (lane < places) & (word >= least)
            place = tl.cumsum(taken.to(tl.int32), 0) - 1
        else:
            taken, place = lane < width, lane
            slot = tl.load(pairs_ptr + lane, mask=taken, other=0)
            rank = tl.load(pairs_ptr + width + lane, mask=taken, other=0)
            value = tl.load(values_ptr + first + slot, mask=taken, other=0.0)
        _write_nodes(
            tokens_ptr, parents_ptr, words_ptr, values_ptr, ids_ptr, mask_ptr, draws_ptr, probs_ptr,
            slot, rank, value, place, taken, probs_f, first, frontier, count, before, WORDS, MASK_WORDS,
        )  # fmt: skip


def place_nodes(
    tokens: Tensor,
    parents: Tensor,
    words: Tensor,
    values: Tensor,
    ids: Tensor,
    mask: Tensor | None,
    draws: Tensor,
    by_rank: Tensor,
    probs: Tensor,
    pairs: Tensor | None,
    first: int,
    before: int,
) -> None:
    """See ``grow.place_nodes``."""
    batch, frontier, count = draws.shape
    width = ids.shape[1]
    check_dense(tokens, parents, words, values, ids, mask, draws, by_rank, pairs)
    if pairs is None and frontier * count < width:
        raise ValueError(f"{width} new nodes do not fit {frontier} parents with {count} draws each")
    if 64 * words.shape[2] < tokens.shape[1]:
        raise ValueError(f"{tokens.shape[1]} nodes do not fit {words.shape[2]} words of 64 bits")
    if mask is not None and 64 * mask.shape[1] < before + first + frontier + width:
        raise ValueError(
            f"{before} bits and {first + frontier + width} nodes do not fit a mask of {mask.shape[1]} words"
        )
    block = triton.next_power_of_2(frontier * count if pairs is None else width)
    walked = pairs is None and (block > _HELD or width > _TAKEN)
    block = min(block, _WALKED) if walked else block
    _place_kernel[(batch,)](
        tokens, parents, words, values, ids, mask, draws, by_rank, probs, pairs,
        *probs.stride()[:2], tokens.shape[1], first, frontier, count, width, before,
        WORDS=words.shape[2], MASK_WORDS=0 if mask is None else mask.shape[1],
        BLOCK=block, WALKED=walked, **warps(max(1, min(8, block // 256))),
    )  # fmt: skip

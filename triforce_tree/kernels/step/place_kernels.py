"""Triton kernels of ``grow.begin_tree`` and ``grow.place_nodes``, which write the inputs of draft forwards.

The first kernel prepares the forward of the root. The second has a program for every sequence, which chooses
parents and ranks of the new nodes, and writes these nodes and the inputs of the next forward.
"""

import triton
import triton.language as tl
from torch import Tensor

from triforce_tree.kernels.launching import warps
from triforce_tree.kernels.step.grow_kernels import FIRST, LAST, bits_of, rank_key

_POSITIVE = tl.constexpr(2**63 - 1)
# Most candidates that a program holds in registers, and most nodes that it picks from them one by one.
_HELD, _TAKEN = 4096, 64
# Block of candidates if either limit is exceeded.
_WALKED = 2048


@triton.jit
def _begin_kernel(
    ids_ptr,  # int64 [B, A]
    positions_ptr,  # int64 [B, C]
    root_ptr,  # int64 [B, N], the first column
    at_ptr,  # int64 [D, B]
    lengths_ptr,  # int32 [B]
    tokens_ptr,  # int64 [B, S]
    end_ptr,  # int64 [B]
    dropped_ptr,  # int64 [B]
    offsets_ptr,  # int64 [C]
    ahead_ptr,  # int64 [D]
    tokens_b,
    root_b,
    refeed,
    columns,
    forwards,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    sequence, batch = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    column, forward = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_D)
    end = tl.load(end_ptr + sequence)
    root = end - tl.load(dropped_ptr + sequence)
    offset = tl.load(offsets_ptr + column, mask=column < columns, other=0)
    place = tl.maximum(end + offset, 0)
    token = tl.load(tokens_ptr + sequence * tokens_b + place, mask=column < refeed, other=0)
    ahead = tl.load(ahead_ptr + forward, mask=forward < forwards, other=0)
    tl.store(ids_ptr + sequence * refeed + column, token, mask=column < refeed)
    tl.store(root_ptr + sequence * root_b + column * 0, token, mask=column == refeed - 1)
    tl.store(positions_ptr + sequence * columns + column, root + offset, mask=column < columns)
    tl.store(at_ptr + forward * batch + sequence, root + ahead, mask=forward < forwards)
    tl.store(lengths_ptr + sequence, (root - refeed + 1).to(tl.int32))


@triton.jit
def _chances(path_chances_ptr, chances_ptr, slot, rank, count, real):
    """Returns the chances of the paths to pairs (parent, rank)."""
    own = tl.load(chances_ptr + slot * count + rank, mask=real, other=0.0)
    return own * tl.load(path_chances_ptr + slot, mask=real, other=0.0)


@triton.jit
def _keys(path_chances_ptr, chances_ptr, place, places, count):
    """Returns the chances of the paths to pairs (parent, rank), and sort keys of the pairs."""
    real = place < places
    chance = _chances(path_chances_ptr, chances_ptr, place // count, place % count, count, real)
    return chance, tl.where(real, rank_key(bits_of(chance), place), LAST)


@triton.jit
def _write_nodes(
    tokens_ptr,
    parents_ptr,
    mask_words_ptr,
    path_chances_ptr,
    ids_ptr,
    mask_ptr,
    draws_ptr,
    slot,
    rank,
    chance,
    place,
    taken,
    first,
    frontier,
    count,
    before,
    WORDS: tl.constexpr,
    MASK_WORDS: tl.constexpr,
):
    """Writes the new nodes ``place`` as children of the frontier nodes ``slot`` of one sequence."""
    drawn = tl.load(draws_ptr + slot * count + rank, mask=taken, other=-1)
    one = tl.full([], 1, tl.int64)
    above, node = (first + slot).to(tl.int64), (first + frontier + place).to(tl.int64)
    tl.store(tokens_ptr + node, drawn, mask=taken)
    tl.store(parents_ptr + node, above, mask=taken)
    tl.store(path_chances_ptr + node, chance, mask=taken)
    tl.store(ids_ptr + place, tl.maximum(drawn, 0), mask=taken)
    for i in tl.static_range(WORDS):
        word = tl.load(mask_words_ptr + above * WORDS + i, mask=taken, other=0)
        if WORDS == 1:
            word |= one << node
        else:
            word |= tl.where((node >> 6) == i, one << (node & 63), 0)
        tl.store(mask_words_ptr + node * WORDS + i, word, mask=taken)
        if WORDS * MASK_WORDS == 1:
            seen = (word << before) | ((one << before) - 1)
            tl.store(mask_ptr + place, seen, mask=taken)
    if WORDS * MASK_WORDS > 1:
        # The mask is the parent's bits, shifted by ``before`` (also into the next word), and the node's own
        # bit.
        moved, bits, at = before // 64, before % 64, node + before
        for i in tl.static_range(MASK_WORDS):
            low = place * 0 + (i - moved)
            there = mask_words_ptr + above * WORDS + low
            word = tl.load(there, mask=taken & (low >= 0) & (low < WORDS), other=0)
            under = tl.load(there - 1, mask=taken & (low >= 1) & (low <= WORDS), other=0)
            seen = (word << bits) | (((under >> 1) & _POSITIVE) >> (63 - bits))
            seen |= tl.where((at >> 6) == i, one << (at & 63), 0)
            front = tl.minimum(tl.maximum(one * (before - 64 * i), 0), 64)
            seen |= tl.where(front == 64, -1, (one << tl.minimum(front, 63)) - 1)
            tl.store(mask_ptr + place * MASK_WORDS + i, seen, mask=taken)


@triton.jit
def _place_kernel(
    tokens_ptr,  # int64 [B, N], like parents_ptr
    parents_ptr,
    mask_words_ptr,  # int64 [B, N, WORDS]
    path_chances_ptr,  # fp32 [B, N]
    ids_ptr,  # int64 [B, W]
    mask_ptr,  # int64 [B * W, MASK_WORDS], or None
    draws_ptr,  # int64 [B, F, K]
    chances_ptr,  # fp32 [B, F, K]
    pairs_ptr,  # int64 [2, W]; None takes the largest chances
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
    mask_words_ptr += tree * WORDS
    path_chances_ptr += tree
    ids_ptr += sequence * width
    if mask_ptr is not None:
        mask_ptr += sequence * width * MASK_WORDS
    draws_ptr += row
    chances_ptr += row
    place_index, places = tl.arange(0, BLOCK), frontier * count
    if WALKED:
        # Bisection finds the largest ``least_key`` such that ``width`` pairs have at least this key.
        least_key, above = tl.full([], 0, tl.int64), tl.full([], FIRST, tl.int64)
        while above - least_key > 1:
            pivot = least_key + ((above - least_key) >> 1)
            reaching = tl.full([], 0, tl.int32)
            for start in range(0, places, BLOCK):
                _, key = _keys(path_chances_ptr + first, chances_ptr, start + place_index, places, count)
                reaching += tl.sum((key >= pivot).to(tl.int32), 0)
            above = tl.where(reaching > width, above, tl.where(reaching == width, pivot + 1, pivot))
            least_key = tl.where(reaching >= width, pivot, least_key)
        done = tl.full([], 0, tl.int32)
        for start in range(0, places, BLOCK):
            there = start + place_index
            chance, key = _keys(path_chances_ptr + first, chances_ptr, there, places, count)
            taken = key >= least_key
            place = done + tl.cumsum(taken.to(tl.int32), 0) - 1
            done += tl.sum(taken.to(tl.int32), 0)
            _write_nodes(
                tokens_ptr, parents_ptr, mask_words_ptr, path_chances_ptr, ids_ptr, mask_ptr,
                draws_ptr, there // count, there % count, chance, place, taken,
                first, frontier, count, before, WORDS, MASK_WORDS,
            )  # fmt: skip
    else:
        if pairs_ptr is None:
            slot, rank = place_index // count, place_index % count
            chance, key = _keys(path_chances_ptr + first, chances_ptr, place_index, places, count)
            least_key = tl.full([], FIRST, tl.int64)
            for _ in range(width):
                least_key = tl.max(tl.where(key < least_key, key, LAST), 0)
            taken = (place_index < places) & (key >= least_key)
            place = tl.cumsum(taken.to(tl.int32), 0) - 1
        else:
            taken, place = place_index < width, place_index
            slot = tl.load(pairs_ptr + place_index, mask=taken, other=0)
            rank = tl.load(pairs_ptr + width + place_index, mask=taken, other=0)
            chance = _chances(path_chances_ptr + first, chances_ptr, slot, rank, count, taken)
        _write_nodes(
            tokens_ptr, parents_ptr, mask_words_ptr, path_chances_ptr, ids_ptr, mask_ptr, draws_ptr,
            slot, rank, chance, place, taken, first, frontier, count, before, WORDS, MASK_WORDS,
        )  # fmt: skip


def begin_tree(
    ids: Tensor,
    positions: Tensor,
    root: Tensor,
    at: Tensor,
    lengths: Tensor,
    tokens: Tensor,
    end: Tensor,
    dropped: Tensor,
    offsets: Tensor,
    ahead: Tensor,
) -> None:
    """See ``grow.begin_tree``."""
    _check_dense(ids, positions, at, lengths, offsets, ahead, end, dropped)
    columns, forwards = positions.shape[1], at.shape[0]
    block = triton.next_power_of_2(columns)
    _begin_kernel[(ids.shape[0],)](
        ids, positions, root, at, lengths, tokens, end, dropped, offsets, ahead,
        tokens.stride(0), root.stride(0), ids.shape[1], columns, forwards,
        BLOCK_C=block, BLOCK_D=triton.next_power_of_2(forwards), **warps(max(1, block // 256)),
    )  # fmt: skip


def place_nodes(
    tokens: Tensor,
    parents: Tensor,
    mask_words: Tensor,
    path_chances: Tensor,
    ids: Tensor,
    mask: Tensor | None,
    draws: Tensor,
    chances: Tensor,
    pairs: Tensor | None,
    first: int,
    before: int,
) -> None:
    """See ``grow.place_nodes``."""
    batch, frontier, count = draws.shape
    width = ids.shape[1]
    _check_dense(tokens, parents, mask_words, path_chances, ids, mask, draws, chances, pairs)
    if pairs is None and frontier * count < width:
        raise ValueError(f"{width} new nodes are too many for {frontier} parents with {count} draws each")
    if 64 * mask_words.shape[2] < tokens.shape[1]:
        raise ValueError(f"{tokens.shape[1]} nodes do not fit {mask_words.shape[2]} mask words of 64 bits")
    if mask is not None and 64 * mask.shape[1] < before + first + frontier + width:
        raise ValueError(
            f"{before} bits and {first + frontier + width} nodes do not fit a mask of {mask.shape[1]} words "
            "of 64 bits"
        )
    block = triton.next_power_of_2(frontier * count if pairs is None else width)
    walked = pairs is None and (block > _HELD or width > _TAKEN)
    block = min(block, _WALKED) if walked else block
    _place_kernel[(batch,)](
        tokens, parents, mask_words, path_chances, ids, mask, draws, chances, pairs,
        tokens.shape[1], first, frontier, count, width, before,
        WORDS=mask_words.shape[2], MASK_WORDS=0 if mask is None else mask.shape[1],
        BLOCK=block, WALKED=walked, **warps(max(1, min(8, block // 256))),
    )  # fmt: skip


def _check_dense(*tensors: Tensor | None) -> None:
    if not all(x is None or x.is_contiguous() for x in tensors):
        raise ValueError("buffers of a growing tree must be contiguous")

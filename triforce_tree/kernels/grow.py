"""Triton kernels that grow a token tree between the forwards of a draft model.

Two launches a depth. The first has a program for every frontier node: softmax, and the best tokens by law
and by race. The second has one for every sequence, which chooses the places of the new nodes and writes all
that is known of them, the inputs of the next forward included. ``step_reference`` is the definition.

Both rank by one integer that is made of a number's bits and an index: the larger number first, the lower
index among equals, and what is not a number before all others.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from triforce_tree.kernels.operators import fake, operator

# Tokens that a program of the first launch looks at together, and those of each of its warps.
_BLOCK = 8192
_WARP = 512
_FIRST = tl.constexpr(2**63 - 1)
_LAST = tl.constexpr(-(2**62))
_LOW = tl.constexpr(2**32 - 1)
_GONE = tl.constexpr(-2)
_POSITIVE = tl.constexpr(2**63 - 1)
# Up to so many draws a node are ordered by comparing each with each.
_PAIRWISE = tl.constexpr(64)
# Candidates for new nodes that a program holds at once, and most nodes that it takes from them one by one.
_HELD, _TAKEN = 4096, 64
# Candidates that it looks at together where there are more of either.
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
    again,
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
    token = tl.load(tokens_ptr + sequence * tokens_b + place, mask=column < again, other=0)
    ahead = tl.load(ahead_ptr + forward, mask=forward < forwards, other=0)
    tl.store(ids_ptr + sequence * again + column, token, mask=column < again)
    tl.store(root_ptr + sequence * root_b + column * 0, token, mask=column == again - 1)
    tl.store(positions_ptr + sequence * columns + column, root + offset, mask=column < columns)
    tl.store(at_ptr + forward * batch + sequence, root + ahead, mask=forward < forwards)
    tl.store(lengths_ptr + sequence, (root - again + 1).to(tl.int32))


@triton.jit
def _bits(number):
    """What is not negative as int32 that compare alike; not a number stands above infinity."""
    return tl.where(number == number, number.to(tl.int32, bitcast=True), 0x7FC00000)


@triton.jit
def _word(bits, index):
    """What ranks a number: by value, then by the lower index; negative where ``bits`` are."""
    return (bits.to(tl.int64) << 32) + (_LOW - index.to(tl.int64))


@triton.jit
def _scores(logits_ptr, cold, start, vocab, BLOCK: tl.constexpr):
    token = start + tl.arange(0, BLOCK)
    return tl.load(logits_ptr + token, mask=token < vocab, other=float("-inf")).to(tl.float32) * cold


@triton.jit
def _expand_kernel(
    draws_ptr,  # int64 [B, F, K]
    ranks_ptr,  # fp32 [B, F, K]
    laws_ptr,  # fp32 [B, F, V] with strides
    logits_ptr,  # [B, F, V] with strides
    temperature_ptr,  # fp32 [], or None
    race_ptr,  # fp32 [B, F, V] with strides, or None: draws are the most probable tokens
    laws_b,
    laws_f,
    logits_b,
    logits_f,
    race_b,
    race_f,
    frontier,
    vocab,
    count,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    sequence, node = row // frontier, row % frontier
    logits_ptr += sequence * logits_b + node * logits_f
    laws_ptr += sequence * laws_b + node * laws_f
    # Where there is a race a second program ranks by law. Masks below are blocks on both sides: Triton's
    # interpreter makes none of a block and a scalar.
    part = tl.program_id(1)
    cold = tl.full([], 1.0, tl.float32)
    if temperature_ptr is not None:
        cold /= tl.load(temperature_ptr)

    top = tl.full([BLOCK], -3.0e38, tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        score = _scores(logits_ptr, cold, start, vocab, BLOCK)
        higher = tl.maximum(top, score)
        mass = mass * tl.exp(top - higher) + tl.exp(score - higher)
        top = higher
    most = tl.max(top, 0)
    share = 1.0 / tl.sum(mass * tl.exp(top - most), 0)

    # The best words so far in any order; those of no token are negative, and lanes behind K never leave.
    lane = tl.arange(0, BLOCK_K)
    words = tl.where(lane < count, -1 - lane.to(tl.int64), _FIRST)
    least = tl.min(words, 0)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < vocab
        drawing = inside & (token * 0 + part == 0)
        law = tl.exp(_scores(logits_ptr, cold, start, vocab, BLOCK) - most) * share
        tl.store(laws_ptr + token, law, mask=drawing)
        if race_ptr is not None:
            at = race_ptr + sequence * race_b + node * race_f + token
            law = tl.div_rn(law, tl.load(at, mask=drawing, other=1.0))
        bits = tl.where(inside, _bits(law), _GONE)
        best = tl.max(bits, 0)
        winner = tl.min(tl.where(bits == best, token, 2147483647), 0)
        word = _word(best, winner)
        while word > least:
            words = tl.where(words == least, word, words)
            least = tl.min(words, 0)
            bits = tl.where(token == winner, _GONE, bits)
            best = tl.max(bits, 0)
            winner = tl.min(tl.where(bits == best, token, 2147483647), 0)
            word = _word(best, winner)

    words = tl.where(lane < count, words, _LAST)
    if BLOCK_K <= _PAIRWISE:
        rank = tl.sum((words[None, :] > words[:, None]).to(tl.int32), 1)
        token, number = _unpacked(words, race_ptr is not None)
        out = row * count + rank
        tl.store(draws_ptr + out, token, mask=(lane < count) & (lane * 0 + part == 0))
        if race_ptr is None:
            tl.store(ranks_ptr + out, number, mask=lane < count)
        else:
            tl.store(ranks_ptr + out, number, mask=(lane < count) & (lane * 0 + part == 1))
    else:
        for rank in range(count):
            word = tl.max(words, 0)
            words = tl.where(words == word, _LAST, words)
            token, number = _unpacked(word, race_ptr is not None)
            if part == 0:
                tl.store(draws_ptr + row * count + rank, token)
            if part == 1 or race_ptr is None:
                tl.store(ranks_ptr + row * count + rank, number)


@triton.jit
def _unpacked(word, RACED: tl.constexpr):
    """Token and number of a word; -1 where there is no token, or where it never wins a race."""
    token = tl.where(word < 0, -1, _LOW - (word & _LOW))
    number = tl.where(word < 0, 0, word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    if RACED:
        token = tl.where(number > 0.0, token, -1)
    return token, number


@triton.jit
def _chances(values_ptr, ranks_ptr, place, places, count):
    """Values of the parents of some places, and words that rank these places by their chance."""
    real = place < places
    value = tl.load(values_ptr + place // count, mask=real, other=0.0)
    chance = value * tl.load(ranks_ptr + place, mask=real, other=0.0)
    return value, tl.where(real, _word(_bits(chance), place), _LAST)


@triton.jit
def _write_nodes(
    tokens_ptr,
    parents_ptr,
    words_ptr,
    values_ptr,
    ids_ptr,
    mask_ptr,
    draws_ptr,
    laws_ptr,
    slot,
    rank,
    value,
    place,
    taken,
    laws_f,
    first,
    frontier,
    count,
    before,
    WORDS: tl.constexpr,
    MASK_WORDS: tl.constexpr,
):
    """The new nodes at ``place`` below the frontier's ``slot``; pointers are those of one sequence."""
    drawn = tl.load(draws_ptr + slot * count + rank, mask=taken, other=-1)
    value *= tl.load(laws_ptr + slot * laws_f + drawn, mask=taken & (drawn >= 0), other=0.0)
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
    laws_ptr,  # fp32 [B, F, V] with strides
    pairs_ptr,  # int64 [2, W], or None: the likeliest places
    laws_b,
    laws_f,
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
    laws_ptr += sequence * laws_b
    lane, places = tl.arange(0, BLOCK), frontier * count
    if WALKED:
        # The largest word that as many as are wanted reach, between ``least`` and ``above``.
        least, above = tl.full([], 0, tl.int64), tl.full([], _FIRST, tl.int64)
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
                tokens_ptr, parents_ptr, words_ptr, values_ptr, ids_ptr, mask_ptr, draws_ptr, laws_ptr,
                there // count, there % count, value, place, taken, laws_f, first, frontier, count, before,
                WORDS, MASK_WORDS,
            )  # fmt: skip
    else:
        if pairs_ptr is None:
            slot, rank = lane // count, lane % count
            value, word = _chances(values_ptr + first, ranks_ptr, lane, places, count)
            least = tl.full([], _FIRST, tl.int64)
            for _ in range(width):
                least = tl.max(tl.where(word < least, word, _LAST), 0)
            taken = (lane < places) & (word >= least)
            place = tl.cumsum(taken.to(tl.int32), 0) - 1
        else:
            taken, place = lane < width, lane
            slot = tl.load(pairs_ptr + lane, mask=taken, other=0)
            rank = tl.load(pairs_ptr + width + lane, mask=taken, other=0)
            value = tl.load(values_ptr + first + slot, mask=taken, other=0.0)
        _write_nodes(
            tokens_ptr, parents_ptr, words_ptr, values_ptr, ids_ptr, mask_ptr, draws_ptr, laws_ptr,
            slot, rank, value, place, taken, laws_f, first, frontier, count, before, WORDS, MASK_WORDS,
        )  # fmt: skip


@operator("begin_tree", writes=("ids", "positions", "root", "at", "lengths"))
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
    """See ``step_reference.begin_tree``."""
    _dense(ids, positions, at, lengths, offsets, ahead, end, dropped)
    columns, forwards = positions.shape[1], at.shape[0]
    block = triton.next_power_of_2(columns)
    _begin_kernel[(ids.shape[0],)](
        ids, positions, root, at, lengths, tokens, end, dropped, offsets, ahead,
        tokens.stride(0), root.stride(0), ids.shape[1], columns, forwards,
        BLOCK_C=block, BLOCK_D=triton.next_power_of_2(forwards), **_warps(max(1, block // 256)),
    )  # fmt: skip


@operator("expand_nodes", writes=("laws",))
def expand_nodes(
    logits: Tensor, temperature: Tensor | None, race: Tensor | None, laws: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """See ``step_reference.expand_nodes``."""
    batch, frontier, vocab = logits.shape
    if laws.stride(2) != 1 or laws.dtype != torch.float32:
        raise ValueError(f"laws must be fp32 with a dense last dimension, not {laws.dtype} {laws.stride()}")
    logits = logits if logits.stride(2) == 1 else logits.contiguous()
    if race is not None and race.stride(2) != 1:
        race = race.contiguous()
    draws, by_rank = _drawn(logits, count)
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    _expand_kernel[(batch * frontier, 1 if race is None else 2)](
        draws, by_rank, laws, logits, temperature, race,
        *laws.stride()[:2], *logits.stride()[:2], *((0, 0) if race is None else race.stride()[:2]),
        frontier, vocab, count,
        BLOCK=block, BLOCK_K=triton.next_power_of_2(count), **_warps(max(1, block // _WARP)),
    )  # fmt: skip
    return draws, by_rank


@operator("place_nodes", writes=("tokens", "parents", "words", "values", "ids", "mask"))
def place_nodes(
    tokens: Tensor,
    parents: Tensor,
    words: Tensor,
    values: Tensor,
    ids: Tensor,
    mask: Tensor | None,
    draws: Tensor,
    by_rank: Tensor,
    laws: Tensor,
    pairs: Tensor | None,
    first: int,
    before: int,
) -> None:
    """See ``step_reference.place_nodes``."""
    batch, frontier, count = draws.shape
    width = ids.shape[1]
    _dense(tokens, parents, words, values, ids, mask, draws, by_rank, pairs)
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
        tokens, parents, words, values, ids, mask, draws, by_rank, laws, pairs,
        *laws.stride()[:2], tokens.shape[1], first, frontier, count, width, before,
        WORDS=words.shape[2], MASK_WORDS=0 if mask is None else mask.shape[1],
        BLOCK=block, WALKED=walked, **_warps(max(1, min(8, block // 256))),
    )  # fmt: skip


@fake("expand_nodes")
def _(
    logits: Tensor, temperature: Tensor | None, race: Tensor | None, laws: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    return _drawn(logits, count)


def _drawn(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Room for the draws and for the probabilities by rank."""
    shape = (*logits.shape[:2], count)
    draws = torch.empty(shape, dtype=torch.int64, device=logits.device)
    return draws, torch.empty(shape, dtype=torch.float32, device=logits.device)


def _dense(*tensors: Tensor | None) -> None:
    if not all(x is None or x.is_contiguous() for x in tensors):
        raise ValueError("buffers of a growing tree must be contiguous")


def _warps(count: int) -> dict[str, int]:
    return {} if knobs.runtime.interpret else {"num_warps": count}

"""Triton kernels that grow a token tree between the forwards of a draft model.

Two launches a depth. The first has a program for every frontier node: softmax, and the most probable
tokens, or the draws. The second (``place_kernels``) has one for every sequence, which chooses the
places of the new nodes and writes all that is known of them, the inputs of the next forward included.

Both rank by one integer that is made of a number's bits and an index: the larger number first, the lower
index among equals, and what is not a number before all others.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from triforce_tree.kernels.step.grow import empty_draws

# Tokens that a program of the first launch looks at together, and those of each of its warps.
_BLOCK = 8192
_WARP = 512
FIRST = tl.constexpr(2**63 - 1)
LAST = tl.constexpr(-(2**62))
_LOW = tl.constexpr(2**32 - 1)
_GONE = tl.constexpr(-2)
# Up to so many draws a node are ordered by comparing each with each.
_PAIRWISE = tl.constexpr(64)


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
def bits_of(number):
    """What is not negative as int32 that compare alike; not a number stands above infinity."""
    return tl.where(number == number, number.to(tl.int32, bitcast=True), 0x7FC00000)


@triton.jit
def rank_word(bits, index):
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
    probs_ptr,  # fp32 [B, F, V] with strides
    logits_ptr,  # [B, F, V] with strides
    temperature_ptr,  # fp32 [], or None
    noise_ptr,  # fp32 [B, F, V] with strides, or None: draws are the most probable tokens
    probs_b,
    probs_f,
    logits_b,
    logits_f,
    noise_b,
    noise_f,
    frontier,
    vocab,
    count,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    sequence, node = row // frontier, row % frontier
    logits_ptr += sequence * logits_b + node * logits_f
    probs_ptr += sequence * probs_b + node * probs_f
    # Where tokens are drawn, a second program ranks by probability. Masks below are blocks on both sides:
    # Triton's interpreter makes none of a block and a scalar.
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
    words = tl.where(lane < count, -1 - lane.to(tl.int64), FIRST)
    least = tl.min(words, 0)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < vocab
        drawing = inside & (token * 0 + part == 0)
        prob = tl.exp(_scores(logits_ptr, cold, start, vocab, BLOCK) - most) * share
        tl.store(probs_ptr + token, prob, mask=drawing)
        if noise_ptr is not None:
            at = noise_ptr + sequence * noise_b + node * noise_f + token
            prob = tl.div_rn(prob, tl.load(at, mask=drawing, other=1.0))
        bits = tl.where(inside, bits_of(prob), _GONE)
        best = tl.max(bits, 0)
        winner = tl.min(tl.where(bits == best, token, 2147483647), 0)
        word = rank_word(best, winner)
        while word > least:
            words = tl.where(words == least, word, words)
            least = tl.min(words, 0)
            bits = tl.where(token == winner, _GONE, bits)
            best = tl.max(bits, 0)
            winner = tl.min(tl.where(bits == best, token, 2147483647), 0)
            word = rank_word(best, winner)

    words = tl.where(lane < count, words, LAST)
    if BLOCK_K <= _PAIRWISE:
        rank = tl.sum((words[None, :] > words[:, None]).to(tl.int32), 1)
        token, number = _unpacked(words, noise_ptr is not None)
        out = row * count + rank
        tl.store(draws_ptr + out, token, mask=(lane < count) & (lane * 0 + part == 0))
        if noise_ptr is None:
            tl.store(ranks_ptr + out, number, mask=lane < count)
        else:
            tl.store(ranks_ptr + out, number, mask=(lane < count) & (lane * 0 + part == 1))
    else:
        for rank in range(count):
            word = tl.max(words, 0)
            words = tl.where(words == word, LAST, words)
            token, number = _unpacked(word, noise_ptr is not None)
            if part == 0:
                tl.store(draws_ptr + row * count + rank, token)
            if part == 1 or noise_ptr is None:
                tl.store(ranks_ptr + row * count + rank, number)


@triton.jit
def _unpacked(word, RACED: tl.constexpr):
    """Token and number of a word; -1 where there is no token, or where it never wins a race."""
    token = tl.where(word < 0, -1, _LOW - (word & _LOW))
    number = tl.where(word < 0, 0, word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    if RACED:
        token = tl.where(number > 0.0, token, -1)
    return token, number


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
    check_dense(ids, positions, at, lengths, offsets, ahead, end, dropped)
    columns, forwards = positions.shape[1], at.shape[0]
    block = triton.next_power_of_2(columns)
    _begin_kernel[(ids.shape[0],)](
        ids, positions, root, at, lengths, tokens, end, dropped, offsets, ahead,
        tokens.stride(0), root.stride(0), ids.shape[1], columns, forwards,
        BLOCK_C=block, BLOCK_D=triton.next_power_of_2(forwards), **warps(max(1, block // 256)),
    )  # fmt: skip


def expand_nodes(
    logits: Tensor, temperature: Tensor | None, exponential: Tensor | None, probs: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """See ``grow.expand_nodes``."""
    batch, frontier, vocab = logits.shape
    if probs.stride(2) != 1 or probs.dtype != torch.float32:
        raise ValueError(
            f"probs must be fp32 with a dense last dimension, not {probs.dtype} {probs.stride()}"
        )
    logits = logits if logits.stride(2) == 1 else logits.contiguous()
    if exponential is not None and exponential.stride(2) != 1:
        exponential = exponential.contiguous()
    draws, by_rank = empty_draws(logits, count)
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    _expand_kernel[(batch * frontier, 1 if exponential is None else 2)](
        draws, by_rank, probs, logits, temperature, exponential,
        *probs.stride()[:2], *logits.stride()[:2],
        *((0, 0) if exponential is None else exponential.stride()[:2]),
        frontier, vocab, count,
        BLOCK=block, BLOCK_K=triton.next_power_of_2(count), **warps(max(1, block // _WARP)),
    )  # fmt: skip
    return draws, by_rank


def check_dense(*tensors: Tensor | None) -> None:
    if not all(x is None or x.is_contiguous() for x in tensors):
        raise ValueError("buffers of a growing tree must be contiguous")


def warps(count: int) -> dict[str, int]:
    return {} if knobs.runtime.interpret else {"num_warps": count}

"""Triton kernels that grow a token tree between the forwards of a draft model.

Two launches a depth. The first has a program for every frontier node: softmax, and the most probable
tokens, or the draws. The second (``place_kernels``) has one for every sequence, which chooses the
parents and ranks of the new nodes and writes their fields and the inputs of the next forward.

Both sort by an int64 key made of a number's bits and an index: the larger number first, the lower index
among equals, and NaN before all others.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from triforce_tree.kernels.launching import warps
from triforce_tree.kernels.step.grow import empty_draws

# Tokens in a block of the first launch, and those of each of its warps.
_BLOCK = 8192
_WARP = 512
FIRST = tl.constexpr(2**63 - 1)
LAST = tl.constexpr(-(2**62))
_LOW = tl.constexpr(2**32 - 1)
_REMOVED = tl.constexpr(-2)
# Up to this many draws per node are ordered by comparing every pair.
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
def bits_of(number):
    """Non-negative fp32 as int32 that compare the same way; NaN compares above infinity."""
    return tl.where(number == number, number.to(tl.int32, bitcast=True), 0x7FC00000)


@triton.jit
def rank_key(bits, index):
    """Sort key of a number: by value, then the lower index first; negative where ``bits`` is negative."""
    return (bits.to(tl.int64) << 32) + (_LOW - index.to(tl.int64))


@triton.jit
def _scores(logits_ptr, inverse_temperature, start, vocab, BLOCK: tl.constexpr):
    token = start + tl.arange(0, BLOCK)
    return (
        tl.load(logits_ptr + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        * inverse_temperature
    )


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
    # Where tokens are drawn, a second program ranks by probability. Both operands of the masks below are
    # blocks: Triton's interpreter cannot combine a block with a scalar.
    part = tl.program_id(1)
    inverse_temperature = tl.full([], 1.0, tl.float32)
    if temperature_ptr is not None:
        inverse_temperature /= tl.load(temperature_ptr)

    top = tl.full([BLOCK], -3.0e38, tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        score = _scores(logits_ptr, inverse_temperature, start, vocab, BLOCK)
        higher = tl.maximum(top, score)
        mass = mass * tl.exp(top - higher) + tl.exp(score - higher)
        top = higher
    most = tl.max(top, 0)
    share = 1.0 / tl.sum(mass * tl.exp(top - most), 0)

    # The largest keys so far, unordered; empty entries are negative, and those from K on are never replaced.
    entry = tl.arange(0, BLOCK_K)
    keys = tl.where(entry < count, -1 - entry.to(tl.int64), FIRST)
    least_key = tl.min(keys, 0)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < vocab
        drawing = inside & (token * 0 + part == 0)
        prob = tl.exp(_scores(logits_ptr, inverse_temperature, start, vocab, BLOCK) - most) * share
        tl.store(probs_ptr + token, prob, mask=drawing)
        if noise_ptr is not None:
            at = noise_ptr + sequence * noise_b + node * noise_f + token
            prob = tl.div_rn(prob, tl.load(at, mask=drawing, other=1.0))
        bits = tl.where(inside, bits_of(prob), _REMOVED)
        best = tl.max(bits, 0)
        best_token = tl.min(tl.where(bits == best, token, 2147483647), 0)
        key = rank_key(best, best_token)
        while key > least_key:
            keys = tl.where(keys == least_key, key, keys)
            least_key = tl.min(keys, 0)
            bits = tl.where(token == best_token, _REMOVED, bits)
            best = tl.max(bits, 0)
            best_token = tl.min(tl.where(bits == best, token, 2147483647), 0)
            key = rank_key(best, best_token)

    keys = tl.where(entry < count, keys, LAST)
    if BLOCK_K <= _PAIRWISE:
        rank = tl.sum((keys[None, :] > keys[:, None]).to(tl.int32), 1)
        token, number = _unpacked(keys, noise_ptr is not None)
        out = row * count + rank
        tl.store(draws_ptr + out, token, mask=(entry < count) & (entry * 0 + part == 0))
        if noise_ptr is None:
            tl.store(ranks_ptr + out, number, mask=entry < count)
        else:
            tl.store(ranks_ptr + out, number, mask=(entry < count) & (entry * 0 + part == 1))
    else:
        for rank in range(count):
            key = tl.max(keys, 0)
            keys = tl.where(keys == key, LAST, keys)
            token, number = _unpacked(key, noise_ptr is not None)
            if part == 0:
                tl.store(draws_ptr + row * count + rank, token)
            if part == 1 or noise_ptr is None:
                tl.store(ranks_ptr + row * count + rank, number)


@triton.jit
def _unpacked(key, SAMPLED: tl.constexpr):
    """Token and number of a key; token -1 where the entry is empty, or was SAMPLED with probability 0."""
    token = tl.where(key < 0, -1, _LOW - (key & _LOW))
    number = tl.where(key < 0, 0, key >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    if SAMPLED:
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

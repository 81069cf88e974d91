"""Triton kernel of ``truncation.truncate_scores``, which finds thresholds without sorting.

One program finds the threshold of a row digit by digit, in base 4 from the most significant bits of the
scores on: each of 16 passes over the row counts the scores above three candidates (for top-k), or sums the
probabilities below them (for top-p). The row stays in the L2 cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from triforce_tree.kernels.launching import matrix, warps

_BLOCK = 4096
_HALF = tl.constexpr(2**31)


@triton.jit
def _keys(scores):
    """Returns int32 that compare like the scores, with NaN above infinity."""
    # This makes -0.0 equal to 0.0.
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(scores == scores, keys, 0x7FFFFFFF)


@triton.jit
def _read(scores_ptr, start, vocab, BLOCK: tl.constexpr):
    token = start + tl.arange(0, BLOCK)
    return tl.load(scores_ptr + token, mask=token < vocab, other=float("-inf")), token < vocab


@triton.jit
def _weights(scores, most, keys, inside, least, MASS: tl.constexpr):
    """Returns what each score adds: 1, or exp(score - most) with MASS; 0 below the key ``least``."""
    counted = inside & (keys >= least)
    if MASS:
        return tl.where(counted, tl.exp(scores - most), 0.0)
    return counted.to(tl.float32)


@triton.jit
def _passes(weight, goal, MASS: tl.constexpr):
    if MASS:
        return (weight <= goal).to(tl.int64)
    return (weight >= goal).to(tl.int64)


@triton.jit
def _threshold(scores_ptr, vocab, most, least, goal, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the largest key of which at least ``goal`` scores are not lower; with MASS, the largest key
    below which the scores weigh at most ``goal``.
    """
    # Keys plus 2**31, of which the digits up to now are known.
    found = tl.full([], 0, tl.int64)
    for step in range(16):
        unit = tl.full([], 1, tl.int64) << (30 - 2 * step)
        first, second, third = (
            (found + unit - _HALF).to(tl.int32),
            (found + 2 * unit - _HALF).to(tl.int32),
            (found + 3 * unit - _HALF).to(tl.int32),
        )
        of_first = tl.zeros([BLOCK], tl.float32)
        of_second = tl.zeros([BLOCK], tl.float32)
        of_third = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            scores, inside = _read(scores_ptr, start, vocab, BLOCK)
            keys = _keys(scores)
            weights = _weights(scores, most, keys, inside, least, MASS)
            of_first += tl.where((keys < first) == MASS, weights, 0.0)
            of_second += tl.where((keys < second) == MASS, weights, 0.0)
            of_third += tl.where((keys < third) == MASS, weights, 0.0)
        digit = (
            _passes(tl.sum(of_first, 0), goal, MASS)
            + _passes(tl.sum(of_second, 0), goal, MASS)
            + _passes(tl.sum(of_third, 0), goal, MASS)
        )
        found += digit * unit
    return (found - _HALF).to(tl.int32)


@triton.jit
def truncate_kernel(
    kept_ptr,  # fp32 [B * T, V]
    scores_ptr,  # fp32 [B * T, V], with a stride between rows
    top_k_ptr,  # int64 [B]
    top_p_ptr,  # fp64 [B]
    min_p_ptr,  # fp64 [B]
    scores_r,
    nodes,
    vocab,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    sequence = row // nodes
    scores_ptr += row * scores_r
    kept_ptr += row * vocab
    k = tl.load(top_k_ptr + sequence)
    rest = (1.0 - tl.load(top_p_ptr + sequence)).to(tl.float32)
    ratio = tl.load(min_p_ptr + sequence).to(tl.float32)

    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        scores, _inside = _read(scores_ptr, start, vocab, BLOCK)
        largest = tl.maximum(largest, scores)
    most = tl.max(largest, 0)

    least = tl.full([], -2147483648, tl.int32)
    if (k > 0) & (k < vocab):
        least = _threshold(scores_ptr, vocab, most, least, k.to(tl.float32), False, BLOCK)
    # Of the scores with the key ``least``, those before number ``dropped`` are removed.
    dropped = tl.full([], 0, tl.int32)
    if rest > 0.0:
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            scores, inside = _read(scores_ptr, start, vocab, BLOCK)
            total += _weights(scores, most, _keys(scores), inside, least, True)
        goal = rest * tl.sum(total, 0)
        found = _threshold(scores_ptr, vocab, most, least, goal, True, BLOCK)
        found = tl.minimum(found, tl.max(_keys(largest), 0))
        below = tl.zeros([BLOCK], tl.float32)
        equal = tl.zeros([BLOCK], tl.float32)
        count = tl.zeros([BLOCK], tl.int32)
        for start in range(0, vocab, BLOCK):
            scores, inside = _read(scores_ptr, start, vocab, BLOCK)
            keys = _keys(scores)
            weights = _weights(scores, most, keys, inside, least, True)
            below += tl.where(keys < found, weights, 0.0)
            equal += tl.where(keys == found, weights, 0.0)
            count += (inside & (keys == found)).to(tl.int32)
        ties = tl.sum(count, 0)
        # A score whose exponential is 0 is never the last that stays.
        each = tl.sum(equal, 0) / tl.maximum(ties, 1)
        more = tl.floor((goal - tl.sum(below, 0)) / each)
        dropped = tl.maximum(tl.minimum(more, ties - 1.0), 0.0).to(tl.int32)
        least = found

    before = tl.full([], 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        scores, inside = _read(scores_ptr, start, vocab, BLOCK)
        keys = _keys(scores)
        tie = (inside & (keys == least)).to(tl.int32)
        number = before + tl.cumsum(tie, 0) - tie
        stays = (keys > least) | ((tie > 0) & (number >= dropped))
        stays = (stays & (tl.exp(scores - most) >= ratio)) | (scores != scores)
        tl.store(kept_ptr + start + tl.arange(0, BLOCK), tl.where(stays, scores, float("-inf")), mask=inside)
        before += tl.sum(tie, 0)


def truncate_scores(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """See ``truncation.truncate_scores``. Of equal scores, those of the highest ids stay.

    Raises:
        ValueError: scores are not fp32.
    """
    if scores.dtype != torch.float32:
        raise ValueError(f"scores are {scores.dtype}; the kernel takes float32")
    batch, nodes, vocab = scores.shape
    rows, kept = matrix(scores), torch.empty(scores.shape, dtype=torch.float32, device=scores.device)
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    truncate_kernel[(batch * nodes,)](
        kept, rows, top_k, top_p, min_p, rows.stride(0), nodes, vocab,
        BLOCK=block, **warps(max(1, block // 512)),
    )  # fmt: skip
    return kept

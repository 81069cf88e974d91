"""Triton kernels of ``truncation.truncate_scores``, which find thresholds without sorting.

Each launch has a program for every slice of a row. The *step* of a score is an integer that grows with its
distance from the largest score of the row, by as much for each doubling.

1. The first launch finds the largest score of each slice.
2. The second counts the scores in 128 ranges of steps. The counts say in which ranges the threshold may be,
   because all scores of a range have about the same probability.
3. The third divides these ranges again. It does so only in rows where they hold many scores.
4. The last writes all scores outside these ranges, and lists those inside. The last program of a row to end
   finds the threshold among them.

Counts and sums are integers, so their order does not matter: a row's result depends on the row alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from triforce_tree.kernels.launching import launched_early, matrix, wait_for_previous, warps

# Approximate number of slices of a row, and the most scores of a slice.
_SLICES, _MOST_BLOCK = 64, 4096
# Most scores of a row that are listed, of which a program compares this many at once.
_LISTED, _COMPARED = 4096, 512
# Ranges of steps, and the binary logarithm of their widths: 16 ranges for each doubling.
_RANGES, _WIDTH = tl.constexpr(128), tl.constexpr(19)
# The step of a score is the bits of its distance plus 4, minus the bits of 4. -inf has the last step.
_ORIGIN, _LAST_STEP = tl.constexpr(0x40800000), tl.constexpr(0x3F000000)
# Weights are summed in units of 2**-44, so that fewer than 2**19 scores weigh less than 2**63.
_UNITS = tl.constexpr(2.0**44)
# Lower than all scores; -inf would give NaN in rows without scores.
_FLOOR = tl.constexpr(-3.0e38)
# Bits of an entry below those of its score, see ``_entries``, and a number lower than all entries.
_TOKEN_BITS, _NO_ENTRY = tl.constexpr(20), tl.constexpr(-(2**60))


@triton.jit
def _options(top_k_ptr, top_p_ptr, sequence, vocab):
    """Returns k and 1 - p of a sequence, each 0 where it removes nothing."""
    k = tl.load(top_k_ptr + sequence)
    return tl.where(k < vocab, k, 0), (1.0 - tl.load(top_p_ptr + sequence)).to(tl.float32)


@triton.jit
def _largest(top_ptr, slices, BLOCK_S: tl.constexpr):
    each = tl.arange(0, BLOCK_S)
    return tl.max(tl.load(top_ptr + each, mask=each < slices, other=_FLOOR), 0)


@triton.jit
def _steps(scores, most):
    distance = most - scores
    steps = (distance + 4.0).to(tl.int32, bitcast=True) - _ORIGIN
    return tl.where(distance == distance, steps, 0)


@triton.jit
def _units(scores, most):
    """Returns exp(score - most) in int64 units."""
    weights = tl.exp(scores - most)
    return (tl.where(weights == weights, weights, 0.0) * _UNITS).to(tl.int64)


@triton.jit
def _narrowed(counts_ptr, first, stop, width, k, rest, above, below):
    """Returns the steps ``[first, stop)`` between which the threshold is, and the number of their scores.

    Args:
        counts_ptr: int32 ``[128]``, numbers of scores in ranges of ``2**width`` steps from ``first`` on.
        first, stop: steps between which the threshold is known to be.
        k, rest: see ``_options``. With top-k nothing above its threshold is excluded, because top-p needs the
            sum of its weights.
        above, below: weight of the scores before ``first`` and from ``stop`` on.
    """
    each = tl.arange(0, _RANGES)
    count = tl.load(counts_ptr + each)
    if k > 0:
        begin = tl.full([], 0, tl.int32)
        end = tl.sum((tl.cumsum(count, 0) < k).to(tl.int32), 0) + 1
    else:
        near = tl.minimum(first + (each << width), _LAST_STEP)
        far = tl.minimum(near + (1 << width), _LAST_STEP)
        heavy = count * tl.exp(4.0 - (near + _ORIGIN).to(tl.float32, bitcast=True))
        light = count * tl.exp(4.0 - (far + _ORIGIN).to(tl.float32, bitcast=True))
        # Bounds of the weight of all scores from each range on.
        at_most, at_least = (
            tl.cumsum(heavy, 0, reverse=True) + below,
            tl.cumsum(light, 0, reverse=True) + below,
        )
        # A thousandth is more than the sums are rounded by. The largest score weighs 1.
        surely_kept = 1.001 * rest * (above + tl.max(at_most, 0))
        surely_removed = 0.999 * rest * tl.maximum(above + tl.max(at_least, 0), 1.0)
        begin = tl.maximum(tl.sum((at_least > surely_kept).to(tl.int32), 0) - 1, 0)
        end = tl.maximum(tl.sum((at_most > surely_removed).to(tl.int32), 0), 1)
    number = tl.sum(tl.where((each >= begin) & (each < end), count, 0), 0)
    return first + (begin << width), tl.where(end < _RANGES, first + (end << width), stop), number


@triton.jit
def _finer(first, stop):
    """Returns the least width of ranges of which 128 hold all steps ``[first, stop)``."""
    return tl.sum((((stop - 1 - first) >> tl.arange(0, 32)) >= _RANGES).to(tl.int32), 0)


@triton.jit
def largest_kernel(
    top_ptr,  # fp32 [R, S], largest score of a slice
    counts_ptr,  # int32 [R, 2, 128], numbers of scores in ranges of steps, and in ranges of one of them
    sums_ptr,  # int64 [R, 2, 2], weight of the scores above and below the ranges that are divided or listed
    marks_ptr,  # int32 [R, 2], number of listed scores, and of programs of the last launch that have ended
    scores_ptr,  # fp32 [R, V], with a stride between rows
    scores_r,
    vocab,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(scores_ptr + row * scores_r + token, mask=token < vocab, other=float("-inf"))
    top = tl.max(tl.where(score == score, score, float("-inf")), 0)
    tl.store(top_ptr + row * tl.num_programs(1) + part, tl.maximum(top, _FLOOR))
    if part == 0:
        every = tl.arange(0, 2 * _RANGES)
        tl.store(counts_ptr + row * 2 * _RANGES + every, every * 0)
        tl.store(sums_ptr + row * 4 + tl.arange(0, 4), tl.zeros([4], tl.int64))
        tl.store(marks_ptr + row * 2 + tl.arange(0, 2), tl.zeros([2], tl.int32))


@triton.jit
def count_kernel(
    counts_ptr,  # int32 [R, 2, 128]
    sums_ptr,  # int64 [R, 2, 2]
    top_ptr,  # fp32 [R, S]
    scores_ptr,  # fp32 [R, V], with a stride between rows
    top_k_ptr,  # int64 [B]
    top_p_ptr,  # fp64 [B]
    scores_r,
    nodes,
    vocab,
    AGAIN: tl.constexpr,  # whether ranges are divided
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    counts_ptr += row * 2 * _RANGES
    k, rest = _options(top_k_ptr, top_p_ptr, row // nodes, vocab)
    first, stop = tl.full([], 0, tl.int32), tl.full([], _LAST_STEP + 1, tl.int32)
    width = tl.full([], _WIDTH, tl.int32)
    many = (k > 0) | (rest > 0.0)
    if AGAIN:
        if many:
            first, stop, number = _narrowed(counts_ptr, first, stop, width, k, rest, 0.0, 0.0)
            many = number > LISTED
        width = _finer(first, stop)
        counts_ptr += _RANGES
    if many:
        most = _largest(top_ptr + row * tl.num_programs(1), tl.num_programs(1), BLOCK_S)
        token = part * BLOCK + tl.arange(0, BLOCK)
        score = tl.load(scores_ptr + row * scores_r + token, mask=token < vocab, other=float("-inf"))
        step = _steps(score, most)
        inside = (token < vocab) & (step >= first) & (step < stop)
        at = tl.minimum(tl.where(inside, step - first, 0) >> width, _RANGES - 1)
        found = tl.histogram(at, _RANGES, mask=inside)
        tl.atomic_add(counts_ptr + tl.arange(0, _RANGES), found, mask=found > 0, sem="relaxed")
        if AGAIN:
            _add_outside(sums_ptr + row * 4, score, step, most, first, stop)


@triton.jit
def _add_outside(sums_ptr, score, step, most, first, stop):
    """Adds the weight of the scores before ``first`` and from ``stop`` on to two int64 sums."""
    units = _units(score, most)
    tl.atomic_add(sums_ptr, tl.sum(tl.where(step < first, units, 0), 0), sem="relaxed")
    tl.atomic_add(sums_ptr + 1, tl.sum(tl.where(step >= stop, units, 0), 0), sem="relaxed")


@triton.jit
def _entries(listing, start, BLOCK: tl.constexpr):
    """Returns tokens, their scores, and int64 entries, which sort by score and then by token.

    Args:
        listing: tuple of

            - scores_ptr: fp32 ``[V]``.
            - list_ptr: int32 ``[count]``, tokens.
            - count: number of listed tokens, or V if the list does not hold all, so that it is not read.
            - whole: whether that is so.
            - most: the largest score.
            - first, stop: tokens whose scores have other steps have the entry ``_NO_ENTRY``.
    """
    scores_ptr, list_ptr, count, whole, most, first, stop = listing
    token = start + tl.arange(0, BLOCK)
    inside, listed = token < count, token * 0 + whole == 0
    token = tl.where(listed, tl.load(list_ptr + token, mask=inside & listed, other=0), token)
    score = tl.load(scores_ptr + token, mask=inside, other=float("-inf"))
    step = _steps(score, most)
    # This makes -0.0 equal to 0.0.
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    entry = (tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) << _TOKEN_BITS) + token
    asked = (step >= first) & (step < stop) & (score > float("-inf"))
    return token, score, tl.where(asked, entry, _NO_ENTRY)


@triton.jit
def _extent(listing, count, most, bound, BLOCK: tl.constexpr):
    """Returns the lowest and the highest entry from ``bound`` on, and the sum of their weights."""
    low, high = tl.full([], 2**60, tl.int64), tl.full([], _NO_ENTRY, tl.int64)
    total = tl.full([], 0, tl.int64)
    for start in range(0, count, BLOCK):
        _token, score, entry = _entries(listing, start, BLOCK)
        low = tl.minimum(low, tl.min(tl.where(entry >= bound, entry, 2**60), 0))
        high = tl.maximum(high, tl.max(entry, 0))
        total += tl.sum(tl.where(entry >= bound, _units(score, most), 0), 0)
    return low, high, total


@triton.jit
def _threshold(listing, count, most, low, last, goal, beyond, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Returns a bound, from which on entries stay.

    With MASS it removes as many of the entries from ``low`` on as weigh at most ``goal``. Without, it is a
    bound of entries without tokens, and keeps the ``goal`` largest and their equals. Each pass over the
    entries takes a quarter of the interval, until it holds a single entry.

    Args:
        low, last: int64, between which the bound is.
        beyond: 1 if ``last`` is above all entries, else 0.
    """
    quarter = tl.arange(0, 4)
    found, span, higher, between = low, last - low, tl.full([], 0, tl.int32), tl.full([], 2, tl.int32)
    while (span > 0) & (between > 1):
        unit = (span >> 2) + 1
        bounds = found + quarter * unit
        number, weight = tl.zeros([4], tl.int32), tl.zeros([4], tl.int64)
        for start in range(0, count, BLOCK):
            _token, score, entry = _entries(listing, start, BLOCK)
            value = entry if MASS else entry >> _TOKEN_BITS
            reaches = value[None, :] >= bounds[:, None]
            number += tl.sum(reaches.to(tl.int32), 1)
            if MASS:
                units = tl.where(entry >= low, _units(score, most), 0)
                weight += tl.sum(tl.where(reaches, 0, units[None, :]), 1)
        passes = (weight <= goal) if MASS else (number >= goal)
        digit = tl.maximum(tl.sum((passes & (bounds <= last)).to(tl.int32), 0), 1) - 1
        higher = tl.where(digit == 3, higher, tl.sum(tl.where(quarter == digit + 1, number, 0), 0))
        found += digit * unit
        span = tl.minimum(unit - 1, last - found)
        between = tl.sum(tl.where(quarter == digit, number, 0), 0) - higher
        between += tl.where(found + span == last, beyond, 0)
    return found


@triton.jit
def _keep_listed(
    kept_ptr, list_ptr, marks_ptr, sums_ptr, scores_ptr, most, first, stop, k, rest, ratio, vocab,
    LISTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the scores of the listed tokens of a row, see ``keep_kernel``."""
    count = tl.load(marks_ptr, cache_modifier=".cg")
    whole = (count > LISTED).to(tl.int32)
    count = tl.where(whole > 0, vocab, count)
    listing = (scores_ptr, list_ptr, count, whole, most, first, stop)
    bound = tl.full([], _NO_ENTRY + 1, tl.int64)
    if k > 0:
        low, high, total = _extent(listing, count, most, bound, BLOCK)
        low, high = low >> _TOKEN_BITS, high >> _TOKEN_BITS
        bound = _threshold(listing, count, most, low, high, k, 0, False, BLOCK) << _TOKEN_BITS
    if rest > 0.0:
        low, high, total = _extent(listing, count, most, bound, BLOCK)
        above = tl.load(sums_ptr, cache_modifier=".cg")
        below = tl.load(sums_ptr + 1, cache_modifier=".cg")
        goal = (rest.to(tl.float64) * (above + total + below).to(tl.float64)).to(tl.int64) - below
        # If other tokens stay, all that are listed may be removed.
        beyond = (first > 0).to(tl.int32)
        bound = _threshold(listing, count, most, low, high + beyond, goal, beyond, True, BLOCK)
    for start in range(0, count, BLOCK):
        token, score, entry = _entries(listing, start, BLOCK)
        stays = (entry >= bound) & (tl.exp(score - most) >= ratio)
        tl.store(kept_ptr + token, tl.where(stays, score, float("-inf")), mask=entry > _NO_ENTRY)


@triton.jit
def keep_kernel(
    kept_ptr,  # fp32 [R, V]
    list_ptr,  # int32 [R, LISTED], scratch: tokens among which the threshold is, in any order
    marks_ptr,  # int32 [R, 2]
    counts_ptr,  # int32 [R, 2, 128]
    sums_ptr,  # int64 [R, 2, 2]
    top_ptr,  # fp32 [R, S]
    scores_ptr,  # fp32 [R, V], with a stride between rows
    top_k_ptr,  # int64 [B]
    top_p_ptr,  # fp64 [B]
    min_p_ptr,  # fp64 [B]
    scores_r,
    nodes,
    vocab,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_L: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row, part, slices = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    scores_ptr += row * scores_r
    kept_ptr += row * vocab
    list_ptr += row * LISTED
    marks_ptr += row * 2
    counts_ptr += row * 2 * _RANGES
    sums_ptr += row * 4
    k, rest = _options(top_k_ptr, top_p_ptr, row // nodes, vocab)
    ratio = tl.load(min_p_ptr + row // nodes).to(tl.float32)
    most = _largest(top_ptr + row * slices, slices, BLOCK_S)
    first, stop = tl.full([], _LAST_STEP + 1, tl.int32), tl.full([], _LAST_STEP + 1, tl.int32)
    searched = (k > 0) | (rest > 0.0)
    if searched:
        width = tl.full([], _WIDTH, tl.int32)
        first, stop, number = _narrowed(counts_ptr, 0, stop, width, k, rest, 0.0, 0.0)
        if number > LISTED:
            above, below = tl.load(sums_ptr) / _UNITS, tl.load(sums_ptr + 1) / _UNITS
            width = _finer(first, stop)
            counts_ptr += _RANGES
            first, stop, number = _narrowed(counts_ptr, first, stop, width, k, rest, above, below)

    token = part * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(scores_ptr + token, mask=token < vocab, other=float("-inf"))
    step, improbable = _steps(score, most), tl.exp(score - most) < ratio
    asked = (step >= first) & (step < stop) & (score > float("-inf"))
    stays = ((step < first) & (improbable == 0)) | (score != score)
    outside = (token < vocab) & (asked == 0)
    tl.store(kept_ptr + token, tl.where(stays, score, float("-inf")), mask=outside)
    if searched:
        own = tl.sum(asked.to(tl.int32), 0)
        if own > 0:
            place = tl.atomic_add(marks_ptr, own, sem="relaxed") + tl.cumsum(asked.to(tl.int32), 0) - 1
            tl.store(list_ptr + place, token, mask=asked & (place < LISTED))
        if k == 0:
            _add_outside(sums_ptr + 2, score, step, most, first, stop)
        # All threads must have written before one thread increments the counter.
        tl.debug_barrier()
        if tl.atomic_add(marks_ptr + 1, 1, sem="acq_rel", scope="gpu") == slices - 1:
            _keep_listed(
                kept_ptr, list_ptr, marks_ptr, sums_ptr + 2, scores_ptr, most, first, stop, k, rest, ratio,
                vocab, LISTED, BLOCK_L,
            )  # fmt: skip


def truncate_scores(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """See ``truncation.truncate_scores``. Of equal scores, those of the highest ids stay.

    Raises:
        ValueError: scores are not fp32.
    """
    if scores.dtype != torch.float32:
        raise ValueError(f"scores are {scores.dtype}; the kernel takes float32")
    batch, nodes, vocab = scores.shape
    flat, kept = matrix(scores), torch.empty(scores.shape, dtype=torch.float32, device=scores.device)
    rows, stride = batch * nodes, flat.stride(0)
    block = min(_MOST_BLOCK, triton.next_power_of_2(triton.cdiv(vocab, _SLICES)))
    grid = rows, triton.cdiv(vocab, block)
    tops = torch.empty(grid, dtype=torch.float32, device=scores.device)
    counts, marks, listed = (
        torch.empty(rows, size, dtype=torch.int32, device=scores.device)
        for size in (2 * _RANGES.value, 2, _LISTED)
    )
    sums = torch.empty(rows, 4, dtype=torch.int64, device=scores.device)
    options = {**launched_early(scores.device), **warps(max(4, block // 512))}
    ranges = {"LISTED": _LISTED, "BLOCK_S": triton.next_power_of_2(grid[1])}
    largest_kernel[grid](tops, counts, sums, marks, flat, stride, vocab, BLOCK=block, **options)
    for again in (False, True):
        count_kernel[grid](
            counts, sums, tops, flat, top_k, top_p, stride, nodes, vocab, AGAIN=again, BLOCK=block,
            **ranges, **options,
        )  # fmt: skip
    keep_kernel[grid](
        kept, listed, marks, counts, sums, tops, flat, top_k, top_p, min_p, stride, nodes, vocab,
        BLOCK=block, BLOCK_L=_COMPARED, **ranges, **options,
    )  # fmt: skip
    return kept

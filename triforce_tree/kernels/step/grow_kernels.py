"""Triton kernels of ``grow.expand_nodes``: softmax, and the most probable tokens or draws of frontier nodes.

Two launches have a program for every slice of the vocabulary. The first launch sums exponentials. In the
second launch each program finds the largest keys of its slice, and the last program of a node to end merges
them.

``grow_kernels`` and ``place_kernels`` sort by an int64 key of the bits of a number and an index: larger
numbers come first, of equals the lower index, and NaN before all other numbers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from triforce_tree.kernels.launching import warps
from triforce_tree.kernels.step.draws import FIRST_CHANCE, LATER_CHANCE
from triforce_tree.kernels.step.grow import empty_draws

# Most tokens of a slice, and of each of its warps.
_BLOCK = 8192
_WARP = 512
# Number of slices, fewer where a node has so many draws that more than ``_MERGED`` keys would be merged, and
# more where a slice cannot hold its tokens.
_SLICES, _MERGED = 32, 8192
# Lower than the logits of tokens; -inf would give NaN in blocks without tokens.
_FLOOR = tl.constexpr(-3.0e38)
FIRST = tl.constexpr(2**63 - 1)
LAST = tl.constexpr(-(2**62))
_LOW = tl.constexpr(2**32 - 1)
_FIRST_CHANCE, _LATER_CHANCE = tl.constexpr(FIRST_CHANCE), tl.constexpr(LATER_CHANCE)


@triton.jit
def bits_of(number):
    """Returns int32 that compare like the non-negative fp32 numbers, with NaN above infinity."""
    return tl.where(number == number, number.to(tl.int32, bitcast=True), 0x7FC00000)


@triton.jit
def rank_key(bits, index):
    """Returns int64 sort keys by ``bits``, of equals the lower index; negative if ``bits`` is negative."""
    return (bits.to(tl.int64) << 32) + (_LOW - index.to(tl.int64))


@triton.jit
def _inverse(temperature_ptr, sequence):
    inverse_temperature = tl.full([], 1.0, tl.float32)
    if temperature_ptr is not None:
        inverse_temperature /= tl.load(temperature_ptr + sequence)
    return inverse_temperature


@triton.jit
def _logits(logits_ptr, start, vocab, BLOCK: tl.constexpr):
    token = start + tl.arange(0, BLOCK)
    return tl.load(logits_ptr + token, mask=token < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def _weight(logit, top, inverse_temperature):
    """Returns exp((logit - top) / temperature).

    The difference comes first. The compiler fuses a product and a difference into one instruction that does
    not round the product, and a rounded product with the top differs from it: by 4e22 for a logit of -1e30,
    which a token has that the draft lacks.
    """
    return tl.exp((logit - top) * inverse_temperature)


@triton.jit
def _write_largest(draws_ptr, chances_ptr, keys, count, top_prob, SAMPLED: tl.constexpr):
    """Writes the tokens of the largest keys of a node in order and their chances, see ``draws.FIRST_CHANCE``.

    The token is -1 and the chance 0 where a key is negative, or SAMPLED with probability 0.
    """
    left = tl.full([], 1.0, tl.float32)
    chance = _FIRST_CHANCE + (1.0 - _FIRST_CHANCE) * top_prob * top_prob * top_prob
    for rank in range(count):
        key = tl.max(keys, 0)
        keys = tl.where(keys == key, LAST, keys)
        token = tl.where(key < 0, -1, _LOW - (key & _LOW))
        number = tl.where(key < 0, 0, key >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        if SAMPLED:
            token = tl.where(number > 0.0, token, -1)
            own = left * chance
            number = tl.where(token < 0, 0.0, own)
            left -= own
            chance = _LATER_CHANCE / (rank + 2)
        tl.store(draws_ptr + rank, token)
        tl.store(chances_ptr + rank, number)


@triton.jit
def _sum_kernel(
    top_ptr,  # fp32 [R, S], largest logit of a slice
    mass_ptr,  # fp32 [R, S], sum of exp((logit - largest) / temperature)
    ended_ptr,  # int32 [R], programs of the next launch that have ended
    logits_ptr,  # [B, F, V] with strides
    temperature_ptr,  # fp32 [B], or None
    logits_b,
    logits_f,
    frontier,
    vocab,
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits_ptr += row // frontier * logits_b + row % frontier * logits_f
    logit = _logits(logits_ptr, part * BLOCK, vocab, BLOCK)
    top = tl.maximum(tl.max(logit, 0), _FLOOR)
    out = row * tl.num_programs(1) + part
    tl.store(top_ptr + out, top)
    tl.store(mass_ptr + out, tl.sum(_weight(logit, top, _inverse(temperature_ptr, row // frontier)), 0))
    if part == 0:
        tl.store(ended_ptr + row, 0)


@triton.jit
def _slice_kernel(
    draws_ptr,  # int64 [B, F, K]
    chances_ptr,  # fp32 [B, F, K]
    probs_ptr,  # fp32 [B, F, V] with strides
    logits_ptr,  # [B, F, V] with strides
    temperature_ptr,  # fp32 [B], or None
    noise_ptr,  # fp32 [B, F, V] with strides, or None: draws are the most probable tokens
    key_ptr,  # int64 [R, S, K], scratch: largest keys of a slice
    top_ptr,  # fp32 [R, S]
    mass_ptr,  # fp32 [R, S]
    ended_ptr,  # int32 [R]
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
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    row, own = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence, node = row // frontier, row % frontier
    slices, token = tl.num_programs(1), own * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    logits_ptr += sequence * logits_b + node * logits_f
    inverse_temperature = _inverse(temperature_ptr, sequence)

    each = tl.arange(0, BLOCK_S)
    top = tl.load(top_ptr + row * slices + each, mask=each < slices, other=_FLOOR)
    mass = tl.load(mass_ptr + row * slices + each, mask=each < slices, other=0.0)
    most = tl.max(top, 0)
    share = 1.0 / tl.sum(mass * _weight(top, most, inverse_temperature), 0)
    prob = _weight(_logits(logits_ptr, own * BLOCK, vocab, BLOCK), most, inverse_temperature) * share
    tl.store(probs_ptr + sequence * probs_b + node * probs_f + token, prob, mask=inside)
    if noise_ptr is not None:
        at = noise_ptr + sequence * noise_b + node * noise_f + token
        prob = tl.div_rn(prob, tl.load(at, mask=inside, other=1.0))

    keys = tl.where(inside, rank_key(bits_of(prob), token), LAST)
    key_ptr += row * slices * count
    for rank in range(count):
        key = tl.max(keys, 0)
        keys = tl.where(keys == key, LAST, keys)
        tl.store(key_ptr + own * count + rank, key)
    # All threads must have written their keys before one thread increments the counter.
    tl.debug_barrier()
    ended_before = tl.atomic_add(ended_ptr + row, 1, sem="acq_rel", scope="gpu")
    if ended_before == slices - 1:
        place = tl.arange(0, BLOCK_M)
        found = tl.load(key_ptr + place, mask=place < slices * count, other=LAST, cache_modifier=".cg")
        out = row * count
        # ``share`` is the largest probability: that of a logit equal to the top.
        _write_largest(draws_ptr + out, chances_ptr + out, found, count, share, noise_ptr is not None)


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
    draws, chances = empty_draws(logits, count)
    rows = batch * frontier
    block = min(_BLOCK, triton.next_power_of_2(triton.cdiv(vocab, _SLICES)))
    while block < _BLOCK and triton.cdiv(vocab, block) * count > _MERGED:
        block *= 2
    slices = triton.cdiv(vocab, block)
    merged = triton.next_power_of_2(slices * count)
    tops = torch.empty(rows, slices, dtype=torch.float32, device=logits.device)
    masses = torch.empty_like(tops)
    ended = torch.empty(rows, dtype=torch.int32, device=logits.device)
    keys = torch.empty(rows, slices, count, dtype=torch.int64, device=logits.device)
    _sum_kernel[(rows, slices)](
        tops, masses, ended, logits, temperature, *logits.stride()[:2], frontier, vocab,
        BLOCK=block, **warps(max(1, block // _WARP)),
    )  # fmt: skip
    _slice_kernel[(rows, slices)](
        draws, chances, probs, logits, temperature, exponential, keys, tops, masses, ended,
        *probs.stride()[:2], *logits.stride()[:2],
        *((0, 0) if exponential is None else exponential.stride()[:2]), frontier, vocab, count,
        BLOCK=block, BLOCK_S=triton.next_power_of_2(slices), BLOCK_M=merged,
        **warps(max(1, max(block, merged // 2) // _WARP)),
    )  # fmt: skip
    return draws, chances

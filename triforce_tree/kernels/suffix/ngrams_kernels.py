"""Triton kernels of ``ngrams``."""

import triton
import triton.language as tl
from torch import Tensor

from triforce_tree.kernels.launching import warps
from triforce_tree.kernels.suffix.ngrams import HASH_BITS, KEPT, MOST_ENTRIES, PRIOR_TOKENS, SPREAD

_BLOCK = 256
_SPREAD = tl.constexpr(SPREAD)
_HASH_BITS = tl.constexpr(HASH_BITS)
_KEPT, _PRIOR_TOKENS = tl.constexpr(KEPT), tl.constexpr(PRIOR_TOKENS)


@triton.jit
def _entry(hashed, length, size):
    mixed = (hashed ^ (hashed >> 32)) + length
    return ((mixed * _SPREAD) >> _HASH_BITS) & (size - 1)


@triton.jit
def _index_kernel(
    table_ptr,  # int32 [B, C, S]
    tokens_ptr,  # int64 [B, capacity]
    lengths_ptr,  # int64 [C]
    powers_ptr,  # int64 [largest n]
    first_ptr,  # int64 [B]
    until_ptr,
    tokens_b,
    classes,
    size,
    count,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(first_ptr + sequence) + index
    inside = (index < count) & (position < tl.load(until_ptr + sequence))
    tokens_ptr += sequence * tokens_b
    table_ptr += sequence * classes * size
    hashed = tl.zeros([BLOCK], tl.int64)
    done = tl.full([], 0, tl.int64)
    for row in range(classes):
        length = tl.load(lengths_ptr + row)
        while done < length:
            token = tl.load(tokens_ptr + position - done, mask=inside & (position >= done), other=0)
            hashed += (token + 1) * tl.load(powers_ptr + done)
            done += 1
        place = table_ptr + row * size + _entry(hashed, length, size)
        tl.atomic_max(place, position.to(tl.int32), mask=inside & (position >= length - 1), sem="relaxed")


@triton.jit
def _match_kernel(
    chain_ptr,  # int64 [B, L]
    last_ptr,  # int64 [B, 2]
    counts_ptr,  # fp32 [B, C, 2]
    table_ptr,  # int32 [B, C, S]
    tokens_ptr,  # int64 [B, capacity]
    lengths_ptr,  # int64 [C]
    powers_ptr,  # int64 [n]
    expected_ptr,  # fp32 [C]
    committed_ptr,  # int64 [B]
    end_ptr,
    tokens_b,
    most,
    classes,
    size,
    longest,
    least,
    BLOCK_L: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    chain_ptr += sequence * most
    last_ptr += sequence * 2
    counts_ptr += sequence * classes * 2
    table_ptr += sequence * classes * size
    tokens_ptr += sequence * tokens_b
    end = tl.load(end_ptr + sequence)

    # This counts the tokens of the last proposal that followed.
    slot = tl.arange(0, BLOCK_L)
    before = tl.load(last_ptr)
    kind = tl.load(last_ptr + 1)
    proposed = tl.load(chain_ptr + slot, mask=slot < most, other=-1)
    there = before + 1 + slot
    judged = (proposed >= 0) & (there <= end) & (there > slot)
    token = tl.load(tokens_ptr + there, mask=judged, other=-1)
    right = tl.min(tl.where(judged & (token == proposed), BLOCK_L, slot), 0)
    wrong = tl.max(tl.where(judged & (slot == right), 1, 0), 0)
    followed, seen = right.to(tl.float32), (right + wrong).to(tl.float32)
    if (before >= 0) & (right + wrong > 0):
        tl.store(counts_ptr + kind * 2, tl.load(counts_ptr + kind * 2) * _KEPT + followed)
        tl.store(counts_ptr + kind * 2 + 1, tl.load(counts_ptr + kind * 2 + 1) * _KEPT + seen)

    # ``best`` holds the length and position of the longest match in one int64, of equals the last.
    committed = tl.load(committed_ptr + sequence)
    back = tl.arange(0, BLOCK_N)
    held = (back < longest) & (back <= end)
    newest = tl.load(tokens_ptr + end - back, mask=held, other=-1)
    terms = (newest + 1) * tl.load(powers_ptr + back, mask=held, other=0)
    best = tl.full([], -1, tl.int64)
    for row in range(classes):
        length = tl.load(lengths_ptr + row)
        hashed = tl.sum(tl.where(back < length, terms, 0), 0)
        at = tl.load(table_ptr + row * size + _entry(hashed, length, size)).to(tl.int64)
        real = (at >= 0) & (at < committed) & (length <= end + 1)
        # An entry that is not ``real`` may hold any position, so its tokens are not read.
        at = tl.where(real, at, -1)
        earlier = tl.load(tokens_ptr + at - back, mask=held & (back <= at), other=-2)
        equal = tl.min(tl.where(earlier == newest, BLOCK_N, back), 0).to(tl.int64)
        equal = tl.minimum(equal, longest)
        best = tl.maximum(best, tl.where(equal >= length, (equal << 32) + at, -1))

    tl.debug_barrier()
    found = best >= 0
    agreed, at = best >> 32, best & 0xFFFFFFFF
    kind = tl.full([], 0, tl.int64)
    for row in range(1, classes):
        kind = tl.where(tl.load(lengths_ptr + row) <= agreed, row, kind)
    right_sum, seen_sum = tl.load(counts_ptr + kind * 2), tl.load(counts_ptr + kind * 2 + 1)
    acceptance = right_sum + _PRIOR_TOKENS * tl.load(expected_ptr + kind)
    acceptance = tl.div_rn(acceptance, seen_sum + _PRIOR_TOKENS)
    likely = acceptance * 0.0 + 1.0
    count = tl.full([], 0, tl.int32)
    for _ in range(most):
        likely = likely * acceptance
        count += (likely >= least).to(tl.int32)
    count = tl.where(found, tl.maximum(count, 1), 0)
    period = tl.where(found, end - at, 1)
    source = tl.where(found, at, 0) + 1 + slot % period
    token = tl.load(tokens_ptr + source, mask=slot < count, other=-1)
    tl.store(chain_ptr + slot, token, mask=slot < most)
    tl.store(last_ptr, tl.where(found, end, -1))
    tl.store(last_ptr + 1, kind)


def index_ngrams(
    table: Tensor, tokens: Tensor, lengths: Tensor, powers: Tensor, first: Tensor, until: Tensor, count: int
) -> None:
    """See ``ngrams.index_ngrams``."""
    batch, classes, size = table.shape
    _check(table, tokens, lengths, powers, first, until)
    _index_kernel[(triton.cdiv(count, _BLOCK), batch)](
        table, tokens, lengths, powers, first, until, tokens.stride(0), classes, size, count,
        BLOCK=min(_BLOCK, triton.next_power_of_2(count)), **warps(2),
    )  # fmt: skip


def match_suffix(
    chain: Tensor,
    last: Tensor,
    counts: Tensor,
    table: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    powers: Tensor,
    expected: Tensor,
    committed: Tensor,
    end: Tensor,
    least: float,
) -> None:
    """See ``ngrams.match_suffix``."""
    batch, classes, size = table.shape
    _check(table, tokens, lengths, powers, chain, last, counts, expected, committed, end)
    most, longest = chain.shape[1], powers.shape[0]
    _match_kernel[(batch,)](
        chain, last, counts, table, tokens, lengths, powers, expected, committed, end,
        tokens.stride(0), most, classes, size, longest, least,
        BLOCK_L=triton.next_power_of_2(most), BLOCK_N=triton.next_power_of_2(longest), **warps(1),
    )  # fmt: skip


def _check(table: Tensor, tokens: Tensor, *others: Tensor) -> None:
    size = table.shape[2]
    if size & (size - 1) or size > MOST_ENTRIES:
        raise ValueError(f"a table of {size} entries is not a power of two up to {MOST_ENTRIES}")
    if tokens.stride(1) != 1 or not all(x.is_contiguous() for x in (table, *others)):
        raise ValueError("the kernels of suffix matching need contiguous tensors")

"""Finds where the newest tokens of a sequence occurred before, by hash tables of n-grams.

There is one table for each of C lengths n. An entry holds the last position at which an n-gram with its hash
ends. Adding a token and looking up a suffix access C entries each, whatever the length of the sequence. The
tokens at the found position are compared with the suffix, so a hash collision can hide an occurrence, but
cannot give a false one.

The hash of the n-gram that ends at position i is the sum of (t_{i-j} + 1) powers_j over j < n, modulo 2^64,
where t_i is the token at position i (Karp and Rabin's rolling hash). A multiplication spreads its bits.
"""

import torch
from torch import Tensor

from triforce_tree.kernels.operators import operator

_BASE, SPREAD = 0x2545F4914F6CDD1D, 0x1B873593CC9E2D51
# The 24 bits of the hash above this number of bits are the number of its entry in the table.
HASH_BITS, MOST_ENTRIES = 40, 1 << 24
KEPT = 0.9
"""Factor on earlier counts of a class of matches when new counts are added."""
# Number of positions that the definition hashes at once.
_BLOCK = 4096
PRIOR_TOKENS = 4.0
"""Weight of the expected acceptance rate of a class, in proposed tokens."""


def powers(count: int, device: torch.device) -> Tensor:
    """Returns the powers of the base of the hash modulo 2^64, int64 ``[count]``."""
    values, value = [], 1
    for _ in range(count):
        values.append(value - (1 << 64) if value >> 63 else value)
        value = value * _BASE % (1 << 64)
    return torch.tensor(values, dtype=torch.int64, device=device)


def _entries(hashes: Tensor, lengths: Tensor, size: int) -> Tensor:
    """Returns the entries of n-grams in tables of ``size`` entries (a power of two), by hash and length."""
    mixed = (hashes ^ (hashes >> 32)) + lengths
    return ((mixed * SPREAD) >> HASH_BITS) & (size - 1)


@operator("index_ngrams", writes=("table",), triton=".ngrams_kernels")
def index_ngrams(
    table: Tensor, tokens: Tensor, lengths: Tensor, powers: Tensor, first: Tensor, until: Tensor, count: int
) -> None:
    """Adds the n-grams that end at positions ``first[b]`` to ``until[b] - 1``, at most ``count`` of them.

    Args:
        table: int32 ``[B, C, S]``, last position of each n-gram by its hash, -1 for none; written. S is a
            power of two.
        tokens: int64 ``[B, capacity]``.
        lengths: int64 ``[C]``, ascending n.
        powers: int64 ``[largest n]``, see :func:`powers`.
        first, until: int64 ``[B]``.
        count: largest number of positions of a sequence.
    """
    entries, back = table.shape[2], torch.arange(len(powers), device=tokens.device)
    offsets = torch.arange(len(lengths), device=tokens.device) * entries
    for b, (start, stop) in enumerate(zip(first.tolist(), until.tolist(), strict=True)):
        for block in range(start, min(stop, start + count), _BLOCK):
            positions = torch.arange(block, min(stop, start + count, block + _BLOCK), device=tokens.device)
            before = positions[:, None] - back
            terms = (tokens[b][before.clamp_min(0)] + 1) * powers
            hashes = terms.cumsum(1)[:, lengths - 1]
            places = offsets + _entries(hashes, lengths, entries)
            whole = positions[:, None] >= lengths - 1
            last = positions[:, None].expand_as(places)[whole].to(table.dtype)
            table[b].view(-1).scatter_reduce_(0, places[whole], last, "amax")


@operator("match_suffix", writes=("chain", "last", "counts"), triton=".ngrams_kernels")
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
    """Proposes the tokens that followed an earlier occurrence of each sequence's suffix.

    For every length n, the table holds the last occurrence of the n tokens that end at ``end[b]``, if it ends
    before ``committed[b]``. The occurrence with the longest match is used, of equals the last one; matches
    longer than the largest n count as the largest n. If its continuation reaches the end of the sequence, the
    proposal repeats it, as a text with this period would.

    The proposal has at least one token, and ends where the product of the acceptance rates of its tokens
    falls below ``least``. The class of a match is the largest n that it reaches. The acceptance rate of a
    class is estimated from earlier proposals of this class: which of their tokens then followed in the
    sequence.

    Args:
        chain: int64 ``[B, L]``, the last proposal; overwritten by the new proposal, padded with -1.
        last: int64 ``[B, 2]``, the position after which the last proposal was made (-1 for none), and its
            class; overwritten.
        counts: fp32 ``[B, C, 2]``, for each class the proposed tokens that followed, and all proposed tokens
            that were compared; updated.
        table, lengths, powers: see :func:`index_ngrams`.
        tokens: int64 ``[B, capacity]``.
        expected: fp32 ``[C]``, acceptance rate of each class before any proposal.
        committed, end: int64 ``[B]``, positions of the last committed token and of the last token.
        least: smallest product of acceptance rates.
    """
    sizes = lengths.tolist()
    bounds = zip(committed.tolist(), end.tolist(), last.tolist(), strict=True)
    for b, (limit, stop, (before, kind)) in enumerate(bounds):
        if 0 <= before <= stop:
            came = tokens[b, before + 1 : stop + 1][: chain.shape[1]].tolist()
            right = wrong = 0
            for token, proposed in zip(came, chain[b].tolist(), strict=False):
                if proposed < 0:
                    break
                if token != proposed:
                    wrong = 1
                    break
                right += 1
            if right + wrong:
                counts[b, kind] = counts[b, kind] * KEPT + counts.new_tensor([right, right + wrong])
        length, start = _longest(table[b], tokens[b], lengths, powers, limit, stop)
        chain[b], last[b] = -1, last.new_tensor([-1, 0])
        if not length:
            continue
        kind = max(c for c, n in enumerate(sizes) if n <= length)
        followed, judged = counts[b, kind]
        acceptance = (followed + PRIOR_TOKENS * expected[kind]) / (judged + PRIOR_TOKENS)
        likely = acceptance.expand(chain.shape[1]).cumprod(0)
        slots = torch.arange(max(1, int((likely >= least).sum())), device=tokens.device)
        chain[b, : len(slots)] = tokens[b, start + 1 + slots % (stop - start)]
        last[b] = last.new_tensor([stop, kind])


def _longest(
    table: Tensor, tokens: Tensor, lengths: Tensor, powers: Tensor, limit: int, stop: int
) -> tuple[int, int]:
    """Returns the length of the longest match and its last position; 0 and -1 if there is none."""
    newest = tokens[max(0, stop + 1 - len(powers)) : stop + 1].flip(0)
    hashes = ((newest + 1) * powers[: len(newest)]).cumsum(0)
    known = lengths[lengths <= len(newest)]
    rows = torch.arange(len(known), device=tokens.device)
    ends = table[rows, _entries(hashes[known - 1], known, table.shape[1])].tolist()
    suffix, best, seen = newest.tolist(), (0, -1), set()
    for length, at in zip(known.tolist(), ends, strict=True):
        if not 0 <= at < limit or at in seen:
            continue
        seen.add(at)
        there = tokens[max(0, at + 1 - len(suffix)) : at + 1].tolist()[::-1]
        pairs = zip(there, suffix, strict=False)
        equal = next((j for j, (one, other) in enumerate(pairs) if one != other), len(there))
        if equal >= length:
            best = max(best, (equal, at))
    return best

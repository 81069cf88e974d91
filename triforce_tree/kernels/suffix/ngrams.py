"""Finds where the newest tokens of a sequence occurred before, by hash tables of n-grams.

There is one table for each of C lengths n.

An entry is the last position at which an n-gram with this hash ends. To extend the tables by a token, and to
look up a suffix, takes C entries each, however long the sequence is; what an entry points to is compared with
the sequence, so that a collision can hide an occurrence, but never makes a false one.

The hash of the n-gram that ends at position i is the sum of (t_{i-j} + 1) powers_j over j < n, modulo 2^64
(Karp and Rabin's rolling hash), multiplied again to spread it.
"""

import torch
from torch import Tensor

from triforce_tree.kernels.operators import operator

_BASE, SPREAD = 0x2545F4914F6CDD1D, 0x1B873593CC9E2D51
# The bits of the spread hash that number an entry begin here, which leaves 24.
HASH_BITS, MOST_ENTRIES = 40, 1 << 24
KEPT = 0.9
"""Share of the evidence about a class of matches that is kept when new evidence is added."""
# Positions that the definition hashes at once.
_BLOCK = 4096
PRIOR_TOKENS = 4.0
"""Proposed tokens that the expected acceptance of a class weighs as much as."""


def powers(count: int, device: torch.device) -> Tensor:
    """int64 ``[count]``: the powers of the hash's base modulo 2^64."""
    values, value = [], 1
    for _ in range(count):
        values.append(value - (1 << 64) if value >> 63 else value)
        value = value * _BASE % (1 << 64)
    return torch.tensor(values, dtype=torch.int64, device=device)


def _entries(hashes: Tensor, lengths: Tensor, size: int) -> Tensor:
    """The entries of hashes of n-grams of these lengths in tables of ``size`` entries, a power of two."""
    mixed = (hashes ^ (hashes >> 32)) + lengths
    return ((mixed * SPREAD) >> HASH_BITS) & (size - 1)


@operator("index_ngrams", writes=("table",), triton=".ngrams_kernels")
def index_ngrams(
    table: Tensor, tokens: Tensor, lengths: Tensor, powers: Tensor, first: Tensor, until: Tensor, count: int
) -> None:
    """Enters the n-grams that end at positions ``first[b]`` to ``until[b] - 1``, at most ``count`` of them.

    Args:
        table: int32 ``[B, C, S]``, written: the last position of each n-gram by its hash, -1 for none; S is a
            power of two.
        tokens: int64 ``[B, capacity]``.
        lengths: int64 ``[C]``, ascending n.
        powers: int64 ``[largest n]``, see :func:`powers`.
        first, until: int64 ``[B]``.
        count: most positions of a sequence.
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

    For every length n the table names the last n-gram before position ``committed[b]`` that equals the suffix
    which ends at ``end[b]``. Of these occurrences the one that agrees with the suffix longest is taken, the
    last among equals; agreement is counted up to the largest n. Where its continuation reaches the end of the
    sequence, it goes on with what it proposed: the text repeats itself with that period.

    The chain, of one token or more, is as long as the product of the expected acceptance of its tokens is at
    least ``least``. That is estimated for each class of matches, by the largest n that they reach: from what
    of the earlier proposals of their class turned out to follow in the sequence.

    Args:
        chain: int64 ``[B, L]``, the last proposal; overwritten by the new one, padded with -1.
        last: int64 ``[B, 2]``, the position after which the last proposal was made, -1 for none, and its
            class; overwritten.
        counts: fp32 ``[B, C, 2]``, proposed tokens that followed, and those that were judged; updated.
        table, lengths, powers: see :func:`index_ngrams`.
        tokens: int64 ``[B, capacity]``.
        expected: fp32 ``[C]``, the acceptance of each class before anything was observed.
        committed, end: int64 ``[B]``: positions of the last token that is committed, and of the last one.
        least: see above.
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
    """Tokens that agree, and the last position of the occurrence; 0 and -1 for none."""
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

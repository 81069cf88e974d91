"""The longest earlier occurrence of a text's end, found on the host."""

from collections.abc import Sequence

import numpy as np

from triforce_tree.kv.cached_tokens import common_prefix

SHORTEST = 6
"""Tokens that an earlier occurrence has in common with the text's end at least."""
LONGEST = 64
"""More tokens in common are not counted."""
# An odd factor of the polynomial hash of n-grams, modulo 2**64.
_FACTOR, _MODULUS = 0x9E3779B97F4A7C15, 2**64


class SuffixIndex:
    """Positions of the n-grams of one text that grows.

    Those of the text at first are kept sorted by hash, 16 bytes a token; those of later tokens in a
    dictionary. A lookup takes the latest occurrence: O(log L) for a text of L tokens at first.

    Args:
        tokens: the text at first.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._text = list(tokens)
        self._later: dict[tuple[int, ...], int] = {}
        # The text's end is no earlier occurrence of itself.
        hashes = _hashes(np.asarray(self._text[:-1], dtype=np.uint64))
        order = np.argsort(hashes, kind="stable")
        self._sorted, self._ends = hashes[order], order + SHORTEST

    def begins(self, tokens: Sequence[int]) -> bool:
        """Whether these tokens begin with the text that is known, which is not empty."""
        known = len(self._text)
        return 0 < known <= len(tokens) and common_prefix(self._text, tokens) == known

    def extend(self, tokens: Sequence[int]) -> None:
        """Go on to ``tokens``, the whole text."""
        text, known = self._text, len(self._text)
        text.extend(tokens[known:])
        for end in range(max(known, SHORTEST), len(text)):
            self._later[tuple(text[end - SHORTEST : end])] = end

    def match(self) -> tuple[int, int]:
        """Where the latest earlier occurrence of the text's end ends, and how many tokens it has in common.

        (0, 0) where there is none.
        """
        text = self._text
        gram = tuple(text[-SHORTEST:])
        if len(gram) < SHORTEST:
            return 0, 0
        end = self._later.get(gram) or self._first(gram)
        if not end:
            return 0, 0
        common, most = SHORTEST, min(LONGEST, end)
        while common < most and text[end - 1 - common] == text[-1 - common]:
            common += 1
        return end, common

    def continuation(self, end: int, count: int) -> list[int]:
        """The ``count`` tokens after position ``end``; those of a text that repeats itself go on so."""
        text = self._text
        period = len(text) - end
        return [text[end + i % period] for i in range(count)]

    def _first(self, gram: tuple[int, ...]) -> int:
        # That of ``_hashes``: arrays of six numbers would take longer than the search.
        wanted = 0
        for token in gram:
            wanted = (wanted * _FACTOR + token) % _MODULUS
        at = int(self._sorted.searchsorted(np.uint64(wanted), side="right")) - 1
        if at < 0 or self._sorted[at] != wanted:
            return 0
        end = int(self._ends[at])
        return end if tuple(self._text[end - SHORTEST : end]) == gram else 0


def _hashes(tokens: np.ndarray) -> np.ndarray:
    """uint64 of each n-gram of ``SHORTEST`` tokens."""
    count = max(0, len(tokens) - SHORTEST + 1)
    found = np.zeros(count, dtype=np.uint64)
    for i in range(SHORTEST):
        found = found * np.uint64(_FACTOR) + tokens[i : i + count]
    return found

"""Finds an earlier occurrence of a text's last tokens, on the host."""

from collections.abc import Sequence

import numpy as np

from triforce_tree.kv.cached_tokens import common_prefix

SHORTEST = 6
"""An occurrence counts only if at least this many tokens match the end of the text."""
LONGEST = 64
"""Matching tokens are counted up to this number."""
# N-grams have a polynomial hash with this odd factor, modulo 2**64.
_FACTOR, _MODULUS = 0x9E3779B97F4A7C15, 2**64


class SuffixIndex:
    """Maps the n-grams (n = ``SHORTEST``) of one growing text to their positions.

    N-grams of the initial text are in arrays sorted by hash, 16 bytes per token; those of tokens appended
    later are in a dictionary. A lookup returns the latest occurrence in O(log L), where L is the number of
    initial tokens.

    Args:
        tokens: the initial text.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._text = list(tokens)
        self._later: dict[tuple[int, ...], int] = {}
        # The last n-gram is left out: it is no earlier occurrence of itself.
        hashes = _hashes(np.asarray(self._text[:-1], dtype=np.uint64))
        order = np.argsort(hashes, kind="stable")
        self._sorted, self._ends = hashes[order], order + SHORTEST

    def begins(self, tokens: Sequence[int]) -> bool:
        """Whether the indexed text is not empty and is a prefix of ``tokens``."""
        known = len(self._text)
        return 0 < known <= len(tokens) and common_prefix(self._text, tokens) == known

    def extend(self, tokens: Sequence[int]) -> None:
        """Indexes the new tokens at the end of ``tokens``, which is the whole text."""
        text, known = self._text, len(self._text)
        text.extend(tokens[known:])
        for end in range(max(known, SHORTEST), len(text)):
            self._later[tuple(text[end - SHORTEST : end])] = end

    def match(self) -> tuple[int, int]:
        """Finds the latest earlier occurrence of the last ``SHORTEST`` tokens of the text.

        Returns:
            the position after that occurrence, and the number of tokens before it that equal the end of the
            text; (0, 0) if there is no occurrence.
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
        """Returns the ``count`` tokens from position ``end`` on; past the end of the text they repeat."""
        text = self._text
        period = len(text) - end
        return [text[end + i % period] for i in range(count)]

    def _first(self, gram: tuple[int, ...]) -> int:
        # The same hash as in ``_hashes``; numpy arrays of six numbers would take longer than the search.
        wanted = 0
        for token in gram:
            wanted = (wanted * _FACTOR + token) % _MODULUS
        at = int(self._sorted.searchsorted(np.uint64(wanted), side="right")) - 1
        if at < 0 or self._sorted[at] != wanted:
            return 0
        end = int(self._ends[at])
        return end if tuple(self._text[end - SHORTEST : end]) == gram else 0


def _hashes(tokens: np.ndarray) -> np.ndarray:
    """Returns the uint64 hash of each n-gram of ``SHORTEST`` tokens."""
    count = max(0, len(tokens) - SHORTEST + 1)
    hashes = np.zeros(count, dtype=np.uint64)
    for i in range(SHORTEST):
        hashes = hashes * np.uint64(_FACTOR) + tokens[i : i + count]
    return hashes

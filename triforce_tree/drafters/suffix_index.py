"""Finds earlier occurrences of the end of a text, by an index of its n-grams on the host."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from triforce_tree.kv.cached_tokens import common_prefix
from triforce_tree.policy.matched_tokens import LONGEST, Match, TextMatches

LENGTHS = 8, 2
"""An occurrence of the last 8 tokens of the text counts; without one, an occurrence of the last 2."""
# N-grams have a polynomial hash with this odd factor, modulo 2**64.
_FACTOR, _MODULUS = 0x9E3779B97F4A7C15, 2**64


class SuffixIndex:
    """Finds earlier occurrences of the end of one growing text.

    Args:
        tokens: the initial text.

    Attributes:
        expected: the match after which the text goes on next; None if that is not judged.
        matches: what followed earlier matches.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._text = list(tokens)
        self.begin()
        # The last n-gram is left out: it is no earlier occurrence of itself.
        before = np.asarray(tokens[:-1], dtype=np.uint64)
        self._ngrams = [_NGrams(length, before) for length in LENGTHS]

    def begin(self) -> None:
        """Begins a request, which does not learn from earlier ones here."""
        self.expected: Match | None = None
        self.matches = TextMatches()

    def grows_to(self, tokens: Sequence[int]) -> bool:
        """Whether ``tokens`` is the indexed text with few new tokens, which :meth:`extend` then adds. A token
        takes about four times as long there as in a new index.
        """
        known = len(self._text)
        if not 0 < known <= len(tokens) < 4 / 3 * known or self._text[-1] != tokens[known - 1]:
            return False
        return common_prefix(self._text, tokens) == known

    def extend(self, tokens: Sequence[int]) -> None:
        """Indexes the new tokens at the end of ``tokens``, which is the whole text."""
        known = len(self._text)
        if known == len(tokens):
            return
        self._text.extend(tokens[known:])
        self._judge(known)
        for ngrams in self._ngrams:
            ngrams.extend(self._text, known)

    def _judge(self, known: int) -> None:
        """Compares the tokens from position ``known`` on with those after the expected match."""
        match, self.expected = self.expected, None
        if match is not None and match.common:
            new = self._text[known:]
            there = match.forced or self._text[match.end : match.end + len(new)]
            most, right = min(len(new), len(there)), common_prefix(new, there)
            self.matches.fresh.append((match.common, right, right < most))

    @contextmanager
    def followed_by(self, tokens: Sequence[int]) -> Iterator[None]:
        """Is a context in which provisional tokens end the text. Their n-grams are no occurrences."""
        known = len(self._text)
        self._text.extend(tokens)
        try:
            yield
        finally:
            del self._text[known:]

    def match(self) -> tuple[int, int]:
        """Finds the latest earlier occurrence of the last tokens of the text: of as many as the first of
        ``LENGTHS`` that has one.

        Returns:
            the position after that occurrence, and the number of tokens before it that equal the end of the
            text; (0, 0) if there is no occurrence.
        """
        text = self._text
        for ngrams in self._ngrams:
            if end := ngrams.latest(text):
                common, most = ngrams.length, min(LONGEST, end)
                while common < most and text[end - 1 - common] == text[-1 - common]:
                    common += 1
                return end, common
        return 0, 0

    def continuation(self, end: int, count: int) -> list[int]:
        """Returns the ``count`` tokens from position ``end`` on; past the end of the text they repeat."""
        following = self._text[end : end + count]
        return (following * -(-count // len(following)))[:count] if count else []


class _NGrams:
    """Maps the n-grams of one growing text to the positions after their latest occurrences.

    N-grams of the initial text are in arrays sorted by hash, 16 bytes per token; those of tokens appended
    later are in a dictionary. A lookup takes O(log L) time, where L is the number of initial tokens.

    Args:
        length: n.
        tokens: uint64 ``[L]``, of the initial text.
    """

    def __init__(self, length: int, tokens: np.ndarray) -> None:
        self.length = length
        self._later: dict[tuple[int, ...], int] = {}
        hashes = _hashes(tokens, length)
        order = np.argsort(hashes, kind="stable")
        # Their elements are read one by one, which takes longer in arrays.
        self._sorted, self._ends = hashes[order].data, (order + length).data

    def extend(self, text: Sequence[int], known: int) -> None:
        """Indexes the n-grams of a text that the tokens from position ``known`` on follow."""
        for end in range(max(known, self.length), len(text)):
            self._later[tuple(text[end - self.length : end])] = end

    def latest(self, text: Sequence[int]) -> int:
        """Returns the position after the latest earlier occurrence of the last n-gram; 0 without one."""
        gram = tuple(text[-self.length :])
        if len(gram) < self.length:
            return 0
        return self._later.get(gram) or self._initial(gram, text)

    def _initial(self, gram: tuple[int, ...], text: Sequence[int]) -> int:
        # The hash is that of ``_hashes``; numpy arrays of few numbers would take longer than the search.
        wanted = 0
        for token in gram:
            wanted = (wanted * _FACTOR + token) % _MODULUS
        # numpy's search releases Python's lock, which another thread may then keep for a while.
        at = bisect_right(self._sorted, wanted) - 1
        if at < 0 or self._sorted[at] != wanted:
            return 0
        end = self._ends[at]
        return end if tuple(text[end - self.length : end]) == gram else 0


def _hashes(tokens: np.ndarray, length: int) -> np.ndarray:
    """Returns the uint64 hash of each n-gram of ``length`` tokens."""
    count = max(0, len(tokens) - length + 1)
    hashes = np.zeros(count, dtype=np.uint64)
    for i in range(length):
        hashes = hashes * np.uint64(_FACTOR) + tokens[i : i + count]
    return hashes
